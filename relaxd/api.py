"""relaxd from Python: start a run, iterate its steps, read its results. The package exports these names.

    import relaxd

    config = relaxd.configure("examples/addition.toml", {"run.steps": 10})
    with relaxd.run(config, reward=my_reward) as run:
        for step in run.steps():
            print(step["step"], step["reward_mean"])
    print(run.samples(limit=3), run.frame())

A run from Python has the services, files and commands of one that `relaxd run` starts: `relaxd watch` shows it, and
`relaxd.open_run` finds it from another process.
"""

import asyncio
import atexit
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from relaxd.cli.execute import new_run_id
from relaxd.cli.options import DEFAULT_STATE
from relaxd.cli.output import EscapingConsole
from relaxd.cli.preparing.eval_command import Device, evaluate_model
from relaxd.cli.reading import run_source
from relaxd.cli.reading.run_source import RunSource
from relaxd.cli.run_checkpoints import export_model
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient, state_name
from relaxd.config import RunConfig
from relaxd.config.load_toml import load, load_file, override
from relaxd.config.write_toml import dump, toml
from relaxd.importing import write_environment, write_reward
from relaxd.local.programs import python_path
from relaxd.local.stack import open_client
from relaxd.report.run_result import sample_values
from relaxd.rpc.stack_identity import STACK_VARIABLE
from relaxd.run_folder import CONFIG, LEDGER, METRICS, is_run, read_lines
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.waiting import waiting

POLL_SECONDS = 0.2
"""Interval between two checks for the folder of a starting run, in seconds."""
END_SECONDS = 300.0
"""Maximum time for the services of an ended or stopped run to exit, in seconds."""
SHOWN_LINES = 15
"""Number of lines from the end of the output of `relaxd run` that an error shows, at most."""
OUTPUT_BYTES = 16 * 1024
"""Number of bytes that are read from the end of the output of `relaxd run` to show its last lines."""
NOTICE_SECONDS = 5.0
"""Seconds after which waiting for a run's end is logged."""

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""A row of a run's results: the metrics of a step, a sample, or a line of the ledger."""


class RunError(RuntimeError):
    """A run can't start, has failed, or isn't known. The message says why."""


def configure(source: str | Path | Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Make a configuration.

    Args:
        source: the path of a TOML file, or what it would contain: {"run": {"steps": 10}, ...}.
        settings: further settings by name, such as {"rollout.top_p": 0.9}. They override `source`.

    Raises ConfigError: settings are unknown or wrong; `problems` has every mistake.
    """
    words = [override(name, value) for name, value in (settings or {}).items()]
    if isinstance(source, Mapping):
        return load("\n".join(f"{name} = {toml(value)}" for name, value in source.items()), words, name="configure")
    return load_file(Path(source), words)


def run(
    config: RunConfig,
    *,
    run_id: str = "",
    reward: Callable[..., Any] | None = None,
    environment: type | Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    replicas: Mapping[str, int] | None = None,
    coordinator: str | None = None,
    state: Path = DEFAULT_STATE,
) -> "Run":
    """Start a run, and return once it has begun.

    If no services are up here, starts services and stops them at the run's end, as `relaxd run` does.

    Args:
        config: from `configure`.
        run_id: id of the run; by default a new one is made.
        reward: a function, also of a notebook, in place of reward.name. Reward workers get only its source, so it must
            import or define everything that it needs.
        environment: a class, or a list of functions that the model may call, also of a notebook, in place of
            agent.environment. It is imported from its source, too.
        replicas: replicas to start by role, such as {"rollout": 2}.
        coordinator: host:port of services elsewhere, whose machine has the files that `config` names.
        state: the folder in which `relaxd up` keeps its state.

    Raises:
        ValueError: `reward` or `environment` has a wrong type, or its source can't be read.
        RunError: the run can't start.
    """
    run_id = run_id or new_run_id("python")
    runs = config.run.folder.expanduser().resolve()
    if reward is not None:
        name = write_reward(reward, runs)
        config = config.model_copy(update={"reward": config.reward.model_copy(update={"name": name})})
    if environment is not None:
        name = write_environment(environment, runs)
        config = config.model_copy(update={"agent": config.agent.model_copy(update={"environment": name})})
    if coordinator is not None:
        with _errors(), open_client(coordinator, state) as client:
            begun = client.start_run(dump(config), run_id)
        return Run(begun.run_id, Path(begun.folder), state, coordinator)
    folder = runs / run_id
    child = _Child(config, run_id, replicas or {}, state)
    try:
        child.wait_until(lambda: is_run(folder))
    except BaseException:
        child.stop()
        raise
    return Run(run_id, folder, state, child=child)


def open_run(run_id: str = "", *, coordinator: str | None = None, state: Path = DEFAULT_STATE) -> "Run":
    """Find a run by its id or its folder; "" is the newest. Raises RunError: there is no such run."""
    with _errors(), _opened(run_id, None, state, coordinator) as source:
        return Run(source.run.run_id, Path(source.run.folder), state, coordinator)


class Run:
    """A run. As a context manager it is stopped at the end of the block, unless it has ended."""

    def __init__(
        self, run_id: str, folder: Path, state: Path, coordinator: str | None = None, child: "_Child | None" = None
    ) -> None:
        """Not for users, who get a handle from `run` or `open_run`."""
        self.id = run_id
        self.folder = folder
        """The run's folder, on the coordinator's machine."""
        self._state = state
        self._coordinator = coordinator
        self._child = child

    def __repr__(self) -> str:
        return f"<relaxd run {self.id} in {self.folder}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.stop()
        elif self._now().state not in ENDED:
            self.stop("the block that used it ended")

    @property
    def state(self) -> str:
        """The run's state, such as "running", "stopped" or "failed"."""
        return state_name(self._now().state)

    def steps(self) -> Iterator[Row]:
        """Yield the metrics of each step, from the first one on, until the run ends; wait for steps to come.

        A row has `step` and the metrics of docs/metrics.md. Raises RunError: the run failed, or its services are gone.
        """
        last = 0
        while True:
            with _errors(), self._source() as source:
                for response in source.reader.watch(self.id, after_step=last):
                    for step in response.steps:
                        if step.step > last:  # a folder has them all
                            last = step.step
                            yield {"step": step.step, **step.metrics}
                    state, reason = response.run.state, response.run.reason
            if state == pb.RUN_STATE_FAILED:
                raise RunError(f"run {self.id} has failed: {reason}")
            if state in ENDED:
                return
            if self._child is None or not self._child.is_alive():
                raise RunError(
                    f"run {self.id} has not ended, and nobody works on it: relaxd resume {self.id} continues it"
                )
            time.sleep(POLL_SECONDS)  # idle: its services start

    async def asteps(self) -> AsyncIterator[Row]:
        """Yield the metrics of each step, as `steps` does, without blocking the event loop."""
        found = self.steps()
        while (step := await asyncio.to_thread(next, found, None)) is not None:
            yield step

    def wait(self) -> Row:
        """Wait until the run has ended and its processes have exited, and return its last step. Raises RunError."""
        last: Row = {}
        for step in self.steps():
            last = step
        if self._child is not None:
            self._child.wait(END_SECONDS)
        return last

    def stop(self, reason: str = "stopped from Python") -> None:
        """End the run early: drop its open groups, save a checkpoint, evaluate, export. `wait` waits for all of it."""
        with self._client() as client:
            client.stop_run(self.id, reason)

    def checkpoint(self) -> Path:
        """Save a checkpoint now, to be kept until somebody removes it, and return its folder."""
        with self._client() as client:
            return Path(client.save_checkpoint(self.id).path)

    def samples(self, step: int = 0, limit: int = 16) -> list[Row]:
        """Return trained samples, newest first: prompt, response, reward ...; `step` 0 is any step.

        Samples of runs with an environment also have `conversation`, a list of messages, and its numbers.
        """
        with _errors(), self._source() as source:
            found = source.reader.samples(self.id, step, limit)
        return list(map(sample_values, found))

    def metrics(self) -> list[Row]:
        """Return the rows of metrics.jsonl: the steps so far, with their evaluations. Needs the run's folder."""
        return list(read_lines(self.folder / METRICS))

    def ledger(self) -> list[Row]:
        """Return the rows of ledger.jsonl: for each step the groups that it trained. Needs the run's folder."""
        return list(read_lines(self.folder / LEDGER))

    def frame(self) -> Any:
        """Return `metrics` as a pandas.DataFrame, a row for each step. Needs the package pandas."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self.metrics())

    def evaluate(
        self, sets: Sequence[str] = (), *, step: int | None = None, device: str = "auto", out: Path | None = None
    ) -> Row:
        """Answer and score evaluation sets with the model of a checkpoint, on this machine, as `relaxd eval` does.

        Returns the results, named as in metrics.jsonl ("eval_reward", "eval/SET/pass_at_1"), with `step`. Progress goes
        to standard error. Needs the run's folder.

        Args:
            sets: names of the run's sets, such as ["math500"]; by default all. step: the checkpoint's step, by default
            the newest. device: "cpu", "cuda", or "auto": a GPU if the machine has any. out: folder for answers and
            results, by default below the run's folder: evaluated/step-N-TIME.

        Raises:
            ValueError: `device` is unknown.
            RunError: the run has no such checkpoint or set.
            ConfigError: a set can't be read.
        """
        if device not in list(Device):
            raise ValueError(f"device is {device!r}: it must be {', '.join(Device)}")
        console = EscapingConsole(stderr=True, highlight=False, markup=False)
        with _errors(), self._source() as source, tempfile.TemporaryDirectory(dir=source.folder) as place:
            exported = export_model(source.folder, step, Path(place) / "model")
            config = RunConfig.model_validate_json((source.folder / CONFIG).read_bytes())
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": exported["path"]})})
            found = f"step-{exported['step']:06d}-{time.strftime('%Y%m%d-%H%M%S')}"
            folder = out or source.folder / "evaluated" / found
            return evaluate_model(config, folder, console, sets, Device(device), step=exported["step"])

    def _now(self) -> pb.Run:
        with _errors(), self._source() as source:
            return source.run

    def _source(self) -> AbstractContextManager[RunSource]:
        here = self.folder if is_run(self.folder) else None
        return _opened(self.id, here, self._state, self._coordinator)

    @contextmanager
    def _client(self) -> Iterator[CoordinatorClient]:
        with _errors(), self._source() as source:
            if not isinstance(source.reader, CoordinatorClient):
                raise RunError(f"run {self.id} has no services that are up")
            yield source.reader


class _Child:
    """Child process `relaxd run`, which starts the run's services, stops them and writes the report."""

    def __init__(self, config: RunConfig, run_id: str, replicas: Mapping[str, int], state: Path) -> None:
        self._run_id = run_id
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        self._folder = tempfile.TemporaryDirectory(prefix="relaxd-")  # removed with this object
        file = Path(self._folder.name) / "python.toml"
        file.write_text(dump(config))
        words = ["run", str(file), "--run-id", run_id, "--state", str(state)]
        words += [f"--{role}={count}" for role, count in replicas.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relaxd.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": python_path(), "CI": "1"},  # no live view
            start_new_session=True,  # Ctrl-C in Python interrupts a cell, not the run
        )
        atexit.register(self.stop)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, begun: Callable[[], bool]) -> None:
        """Wait until the run has begun. Raises RunError if the process ends first."""
        while not begun():
            if not self.is_alive():
                raise RunError(self._last_lines())
            time.sleep(POLL_SECONDS)  # named: by the caller, who started a run

    def wait(self, seconds: float) -> None:
        """Wait until `relaxd run` exits. Raises RunError if it fails or doesn't exit within `seconds`."""
        atexit.unregister(self.stop)
        if (code := self._join(seconds)) is None:
            raise RunError(self._unended(seconds))
        if code:
            raise RunError(self._last_lines())

    def stop(self) -> None:
        """Interrupt `relaxd run` and wait until it exits.

        `relaxd run` stops the services, after saving a checkpoint unless the run has ended. Logs the reason for the
        wait. If `relaxd run` has not exited after END_SECONDS, logs a warning and leaves it running.
        """
        atexit.unregister(self.stop)
        if self.is_alive():
            self._process.send_signal(signal.SIGINT)
            if self._join(END_SECONDS) is None:
                logger.warning("%s", self._unended(END_SECONDS))

    def _join(self, seconds: float) -> int | None:
        """Wait until `relaxd run` exits, and return its exit code; None if it has not exited after `seconds`."""
        end = time.monotonic() + seconds
        with waiting("", on=f"`relaxd run`, process {self._process.pid}") as wait:
            wait.next_notice = NOTICE_SECONDS
            while (left := end - time.monotonic()) > 0:
                wait.reason = f"run {self._run_id} to end; it said last: {self._last_lines(1)}"
                with suppress(subprocess.TimeoutExpired):
                    return self._process.wait(min(left, 1.0))
        return None

    def _unended(self, seconds: float) -> str:
        return (
            f"run {self._run_id} has not ended within {seconds:g} s, and goes on: `relaxd run`, process "
            f"{self._process.pid}, said last:\n{self._last_lines()}"
        )

    def _last_lines(self, count: int = SHOWN_LINES) -> str:
        """Return the last lines of `relaxd run`'s output. Keeps the file position, at which the process writes."""
        output = self._output.fileno()
        start = max(0, os.fstat(output).st_size - OUTPUT_BYTES)
        text = os.pread(output, OUTPUT_BYTES, start).decode(errors="replace")
        return "\n".join(text.splitlines()[-count:])


@contextmanager
def _opened(run_id: str, folder: Path | None, state: Path, coordinator: str | None) -> Iterator[RunSource]:
    """Open a run as commands do, but restore the environment variables, as this process may use several stacks."""
    with ExitStack() as opened:
        before = {name: os.environ.get(name) for name in (STACK_VARIABLE, "RELAXD_TOKEN_FILE")}
        try:
            found = opened.enter_context(run_source.open_run(run_id, folder, state, coordinator))
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        yield found


@contextmanager
def _errors() -> Iterator[None]:
    """Convert each CliError to a RunError that includes the hint."""
    try:
        yield
    except CliError as error:
        raise RunError(f"{error.message}\n{error.hint}" if error.hint else error.message) from error
