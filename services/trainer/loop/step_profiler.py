"""Profiles of steps: rank 0 chooses the recorded steps, and each chosen rank records."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from relaxd.config import RunConfig
from relaxd.process.torch_profile import TraceRecorder, write_or_log
from relaxd.rpc.errors import FailedPrecondition, Unavailable
from relaxd.run_folder import PROFILES
from services.trainer.megatron.rank_messages import message

logger = logging.getLogger(__name__)

MEMORY_EVENTS = 200_000
"""Maximum number of recent allocations in a memory recording; each takes a few hundred bytes."""


@message
@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of a profile: recorded ranks, Python stacks, memory snapshots."""

    ranks: tuple[int, ...]
    stacks: bool = False
    memory: bool = False

    def files(self, run_folder: Path, step: int) -> Iterable[Path]:
        """Yield the paths of the trace and memory files that recording a step writes."""
        for rank in self.ranks:
            yield trace_path(run_folder, step, rank)
            if self.memory:
                yield memory_path(run_folder, f"step-{step:06d}", rank)


def trace_path(run_folder: Path, step: int, rank: int) -> Path:
    """Return the path of a rank's trace of a step."""
    return run_folder / PROFILES / f"trainer-step-{step:06d}-rank{rank}.json.gz"


def memory_path(run_folder: Path, moment: str, rank: int) -> Path:
    """Return the path of a rank's GPU memory snapshot."""
    return run_folder / PROFILES / f"trainer-{moment}-rank{rank}-memory.pickle"


class ProfilePlan:
    """Rank 0's plan of steps to record: those in the configuration, and those requested by calls."""

    def __init__(self, config: RunConfig) -> None:
        """Plan to record the steps in trainer.profile."""
        profile = config.trainer.profile
        options = ProfileOptions(ranks=profile.ranks, stacks=profile.stacks, memory=profile.memory)
        self._last = config.run.steps
        self._lock = threading.Lock()
        self._begun: int | None = None
        """Number of the newest step begun since the ranks started; None before the first."""
        self._planned = dict.fromkeys(profile.steps, options)

    def request(self, steps: int, options: ProfileOptions) -> range:
        """Plan to record the next `steps` steps, and return their numbers. Any thread may call this.

        Raises FailedPrecondition: fewer steps are left, or one is already planned. Unavailable: the ranks replay steps,
        and the next one isn't known yet.
        """
        with self._lock:
            if self._begun is None:
                raise Unavailable("no step has begun since the trainer's ranks started: ask again later")
            left = self._last - self._begun
            if steps > left:
                raise FailedPrecondition(f"steps is {steps}, but only {left} of the run's {self._last} have not begun")
            asked = range(self._begun + 1, self._begun + 1 + steps)
            if planned := sorted(self._planned.keys() & asked):
                raise FailedPrecondition(
                    f"step {planned[0]} will be recorded already, for an earlier call or by trainer.profile.steps: ask "
                    f"again once step {planned[-1]} has begun"
                )
            self._planned |= dict.fromkeys(asked, options)
            return asked

    def begin(self, step: int) -> ProfileOptions | None:
        """Begin a step. Return its recording options, or None if it isn't planned or was begun before."""
        with self._lock:
            self._begun = step
            return self._planned.pop(step, None)


@dataclass
class StepProfiler:
    """Profiles steps on one rank. Used by the rank's training thread."""

    rank: int
    run_folder: Path
    keeps_memory: bool
    """True if the rank records memory allocations in all steps."""
    recorder: TraceRecorder | None = None
    step: int = 0
    memory: bool = False
    """True if a memory snapshot is written after the step."""

    def begin(self, step: int, options: ProfileOptions) -> None:
        """Start recording a step if the options name this rank."""
        if self.rank not in options.ranks:
            return
        self.step, self.memory = step, options.memory and torch.cuda.is_available()
        if self.memory and not self.keeps_memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self.recorder = TraceRecorder(stacks=options.stacks)

    def end(self) -> None:
        """Write the trace, and the memory snapshot if requested, if this rank recorded the step."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        write_or_log(recorder.write, trace_path(self.run_folder, self.step, self.rank))
        if self.memory:
            write_or_log(_write_memory, memory_path(self.run_folder, f"step-{self.step:06d}", self.rank))
            if not self.keeps_memory:
                torch.cuda.memory._record_memory_history(enabled=None)


def step_profiler(config: RunConfig, rank: int, run_folder: Path) -> StepProfiler:
    """Return a rank's step profiler. With trainer.profile.memory, the rank records allocations from now on and writes a
    snapshot when memory runs out. Call this before the rank allocates memory."""
    profile = config.trainer.profile
    keeps = profile.memory and rank in profile.ranks
    if keeps and not torch.cuda.is_available():
        logger.warning("trainer.profile.memory is true, but rank %d runs on the CPU: no memory is recorded", rank)
        keeps = False
    if keeps:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        path = memory_path(run_folder, "out-of-memory", rank)
        # torch has no public callback for this. A later snapshot would lack the tensors of the unwound stack.
        torch._C._cuda_attach_out_of_memory_observer(  # type: ignore[attr-defined]
            lambda *_: write_or_log(_write_memory, path)
        )
    return StepProfiler(rank, run_folder, keeps)


def _write_memory(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
