"""Runs rank 0's commands on every rank of trainer or critic, in a thread. Also each rank's part of checkpoints."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from torch.profiler import record_function

from relaxd import telemetry
from relaxd.board import Board
from relaxd.board.committed_steps import CommittedSteps
from relaxd.config import RunConfig
from relaxd.process.child_server import Outbox
from relaxd.rpc.errors import InvalidArgument
from relaxd.v1.rank_pb2 import WorkRequest, WorkResponse
from services.trainer.learner.checkpoint_files import rank_of
from services.trainer.learner.snapshot import Checkpointed, Snapshot
from services.trainer.loop.checkpoint_folders import CheckpointBroken, has_room, verify
from services.trainer.megatron.channels import RankChannel
from services.trainer.megatron.disk_work import Progress
from services.trainer.megatron.rank_messages import command

logger = logging.getLogger(__name__)


class CheckpointPart:
    """Takes, writes and verifies this rank's part of checkpoints.

    All ranks call begin, end and intact together.
    """

    def __init__(self, learner: Checkpointed) -> None:
        self._learner = learner
        self._disk = learner.world.disk
        self._snapshot: Snapshot | None = None
        self._partial = Path()
        self._begun = 0

    def begin(self, partial: Path) -> int:
        """Take a snapshot of this rank's training state. Return the number of bytes that this rank will write.

        `write` will write it to `partial`, an empty folder.
        """
        self._snapshot, self._partial = self._learner.snapshot(partial), partial
        self._begun += 1
        return self._snapshot.nbytes

    def write(self, problem: str = "") -> None:
        """Start writing the snapshot. With a `problem`, write nothing: rank 0 reports it after the copies end."""
        assert self._snapshot is not None, "begin comes first"
        name, rank = self._name, self._learner.world.rank

        def tell(report: dict[str, Any]) -> None:
            self._disk.tell(name, json.dumps(report))

        arguments = (self._snapshot, self._partial, rank, problem, tell)
        threading.Thread(target=_write, args=arguments, name="write-checkpoint", daemon=True).start()

    def reports(self) -> list[dict[str, Any]] | None:
        """Return each rank's report: "files" by name, or "error". Return None until all ranks have finished."""
        results = self._disk.results(self._name)
        return None if results is None else [json.loads(report) for report in results]

    def writing(self) -> list[int]:
        """Return the ranks that haven't finished writing their part of the checkpoint."""
        return self._disk.silent(self._name)

    def copied(self, seconds: float) -> bool:
        """Wait up to `seconds` until the snapshot is copied off the device. Return True if it is."""
        return self._snapshot is None or self._snapshot.copies.wait(seconds)

    def end(self) -> None:
        """Discard the checkpoint's snapshot and the ranks' reports."""
        self._snapshot = None
        self._disk.forget(self._name)

    def intact(self, path: Path) -> bool:
        """Verify this rank's share of a checkpoint's files; log the first damage."""
        world = self._learner.world
        with self._disk.all_ranks(f"checking {path}") as progress:
            try:
                verify(path, world.rank, world.size, progress)
            except CheckpointBroken as error:
                logger.error("checkpoint %s can't be used: %s", path.name, error)
                return False
        return True

    @property
    def _name(self) -> str:
        """Name under which all ranks report that they have written the last checkpoint."""
        return f"checkpoint {self._begun}"


def _write(snapshot: Snapshot, partial: Path, rank: int, problem: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Write this rank's files and report them. An error is reported as well, and doesn't end training."""
    report: dict[str, Any]
    try:
        if problem:
            snapshot.give_up()
            report = {"files": {}} if rank else {"error": problem}
        else:
            report = {"files": snapshot.write()}
    except Exception as error:
        logger.exception("rank %d could not write its part of %s", rank, partial.name)
        report = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
        with suppress(OSError):  # free the space before rank 0 removes the folder
            for path in partial.iterdir():
                if rank_of(path.name) == rank:
                    path.unlink(missing_ok=True)
    tell(report)


P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound="CommandedRank")


@dataclass
class CommandedRank:
    """State of one rank of trainer or critic for its commands. Used by its training thread only."""

    channel: RankChannel
    """Channel from rank 0 to the other ranks."""
    learner: Checkpointed
    """Learner of this rank, whose state checkpoints save."""
    checkpoint: CheckpointPart
    """This rank's part of the checkpoint that is being written."""
    board: Board
    """The run's board, from which columns and the ledger are read."""
    run_folder: Path
    """Folder for checkpoints: the run's, or a follower's subfolder."""

    @property
    def record_folder(self) -> Path:
        """Run folder that holds the recorded steps; a follower's `run_folder` is a subfolder."""
        return self.run_folder

    @cached_property
    def steps(self) -> CommittedSteps:
        """The run's committed steps."""
        return CommittedSteps(self.board.ledger, self.run_folder)

    def run(self: R, function: Callable[Concatenate[R, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Rank 0: call a command on all ranks. Return this rank's result."""
        self.channel.send((function, arguments, named))
        return self._call(function, arguments, named)

    def follow(self) -> NoReturn:
        """Other ranks: call rank 0's commands.

        Raises:
            RuntimeError: rank 0 is gone, or was silent for longer than the channel's deadline.
            BoardUnavailable: the board was unavailable for longer than half of that deadline.
        """
        while True:
            self._call(*self.channel.receive())

    def _call(self, function: Callable[..., T], arguments: Sequence[Any], named: Mapping[str, Any]) -> T:
        with record_function(function.__name__.title().replace("_", "")):  # its name in a profile
            return function(self, *arguments, **named)

    @contextmanager
    def rank0_only(self, work: str) -> Iterator[Progress]:
        """Rank 0: do disk work in the block while the other ranks wait; see `DiskWork.all_ranks`."""
        self.channel.send((wait_for_disk, (work,), {}))
        with self.channel.disk.all_ranks(work) as progress:
            yield progress

    def checksum(self) -> int:
        """Return the checksum of the weights, summed over all ranks. Collective."""
        return self.channel.sum_over_ranks(self.learner.checksum())


@command
def wait_for_disk(rank: CommandedRank, work: str) -> None:
    """Wait until rank 0 has finished its disk work. `CommandedRank.rank0_only` sends this command."""
    with rank.channel.disk.all_ranks(work):
        pass


@command
def prepare_checkpoints(rank: CommandedRank) -> None:
    """Prepare memory for the first checkpoint, so that it starts sooner."""
    rank.learner.prepare_snapshots()


@command
def begin_checkpoint(rank: CommandedRank, folder: Path) -> tuple[int, int]:
    """Snapshot the training state on all ranks. Start writing it to an empty folder if the disk has room.

    Return the checksum of the weights, and the bytes that all ranks will write.
    """
    checksum = rank.checksum()
    size = rank.channel.sum_over_ranks(rank.checkpoint.begin(folder))
    fits = rank.channel.all_ranks_agree(has_room(folder, size))
    rank.checkpoint.write("" if fits else "nothing of it was written, because it doesn't fit")
    return checksum, size


@command
def end_checkpoint(rank: CommandedRank) -> None:
    """Discard the checkpoint's snapshot, once all ranks have finished or failed, or the time limit has passed."""
    rank.checkpoint.end()


@command
def verify_checkpoint(rank: CommandedRank, folder: Path) -> bool:
    """Return True if all files of a checkpoint are intact; each rank reads a share of them."""
    return rank.channel.all_ranks_agree(rank.checkpoint.intact(folder))


@command
def restore_checkpoint(rank: CommandedRank, folder: Path, step: int, *, same_layout: bool) -> None:
    """Load this rank's part of a checkpoint. Raises CheckpointError if it doesn't fit this model."""
    rank.learner.restore(folder, step, same_layout=same_layout)


END_SECONDS = 5.0
"""Seconds that a failed rank waits before it exits, so that its parent can read the reason."""


class RankThread:
    """Runs a rank's work in a thread. Any error ends the process; the parent then restarts the world or the replica."""

    def __init__(self) -> None:
        self.number = 0
        self.alone = True
        """True if this is the only rank."""
        self.events: Outbox[WorkResponse] = Outbox()

    def start(self, request: WorkRequest, work: Callable[[WorkRequest, RunConfig], None]) -> None:
        """Run `work` with the request and its configuration in a new thread. `work` never returns."""
        os.environ.update(request.environment)
        self.number = int(os.environ.get("RANK", "0"))
        self.alone = os.environ.get("WORLD_SIZE", "1") == "1"
        threading.Thread(target=self._run, args=(request, work), name=request.role, daemon=True).start()

    def fail(self, reason: str, *, start_refused: bool = False) -> None:
        """Report to the parent process why this rank can't continue; `start_refused` as in WorkResponse."""
        self.events.put(WorkResponse(failed=reason, start_refused=start_refused))

    def _run(self, request: WorkRequest, work: Callable[[WorkRequest, RunConfig], None]) -> None:
        telemetry.setup_logging(f"{request.replica_id}/rank{self.number}", request.log_level)
        logging.getLogger("megatron").setLevel(logging.WARNING)  # it lists every parameter
        telemetry.setup(request.role, request.replica_id, f"rank{self.number}")
        config = RunConfig.model_validate_json(request.config_json)
        telemetry.write_traces(config.trace_folder(request.folder))
        try:
            work(request, config)
        except BaseException as error:
            logger.exception("rank %d failed", self.number)
            self.fail(f"{type(error).__name__}: {error}", start_refused=isinstance(error, InvalidArgument))
            telemetry.shutdown()
            time.sleep(END_SECONDS)
            os._exit(1)
