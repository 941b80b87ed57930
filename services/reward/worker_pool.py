"""A pool of worker processes that score samples. A worker that is late or crashes is replaced."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relaxd.alerts.user_messages import Told, ignore
from relaxd.config import RewardConfig
from relaxd.process.child import Child, ChildError, ChildExited
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.calling import RewardStacks
from relaxd.sandbox.enclosure import Measure
from relaxd.v1.reward_worker_pb2 import LoadRewardRequest, LoadRewardResponse, ScoreSamplesRequest
from relaxd.v1.reward_worker_pb2_grpc import RewardWorkerStub
from relaxd.waiting import duration
from services.reward.deadline import Deadline, slow_after
from services.reward.judge import Ask, Questions, no_judge
from services.reward.samples import request_of_samples
from services.reward.worker_enclosure import missing_of, plan_of, worker_environment

SHOWN_PROMPT = 80
REWARD_OF_RUN = ""
"""Name of the run's reward in the pool. Rewards of evaluation sets have other names."""
START_SECONDS = 60.0
"""Deadline of starting a worker, in seconds."""
LOAD_SECONDS = 60.0
"""Deadline of loading a reward, in seconds. Loading imports the reward's module."""


@dataclass(frozen=True)
class Failure:
    """Result of a sample that could not be scored."""

    reason: str
    """Reason for the failure, for people."""
    died: bool = False
    """True if the worker process died while it scored the sample."""
    late: bool = False
    """True if scoring exceeded the sample's deadline."""
    no_judge: bool = False
    """True if the reward asked the judge, but no judge is available here."""
    traceback: str = ""
    """Traceback of the exception that the reward raised; empty without one."""


Scored = list[RewardOutput | Failure]
Score = Callable[[Sequence[RewardInput]], Awaitable[Scored]]
"""Async function that scores samples of one prompt. Returns the outcomes in the samples' order."""


class PoolClosedError(Exception):
    """The pool was closed before the sample was scored. The sample did not fail."""


class WorkerStartError(Exception):
    """No worker can be started here: there are too few descriptors or processes, no memory, or no interpreter.

    The sample did not fail.
    """


@dataclass
class Running:
    """Samples of one prompt that a worker is scoring."""

    prompt: str
    """Text of the samples' prompt, shortened."""
    count: int
    """Number of samples that are being scored together."""
    slow_after: float
    """Seconds after which the scoring is reported as slow."""
    stacks: RewardStacks
    """Stack traces that the worker process has written."""
    deadline: Deadline

    def __post_init__(self) -> None:
        self.stacks.place = ""  # of another call

    @property
    def what(self) -> str:
        """Words for what is being scored: "a sample", or "a group of 8 samples"."""
        return "a sample" if self.count == 1 else f"a group of {self.count} samples"

    @property
    def seconds(self) -> float:
        """Seconds that the scoring has taken so far, without waits for the judge and times in which this process was
        stopped."""
        return self.deadline.seconds

    @property
    def where(self) -> str:
        """Place of the reward in the source when the sample became slow: " (at reward.py:12, in score)", or ""."""
        return f" (at {self.stacks.place})" if self.stacks.place else ""

    def __str__(self) -> str:
        return f"{self.what} for {duration(self.seconds)}{self.where}; its prompt: {self.prompt!r}"


@dataclass
class _Worker:
    """A place for one worker process. It has none until it is first needed, and after its process has died."""

    child: Child | None = None
    stacks: RewardStacks = field(default_factory=RewardStacks)
    """Stack traces that the worker process has written."""
    questions: Questions | None = None
    """Forwards the worker process's questions to the judge."""
    carrying: asyncio.Task[None] | None = None
    """Task that forwards the worker's questions until its process ends."""
    temporary: str = ""
    """Folder for temporary files of the worker's rewards; empty if the worker isn't enclosed."""
    loaded: set[str] = field(default_factory=set)
    running: Running | None = None
    outdated: bool = False
    """True if the worker's rewards must be reloaded. The next sample then gets a new process."""

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()
        if self.temporary:
            _remove(self.temporary)
        self.child = None
        self.temporary = ""
        self.loaded.clear()
        self.outdated = False


def _remove(folder: str) -> None:
    """Remove the temporary folder of a killed worker, in a thread unless the folder is empty."""
    try:
        os.rmdir(folder)
    except OSError:
        threading.Thread(target=shutil.rmtree, args=(folder, True), name="remove files").start()


class WorkerPool:
    """Scores samples in a fixed number of worker processes, in the order of the calls. Lives in one event loop."""

    def __init__(
        self,
        workers: int,
        config: RewardConfig | None = None,
        ask: Ask = no_judge,
        others: Mapping[str, RewardConfig] | None = None,
        secret_files: Sequence[str] = (),
        told: Told = ignore,
    ) -> None:
        """Make a pool without starting a process.

        Args:
            workers: number of processes. Each starts when it is first needed.
            config: the run's reward; its `environment` names variables that workers inherit in addition to the usual.
            ask: forwards the workers' questions to the judge.
            others: further rewards, by the names that `load` and `score` accept.
            secret_files: files that workers can't open.
            told: called with the messages that rewards write for users.

        Raises MissingVariableError, MissingPathError.
        """
        self._ask = ask
        self._told = told
        self._config = config or RewardConfig(name="dummy")
        self.enclosure: tuple[Measure, ...] = ()
        """Description of the workers' enclosure; empty before one has loaded a reward, and with reward.sandbox =
        "off"."""
        self._environment = worker_environment(self._config.environment)
        configs = {**({REWARD_OF_RUN: config} if config else {}), **(others or {})}
        self._configs = {name: one.model_dump_json() for name, one in configs.items()}
        self._plan = plan_of(self._config, self._environment, secret_files, list(configs.values()))
        self._forms: dict[str, LoadRewardResponse] = {}
        """Workers' response about each reward that they have loaded, by the reward's name."""
        self._workers = [_Worker() for _ in range(workers)]
        self._closed = False
        self.scored = 0
        """Number of samples that this pool has scored, including failures."""
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    def slowest(self) -> Running | None:
        """Return the scoring that has taken the longest, if it is slow; otherwise None."""
        running = [worker.running for worker in self._workers if worker.running is not None]
        slow = [one for one in running if one.seconds > one.slow_after]
        return max(slow, key=lambda one: one.seconds, default=None)

    async def load(self, reward: str) -> Failure | None:
        """Make a worker load a reward; "" is the run's reward. Returns None if the reward can be used, otherwise the
        failure.

        Raises WorkerStartError, PoolClosedError.
        """
        answer = await self._request_twice(reward, (), LOAD_SECONDS)
        return answer if isinstance(answer, Failure) else None

    def takes_group(self, reward: str) -> bool:
        """Return True if a loaded reward scores all samples of a group at once."""
        return reward in self._forms and self._forms[reward].takes_group

    def reload(self) -> None:
        """Reload every reward from its file before the next sample."""
        for worker in self._workers:
            worker.outdated = True

    async def score(
        self, reward: str, samples: Sequence[RewardInput], timeout_seconds: float
    ) -> list[RewardOutput | Failure]:
        """Score samples of one prompt. Returns the outcomes in order.

        Args:
            reward: a name for `relaxd.rewards.resolve`, "" for the run's reward, or the name of one of `others`.
            samples: samples to score.
            timeout_seconds: deadline of each sample, or of all if the reward scores groups, not counting the wait for a
                worker, loading the reward, or time in which this process stood still. A worker that takes longer is
                killed, with every process that it started.

        An asynchronous reward gets all samples at once in one worker; others get them one by one, in any workers. An
        exception, a value that is not finite, a hang or a crash is a Failure of that sample alone, or of all samples of
        a reward that scores groups. If a worker dies, its samples are retried once, because it may have been killed
        from outside or for lack of memory. Cancelling this coroutine cancels the work. Raises PoolClosedError when the
        pool is closed meanwhile, and WorkerStartError when a worker can't be started.
        """
        if reward not in self._forms and (failure := await self.load(reward)):
            return [failure] * len(samples)
        form = self._forms[reward]
        together = [list(samples)] if form.takes_group or form.awaits else [[sample] for sample in samples]
        tasks = [asyncio.create_task(self._score(reward, some, timeout_seconds)) for some in together]
        try:
            return [outcome for outcomes in await asyncio.gather(*tasks) for outcome in outcomes]
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Kill the worker processes, and let waiting calls fail with PoolClosedError."""
        self._closed = True
        for worker in self._workers:
            worker.kill()

    async def _score(
        self, reward: str, samples: Sequence[RewardInput], timeout_seconds: float
    ) -> list[RewardOutput | Failure]:
        if len(samples) > 1 and not self.takes_group(reward):
            answer = await self._request(reward, samples, timeout_seconds)
            if isinstance(answer, Failure):
                # One of them was late or ended the process: alone, only that one fails.
                alone = (self._score(reward, [sample], timeout_seconds) for sample in samples)
                return [outcome for outcomes in await asyncio.gather(*alone) for outcome in outcomes]
        else:
            answer = await self._request_twice(reward, samples, timeout_seconds)
        self.scored += len(samples)
        return [answer] * len(samples) if isinstance(answer, Failure) else answer

    async def _request_twice(
        self, reward: str, samples: Sequence[RewardInput], timeout_seconds: float
    ) -> list[RewardOutput | Failure] | Failure:
        """Let a worker score samples, and repeat this once if the worker died."""
        answer = await self._request(reward, samples, timeout_seconds)
        if isinstance(answer, Failure) and answer.died:
            answer = await self._request(reward, samples, timeout_seconds)
        return answer

    async def _request(
        self, reward: str, samples: Sequence[RewardInput], timeout_seconds: float
    ) -> list[RewardOutput | Failure] | Failure:
        """Let a worker load a reward if necessary, and score samples if there are any."""
        worker = await self._free.get()
        answered = False
        try:
            self._raise_if_closed()
            stub = await self._ready(worker)
            if reward not in worker.loaded:
                request = LoadRewardRequest(reward=reward, config_json=self._configs.get(reward, ""))
                async with Deadline(LOAD_SECONDS):
                    loading = await stub.LoadReward(request, timeout=None)
                self.enclosure = tuple(Measure(one.name, one.by, one.missing) for one in loading.enclosure)
                if error := loading.error or self._refusal():
                    answered = True
                    return Failure(error, traceback=loading.traceback)
                worker.loaded.add(reward)
                self._forms[reward] = loading
            outcomes: list[RewardOutput | Failure] = []
            if samples:
                assert worker.questions is not None
                slow = slow_after(timeout_seconds)
                asked = ScoreSamplesRequest(request=request_of_samples(reward, samples), slow_seconds=slow)
                async with Deadline(timeout_seconds) as deadline:
                    prompt = _shorten(samples[0].prompt)
                    worker.running = Running(prompt, len(samples), slow, worker.stacks, deadline)
                    with worker.questions.during(deadline):
                        answer = await stub.ScoreSamples(asked, timeout=None)
                self._told(answer.user_messages)
                outcomes = [
                    Failure(score.error, traceback=score.traceback, no_judge=score.no_judge)
                    if score.error
                    else RewardOutput(score.reward, dict(sorted(score.parts.items())))  # a map has no order of its own
                    for score in answer.scores
                ]
            answered = True
            return outcomes
        except TimeoutError:
            self._raise_if_closed()
            if worker.running is None:
                return Failure(f"loading the reward took longer than {LOAD_SECONDS:g} s; its process was killed")
            return Failure(
                f"scoring {worker.running.what} took longer than {timeout_seconds:g} s{worker.running.where}; its "
                f"process was killed; the prompt: {worker.running.prompt!r}",
                late=True,
            )
        except ChildExited as error:
            self._raise_if_closed()
            return Failure(f"the process that ran the reward died: {self._describe_exit(error)}", died=True)
        finally:
            # Late, dead, or cancelled in the middle of a sample: the next sample gets a new process.
            worker.running = None
            if not answered:
                worker.kill()
            self._free.put_nowait(worker)

    def _refusal(self) -> str:
        """Return why the workers' enclosure isn't enough for reward.sandbox; "" if it is enough."""
        missing = missing_of(self.enclosure)
        if self._config.sandbox != "required" or not missing:
            return ""
        which = "; ".join(f"{one.name}: {one.missing}" for one in missing)
        return f'reward.sandbox is "required", but this machine does not let workers be limited in {which}'

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise PoolClosedError("the pool of reward workers was closed")

    def _describe_exit(self, error: ChildExited) -> str:
        """Describe the end of a worker's process, for messages: signal or exit code, and a hint if it ran out of
        memory."""
        code = error.exit_code
        reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if any(name in line for line in error.last_lines[-10:] for name in ("bad_alloc", "MemoryError")):
            reason += f"; it had no memory left: reward.worker_memory_bytes is {self._config.worker_memory_bytes}"
        return reason

    async def _ready(self, worker: _Worker) -> RewardWorkerStub:
        """Start the worker's process if none runs or it is outdated. Returns its stub. Raises WorkerStartError."""
        if worker.child is None or not worker.child.alive or worker.outdated:
            worker.kill()
            try:
                async with Deadline(START_SECONDS):
                    await self._start(worker)
            except TimeoutError:
                raise WorkerStartError(f"a reward worker was not ready {START_SECONDS:g} s after its start") from None
            except ChildExited as error:
                self._raise_if_closed()
                last = f"; its last line: {error.last_lines[-1]}" if error.last_lines else ""
                how = self._describe_exit(error)
                raise WorkerStartError(f"a reward worker died before it was ready: {how}{last}") from error
            except ChildError as error:
                raise WorkerStartError(str(error)) from error
            except OSError as error:  # it gets no folder
                raise WorkerStartError(f"reward worker can't be started: {error}") from error
        assert worker.child is not None
        return RewardWorkerStub(worker.child.channel)

    async def _start(self, worker: _Worker) -> None:
        """Start a worker's process, and wait until it serves. Raises ChildError, OSError."""
        arguments = []
        if self._config.sandbox != "off":
            worker.temporary = tempfile.mkdtemp(prefix="relaxd-reward-")
            plan = replace(self._plan, temporary=worker.temporary, own=(worker.temporary,))
            arguments = [plan.to_json()]
        worker.stacks = RewardStacks()
        worker.child = await Child.start(
            "services.reward.worker",
            arguments,
            env=self._environment,
            inherit=False,
            name="reward worker",
            filter_output=worker.stacks.filter,
        )
        await worker.child.wait_connected()
        worker.questions = Questions(self._ask)
        worker.carrying = asyncio.create_task(worker.questions.carry(RewardWorkerStub(worker.child.channel)))


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_PROMPT else line[: SHOWN_PROMPT - 1] + "…"
