"""Times of a step: of its groups in each stage, and of the trainer."""

from collections.abc import Sequence

from relaxd.board import TRAIN, StageTime
from relaxd.board.types import MICROSECONDS
from services.trainer.loop.step_builder import StepBuilder

WORK_NAMES = {"rollout": "generate", "reward": "score", TRAIN: "in_step"}
"""Names of a stage's work, in metrics, that differ from the stage's."""


def group_times(opened: StepBuilder, ended: int) -> dict[str, float]:
    """Return the times that a step's groups spent in each stage, in seconds, averaged over groups.

    Args:
        opened: the step, with its groups.
        ended: end of the step's work, in microseconds of Unix time.

    Returns:
        For each stage queue_<stage>_seconds and its work time (generate_seconds, score_seconds and so on;
        in_step_seconds for the step itself), the longest generation as generate_seconds_max, and group_seconds from
        publish to the end of the step. group_seconds exceeds the sum of the others by commits and failed attempts.
    """
    stages: dict[str, list[StageTime]] = {}
    ages = []
    for group_id, taken in opened.members.items():
        before = opened.times.get(group_id)
        if before is None:  # closed meanwhile: the step can't be committed
            continue
        ages.append(max(0, ended - before.published) / MICROSECONDS)
        for name, time in before.stages.items():
            stages.setdefault(name, []).append(time)
        stages.setdefault(TRAIN, []).append(StageTime(taken.delivery.enqueued_at, opened.started_at[group_id], ended))
    result = {"group_seconds": _mean(ages)} if ages else {}
    for name, all_times in stages.items():
        work = WORK_NAMES.get(name, name)
        result[f"queue_{name}_seconds"] = _mean([time.queue_seconds for time in all_times])
        result[f"{work}_seconds"] = _mean([time.work_seconds for time in all_times])
        if work == "generate":
            result["generate_seconds_max"] = max(time.work_seconds for time in all_times)
    return result


def trainer_times(opened: StepBuilder, step_seconds: float, checkpoint_seconds: float) -> dict[str, float]:
    """Return the trainer's times in a step, in seconds.

    Args:
        opened: the step.
        step_seconds: time from the end of the last step to the end of this one.
        checkpoint_seconds: time in which checkpoints blocked training.
    """
    return {
        "step_seconds": step_seconds,
        "wait_seconds": opened.waited,
        "train_seconds": opened.worked,
        "sync_wait_seconds": opened.held_back,
        "step_file_seconds": opened.wrote,
        **({"checkpoint_seconds": checkpoint_seconds} if checkpoint_seconds else {}),
        "trainer_idle_share": max(0.0, 1 - opened.worked / step_seconds) if step_seconds else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
