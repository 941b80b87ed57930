"""Worker processes that score samples, each with a deadline. One that is late or crashes is replaced."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rpc.child import Child, ChildExited, ChildTimeout
from services.reward.environment import worker_environment

LOAD_SECONDS = 60.0
"""How long a worker may take to start and to import a reward's module."""


@dataclass(frozen=True)
class Failure:
    """A sample that could not be scored."""

    reason: str
    """Why, for people."""
    died: bool = False
    """The process died over it, or was killed by somebody else."""


class PoolClosedError(Exception):
    """The pool was closed before the sample was scored, which says nothing about the sample."""


@dataclass
class _Worker:
    """A place for a process; empty until it is needed, and again after the process died."""

    child: Child | None = None
    loaded: set[str] = field(default_factory=set)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
        self.child = None
        self.loaded.clear()


class WorkerPool:
    """Scores samples on a fixed number of processes, in the order of the calls. Belongs to one event loop."""

    def __init__(self, workers: int, variables: Sequence[str] = ()) -> None:
        """Make a pool of `workers` processes; they start when they are first needed.

        `variables` of this process's environment are passed on to them, besides those that every worker gets. Raises
        MissingVariableError.
        """
        self._environment = worker_environment(variables)
        self._workers = [_Worker() for _ in range(workers)]
        self._closed = False
        self.scored = 0
        """Samples that were scored, or failed."""
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self._workers)

    async def load(self, reward: str) -> Failure | None:
        """Have a worker load a reward: None when it can be used, else why not."""
        answer = await self._ask(reward, None, LOAD_SECONDS)
        return answer if isinstance(answer, Failure) else None

    async def score(
        self, reward: str, samples: Sequence[RewardInput], timeout_seconds: float
    ) -> list[RewardOutput | Failure]:
        """Score samples, in order; the RPC and the stage both end up here.

        Args:
            reward: a name that `relaxd.rewards.resolve` knows.
            samples: what to score.
            timeout_seconds: for each sample; neither waiting for a worker nor loading the reward counts. A worker that
                takes longer is killed, and whatever it started with it.

        An exception, a value that is no finite number, a hang or a crash is a Failure of that sample alone. A sample
        over which a process died is tried once more: it may have been killed from outside, or for want of memory. When
        this coroutine is cancelled, so is the work. Raises PoolClosedError when the pool is closed meanwhile.
        """
        tasks = [asyncio.create_task(self._score(reward, sample, timeout_seconds)) for sample in samples]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Kill the processes."""
        self._closed = True
        for worker in self._workers:
            worker.kill()

    async def _score(self, reward: str, sample: RewardInput, timeout_seconds: float) -> RewardOutput | Failure:
        answer = await self._ask(reward, sample, timeout_seconds)
        if isinstance(answer, Failure) and answer.died:
            answer = await self._ask(reward, sample, timeout_seconds)
        self.scored += 1
        return answer if isinstance(answer, Failure) else RewardOutput(answer["reward"], answer["parts"])

    async def _ask(self, reward: str, sample: RewardInput | None, timeout_seconds: float) -> dict[str, Any] | Failure:
        worker = await self._free.get()
        answered = False
        try:
            self._raise_if_closed()
            child = await self._ready(worker)
            if reward not in worker.loaded:
                answer = await child.request("load", {"reward": reward}, LOAD_SECONDS)
                if "error" in answer:
                    answered = True
                    return Failure(answer["error"])
                worker.loaded.add(reward)
            if sample is not None:
                answer = await child.request("score", {"reward": reward, "sample": asdict(sample)}, timeout_seconds)
            else:
                answer = {}
            answered = True
            return Failure(answer["error"]) if "error" in answer else answer
        except ChildTimeout:
            self._raise_if_closed()
            what = "scoring a sample" if reward in worker.loaded else "loading the reward"
            limit = timeout_seconds if reward in worker.loaded else LOAD_SECONDS
            return Failure(f"{what} took longer than {limit:g} s; its process was killed")
        except ChildExited as error:
            self._raise_if_closed()
            return Failure(f"the process that ran the reward died: {_how(error.exit_code)}", died=True)
        finally:
            # Late, dead, or given up by its caller in the middle of a sample: the next sample gets a new process.
            if not answered:
                worker.kill()
            self._free.put_nowait(worker)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise PoolClosedError("the pool of reward workers was closed")

    async def _ready(self, worker: _Worker) -> Child:
        if worker.child is None or not worker.child.alive:
            worker.kill()
            worker.child = await Child.start(
                "services.reward.worker", env=self._environment, inherit=False, name="reward worker"
            )
        return worker.child


def _how(exit_code: int) -> str:
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
