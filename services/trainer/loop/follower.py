"""The training thread of all ranks except rank 0: runs rank 0's commands."""

import time
from pathlib import Path

from relaxd.board import TRAIN, Board, BoardUnavailable, Delivery
from services.trainer.batch.groups import TrainGroup, check_group
from services.trainer.batch.plan import MicroBatchRound
from services.trainer.batch.step_file import read_step_file, step_file_path
from services.trainer.checkpoints.part import CheckpointPart
from services.trainer.learner.learner import Learner
from services.trainer.loop.round_runner import RoundRunner
from services.trainer.megatron.rank_channel import TICK_SECONDS, RankChannel


def follow(
    *,
    channel: RankChannel,
    learner: Learner,
    runner: RoundRunner,
    board: Board,
    run_folder: Path,
    board_timeout_seconds: float,
) -> None:
    """Run rank 0's commands. Never returns.

    Args:
        channel: the control channel.
        learner: this rank's learner.
        runner: this rank's round runner.
        board: source of the groups' columns.
        run_folder: the run's folder, for step files.
        board_timeout_seconds: longest wait for an unavailable board.

    Raises:
        RuntimeError: rank 0 is gone, or sent an unknown command.
        BoardUnavailable: the board was unavailable for longer than `board_timeout_seconds`.
    """
    groups: dict[str, TrainGroup] = {}
    part = CheckpointPart(learner)
    while True:
        command = channel.receive()
        match command["do"]:
            case "round":
                entry = MicroBatchRound.from_json(command["round"])
                missing = {group_id for group_id in runner.own_groups(entry) if group_id not in groups}
                deliveries = [Delivery(**value) for value in command["deliveries"] if value["group_id"] in missing]
                groups |= _load(board, deliveries, board_timeout_seconds)
                runner.run(entry, groups)
            case "finish":
                learner.finish(command["normalizer"])
                channel.sum_over_ranks(learner.checksum())
                groups.clear()
            case "discard":
                learner.discard()
                groups.clear()
            case "replay":
                path = step_file_path(run_folder, command["step"])
                with channel.disk.all_ranks(f"reading {path}") as progress:
                    file = read_step_file(path, progress)
                runner.replay(file, command["skipped_updates"])
                channel.sum_over_ranks(learner.checksum())
            case "wait":
                with channel.disk.all_ranks(command["work"]):
                    pass
            case "save":
                learner.save_hf(Path(command["folder"]))
            case "begin_checkpoint":
                channel.sum_over_ranks(learner.checksum())
                part.begin(Path(command["folder"]))
            case "end_checkpoint":
                part.end()
            case "abandon_checkpoint":
                part.abandon()
            case "offload" | "onload" as move:
                before, after = learner.offload() if move == "offload" else learner.onload()
                channel.sum_over_ranks(before)
                channel.sum_over_ranks(after)
            case "verify_checkpoint":
                channel.all_ranks_agree(part.intact(Path(command["folder"])))
            case "restore":
                part.restore(Path(command["folder"]), command["step"], same_layout=command["same_layout"])
            case unknown:
                raise RuntimeError(f"rank 0 sent the unknown command {unknown!r}")


def _load(board: Board, deliveries: list[Delivery], board_timeout_seconds: float) -> dict[str, TrainGroup]:
    if not deliveries:
        return {}
    names = board.needs(TRAIN)
    deadline = time.monotonic() + board_timeout_seconds
    while True:
        try:
            loaded = board.load(deliveries, names)
        except BoardUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(TICK_SECONDS)
            continue
        # Leave out a group that was closed meanwhile: rank 0 notices before the step closes, and discards the step.
        return {
            delivery.group_id: check_group(delivery.group_id, columns, names)
            for delivery, columns in zip(deliveries, loaded, strict=True)
            if columns is not None
        }
