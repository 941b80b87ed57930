"""The times of a step: what its groups took on their way to it, and what the trainer did meanwhile."""

from collections.abc import Sequence

from relaxd.board import StageTime
from relaxd.board.times import MICROSECONDS
from relaxd.telemetry.spans import SPAN_NAMES
from services.trainer.loop.intake import STAGE
from services.trainer.loop.step_builder import StepBuilder


def group_times(opened: StepBuilder, ended: int) -> dict[str, float]:
    """The ways of a step's groups, each the mean over the groups, in seconds.

    Args:
        opened: the step, with its groups.
        ended: when the step's work ended, in microseconds of Unix time.

    Returns:
        For each stage queue_<stage>_seconds and the time that it worked (generate_seconds, score_seconds and so on;
        in_step_seconds for the step itself), the longest generation as generate_seconds_max, and group_seconds from
        publish to the end of the step. What group_seconds has beyond the others went into commits, and into attempts
        that failed.
    """
    stages: dict[str, list[StageTime]] = {}
    ages = []
    for group_id, taken in opened.members.items():
        before = opened.times.get(group_id)
        if before is None:  # closed by somebody else just now: the step can't be committed
            continue
        ages.append(max(0, ended - before.published) / MICROSECONDS)
        for name, time in before.stages.items():
            stages.setdefault(name, []).append(time)
        stages.setdefault(STAGE, []).append(StageTime(taken.delivery.enqueued_at, opened.started_at[group_id], ended))
    result = {"group_seconds": _mean(ages)} if ages else {}
    for name, all_times in stages.items():
        work = "in_step" if name == STAGE else SPAN_NAMES.get(name, name)
        result[f"queue_{name}_seconds"] = _mean([time.queue_seconds for time in all_times])
        result[f"{work}_seconds"] = _mean([time.work_seconds for time in all_times])
        if work == "generate":
            result["generate_seconds_max"] = max(time.work_seconds for time in all_times)
    return result


def trainer_times(opened: StepBuilder, step_seconds: float, checkpoint_seconds: float) -> dict[str, float]:
    """What the trainer did in a step, in seconds of its own clock.

    Args:
        opened: the step.
        step_seconds: from the end of the last step to the end of this one.
        checkpoint_seconds: for how long training stood still for checkpoints meanwhile.
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
