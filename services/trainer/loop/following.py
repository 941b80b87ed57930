"""The training thread of every rank but the first: does what rank 0 says."""

import time
from pathlib import Path

from relaxd.board import Board, BoardUnavailable, Delivery
from services.trainer.batch.groups import TRAIN_COLUMNS, Group, check_group
from services.trainer.batch.plan import MicroBatchRound
from services.trainer.batch.step_file import read_step_file, step_file_path
from services.trainer.checkpoints.part import CheckpointPart
from services.trainer.learner.learner import Learner
from services.trainer.loop.rounds import RoundRunner
from services.trainer.megatron.rank_channel import TICK_SECONDS, RankChannel


def follow(
    *,
    channel: RankChannel,
    learner: Learner,
    runner: RoundRunner,
    board: Board,
    run_folder: Path,
    patience_seconds: float,
) -> None:
    """Do what rank 0 says, for ever.

    Args:
        channel: the control channel.
        learner: this rank's.
        runner: this rank's.
        board: where this rank fetches the columns of its groups.
        run_folder: where the step files are.
        patience_seconds: how long a board that is away is waited for.

    Raises:
        RuntimeError: rank 0 is gone.
        BoardUnavailable: the board was away for too long.
    """
    groups: dict[str, Group] = {}
    part = CheckpointPart(learner)
    while True:
        command = channel.receive()
        match command["do"]:
            case "round":
                entry = MicroBatchRound.from_json(command["round"])
                missing = {group_id for group_id in runner.own_groups(entry) if group_id not in groups}
                deliveries = [Delivery(**value) for value in command["deliveries"] if value["group_id"] in missing]
                groups |= _load(board, deliveries, patience_seconds)
                runner.run(entry, groups)
            case "finish":
                learner.finish(command["normalizer"])
                channel.add_up(learner.checksum())
                groups.clear()
            case "discard":
                learner.discard()
                groups.clear()
            case "replay":
                path = step_file_path(run_folder, command["step"])
                with channel.disk.together(f"reading {path}") as progress:
                    file = read_step_file(path, progress)
                runner.replay(file, command["skipped_updates"])
                channel.add_up(learner.checksum())
            case "wait":
                with channel.disk.together(command["what"]):
                    pass
            case "save":
                learner.save_hf(Path(command["folder"]))
            case "begin_checkpoint":
                channel.add_up(learner.checksum())
                part.begin(Path(command["folder"]))
            case "end_checkpoint":
                part.end()
            case "abandon_checkpoint":
                part.abandon()
            case "offload" | "onload" as move:
                before, after = learner.offload() if move == "offload" else learner.onload()
                channel.add_up(before)
                channel.add_up(after)
            case "verify_checkpoint":
                channel.agree(part.intact(Path(command["folder"])))
            case "restore":
                part.restore(Path(command["folder"]), command["step"], same_layout=command["same_layout"])
            case unknown:
                raise RuntimeError(f"rank 0 says {unknown!r}, which this rank doesn't know")


def _load(board: Board, deliveries: list[Delivery], patience_seconds: float) -> dict[str, Group]:
    if not deliveries:
        return {}
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            loaded = board.load(deliveries, tuple(TRAIN_COLUMNS))
        except BoardUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(TICK_SECONDS)
            continue
        # A group that was closed meanwhile is left out: rank 0 notices before the step closes, and gives the step up.
        return {
            delivery.group_id: check_group(delivery.group_id, columns)
            for delivery, columns in zip(deliveries, loaded, strict=True)
            if columns is not None
        }
