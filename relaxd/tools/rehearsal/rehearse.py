"""Runs a rehearsal: a separate Redis and services, an endless run, and the measured windows."""

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import redis

from relaxd.board.stages import stages_for
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.config import RunConfig
from relaxd.config.write_toml import dump
from relaxd.local import embedded_redis, stack
from relaxd.local.programs import MANY_ROLLOUTS
from relaxd.local.state_folder import StateFolder
from relaxd.local.supervisor import ServiceSpec, StackPlan
from relaxd.models import DataError
from relaxd.models.folders import models_folder, resolve_model
from relaxd.replica.gpus import visible_gpus
from relaxd.report.run_result import read_result
from relaxd.roles import AGENT, REFERENCE, ROLLOUT, TRAINER
from relaxd.tools.rehearsal.assumptions import Scale, admitted_groups, expert_bytes, least_step_seconds, rehearsed
from relaxd.tools.rehearsal.capacity import advice, call_times, read_calls
from relaxd.tools.rehearsal.counters import Counters, EngineNumbers, Sample, busy_share, current_wait
from relaxd.tools.rehearsal.rehearsal_report import Measured
from relaxd.tools.rehearsal.stand_ins import write_stand_in
from relaxd.v1.coordinator_pb2 import RUN_STATE_PAUSED, RUN_STATE_PENDING

RUN_ID = "rehearsal"
REPLICAS_IN_PROCESS = 64
"""Maximum number of scripted rollout replicas in one process."""
SAMPLE_SECONDS = 0.25
"""Seconds between two readings of the counters."""
SAY_SECONDS = 5.0
START_SECONDS = 180.0
"""Maximum seconds until all replicas have registered."""
FIRST_STEP_FACTOR = 3.0
"""Maximum time until the first step ends, as a multiple of the window's length."""
FIRST_STEP_SECONDS = 30.0
"""Maximum time until the first step ends, in seconds, if FIRST_STEP_FACTOR gives less."""
SETTLE_SECONDS = 15.0
"""Maximum seconds until a paused run is idle."""
IDLE_SECONDS = 5.0
"""Length of the window in which the paused run is measured, in seconds."""
GRACE_SECONDS = 3.0
CALLS = "calls"
"""Subfolder of the state folder with the durations of the replicas' calls."""
GPUS = 8
"""Number of GPUs that a replica sees, unless it needs more."""
REDIS_SECONDS = 5.0
"""Timeout of a Redis command, in seconds."""

Say = Callable[[str], None]


def rehearse(config: RunConfig, scale: Scale, seconds: float, say: Say, logs: Path) -> Measured:
    """Rehearse a run and return what was measured.

    Args:
        config: the run's own configuration.
        scale: sizes of the rehearsal.
        seconds: length of the window, which begins after the first step.
        say: called with progress, a line each time.
        logs: folder to which the services' logs are moved if the rehearsal fails.

    Raises CliError: a service doesn't start, or no two steps end in time.
    """
    with rehearsed_run(config, scale, say, logs) as counters:
        return _measure(config, scale, seconds, counters, say)


@contextmanager
def rehearsed_run(config: RunConfig, scale: Scale, say: Say, logs: Path) -> Iterator[Counters]:
    """Start the services and the run, yield its counters, and stop everything at the end. Arguments as in `rehearse`.

    Raises CliError: a service doesn't start.
    """
    if embedded_redis.given_url() is not None:
        raise CliError("REDIS_URL is set: a rehearsal measures a Redis of its own", "unset REDIS_URL")
    with tempfile.TemporaryDirectory(prefix="relaxd-rehearsal-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        folder = StateFolder(work / "state")
        model = _model(config, work)
        changed = rehearsed(config, scale, model=model, folder=work / "runs")
        plan = rehearsal_plan(folder, config, scale)
        try:
            say("starting Redis, the coordinator, one trainer, reward and advantage")
            stack.up(folder, plan, say)
            with CoordinatorClient(plan.coordinator, plan.stack) as coordinator:
                _await_replicas(coordinator, scale.rollout, say)
                coordinator.start_run(dump(changed), RUN_ID)
                client = redis.Redis.from_url(
                    plan.redis, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS
                )
                engines = EngineNumbers([(time.monotonic(), scale.rollout)], config.autoscale.mode)
                yield Counters(folder, client, coordinator, work / "runs" / RUN_ID, RUN_ID, engines)
        except BaseException:
            shutil.copytree(folder.logs, logs, dirs_exist_ok=True)
            say(f"the services' logs are in {logs}")
            raise
        finally:
            stack.down(folder)


def _model(config: RunConfig, work: Path) -> Path:
    """Return the folder of the run's model, or of a stand-in if this machine doesn't have the model.

    Raises CliError.
    """
    path = config.model.path
    here = Path(path).expanduser().is_dir() or (models_folder() / path).is_dir()
    if config.has_media and not here:
        raise CliError(
            f"model.path = {path!r} isn't here, and a run with media ({config.media_setting}) can't be rehearsed "
            "without its rules for them",
            "give it a folder with the model's JSON files; its weights aren't needed",
        )
    try:
        return resolve_model(path) if here else write_stand_in(work / "stand-in", config.rehearsal.experts)
    except DataError as error:
        raise CliError(str(error)) from error


def rehearsal_plan(folder: StateFolder, config: RunConfig, scale: Scale) -> StackPlan:
    """Plan the services as `relaxd up` does, except the rollout replicas.

    The initial rollout replicas share processes. Each replica that the autoscaler adds gets a separate process.
    """
    wanted = max(config.rehearsal.redis_bytes // scale.payload, 16 << 20)
    os.environ["RELAXD_REDIS_MAXMEMORY"] = str(min(wanted, psutil.virtual_memory().total // 3))
    replicas = {ROLLOUT: 0, REFERENCE: 0, AGENT: scale.agents}
    plan = stack.make_plan(folder, port=0, replicas=replicas, stop_with_parent=True, grace_seconds=GRACE_SECONDS)
    template = plan.templates[ROLLOUT]
    template.environment["CUDA_VISIBLE_DEVICES"] = ""
    calls = folder.path / CALLS
    calls.mkdir(parents=True)

    def command(count: int, name: str) -> list[str]:
        gpus = str(max(GPUS, config.rollout.tensor_parallel))
        return [sys.executable, "-m", MANY_ROLLOUTS, str(count), gpus, str(calls / f"{name}.txt")]

    template.command = command(1, "added")
    left, number = scale.rollout, 0
    while left:
        count, number = min(left, REPLICAS_IN_PROCESS), number + 1
        name, environment = f"rollout-{number}", dict(template.environment)
        plan.services.append(
            ServiceSpec(name=name, role=ROLLOUT, command=command(count, name), environment=environment)
        )
        left -= count
    for spec in plan.services:
        if spec.role == TRAINER and visible_gpus():
            spec.environment["CUDA_VISIBLE_DEVICES"] = ""
    return plan


def _await_replicas(coordinator: CoordinatorClient, count: int, say: Say) -> None:
    deadline, told = time.monotonic() + START_SECONDS, -1
    while True:
        found = sum(replica.registration.role == ROLLOUT for replica in coordinator.replicas())
        if found >= count:
            return
        if time.monotonic() > deadline:
            raise CliError(f"only {found} of {count} rollout replicas registered in {START_SECONDS:.0f} s")
        if found != told:
            say(f"{found} of {count} rollout replicas have registered")
            told = found
        time.sleep(1.0)  # named: `say` tells how many are awaited


def _measure(config: RunConfig, scale: Scale, seconds: float, counters: Counters, say: Say) -> Measured:
    with _first_interrupt() as interrupted:
        first, last = _window(counters, seconds, say, interrupted)
    say(f"{last.step - first.step} steps in {last.time - first.time:.1f} s; pausing the run, to measure it at rest")
    waits, calls = dict(counters.waits), sorted(counters.call_seconds)
    idle_first, idle_last = _idle_window(counters)
    times = call_times(
        read_calls(counters.folder.path / CALLS), (first.time, last.time), (idle_first.time, idle_last.time)
    )
    metrics = [line for line in read_result(counters.run_folder).steps if first.step < line["step"] <= last.step]
    run = counters.run
    stages = stages_for(config)
    per_token = stages[0].token_bytes + expert_bytes(config)
    return Measured(
        scale=scale,
        first=first,
        last=last,
        idle_first=idle_first,
        idle_last=idle_last,
        cores=psutil.cpu_count() or 1,
        waits=waits,
        peak_bytes=counters.peak_bytes,
        step_bytes=statistics.fmean(list(counters.step_bytes.values()) or [0]),
        step_file_seconds=statistics.fmean([line.get("step_file_seconds", 0.0) for line in metrics] or [0.0]),
        trainer_shares=_trainer_shares(metrics),
        call_p99=calls[int(0.99 * (len(calls) - 1))],
        dropped=dict(run.groups.dropped_by_reason),
        groups_per_step=config.trainer.groups_per_step,
        admitted_groups=admitted_groups(config),
        max_group_bytes=config.board.max_group_bytes,
        worst_group_bytes=per_token * config.rollout.samples_per_prompt * config.rollout.max_new_tokens,
        redis_bytes=config.rehearsal.redis_bytes,
        call_times=times,
        least_step_seconds=least_step_seconds(config, counters.engines.most, scale.agents),
        engines=counters.engines,
    )


@contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once Ctrl-C was pressed in the block. A second press interrupts as usual."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, usual)

    usual = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, usual)


def _window(counters: Counters, seconds: float, say: Say, interrupted: Callable[[], bool]) -> tuple[Sample, Sample]:
    """Return two readings of the counters: at the end of the first step, and at the end of the window's last step.

    The window begins with the first reading and ends after `seconds` or an interrupt. Raises CliError: fewer than two
    steps ended.
    """
    begun = said = trains_since = time.monotonic()
    first: Sample | None = None
    last: Sample | None = None
    start = counters.sample()
    while True:
        sample = counters.sample()
        run = counters.run
        if run.state in ENDED or run.state == RUN_STATE_PAUSED:
            raise CliError(f"the rehearsed run doesn't go on: {run.reason or run.waiting_for}")
        if first is None and sample.step >= 1:
            first = last = sample
            counters.waits.clear()
            counters.call_seconds.clear()
        elif last is not None and sample.step > last.step:
            last = sample
        now = time.monotonic()
        if run.state == RUN_STATE_PENDING and now - begun < START_SECONDS:
            trains_since = now  # the trainer loads its code, and engines get their first weights
        if now - said >= SAY_SECONDS:
            said = now
            groups = run.groups
            counts = f"{groups.published} groups published, {groups.trained} trained, {groups.dropped} dropped"
            number = f"; {counters.engines.last} rollout replicas" if counters.engines.mode != "off" else ""
            say(f"{now - begun:4.0f} s: step {run.step}, {counts}; waits for {current_wait(run) or 'nothing'}{number}")
        if first is None and now - trains_since > max(FIRST_STEP_SECONDS, FIRST_STEP_FACTOR * seconds):
            raise CliError(
                f"no step ended in {now - trains_since:.0f} s: {run.waiting_for or current_wait(run)}",
                advice(busy_share(start, sample)),
            )
        if interrupted():
            if first is not None and last is not None and last.step > first.step:
                say("interrupted: measuring what there is; Ctrl-C again ends at once, without a result")
                return first, last
            waits = run.waiting_for or run.wait.current_kind or "nothing"
            raise CliError(
                f"interrupted when {sample.step} steps had ended, and the time of a step takes two; the run waits for: "
                f"{waits}",
                advice(busy_share(start, sample)),
            )
        if first is not None and last is not None and now - first.time >= seconds:
            if last.step == first.step:
                raise CliError(
                    f"no second step ended within {seconds:.0f} s: {run.waiting_for or current_wait(run)}",
                    advice(busy_share(first, sample)),
                )
            return first, last
        time.sleep(SAMPLE_SECONDS)  # named: `say` tells what the run waits for


def _idle_window(counters: Counters) -> tuple[Sample, Sample]:
    """Pause the run, wait until it is idle, and return the counters at both ends of an idle window."""
    counters.coordinator.pause_run(RUN_ID, "measured at rest")
    deadline = time.monotonic() + SETTLE_SECONDS
    before: list[tuple[int, int]] = []
    while time.monotonic() < deadline:
        time.sleep(2.0)  # brief: SETTLE_SECONDS
        counters.sample()
        queues = [(queue.waiting, queue.held) for queue in counters.run.queues[:-1]]  # those before the trainer's
        if queues == before:
            break
        before = queues
    first = counters.sample()
    time.sleep(IDLE_SECONDS)
    return first, counters.sample()


def _trainer_shares(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the seconds that the trainer's thread spent in steps, by activity."""
    parts = {
        "works": "train_seconds",
        "waits for groups": "wait_seconds",
        "waits for a broadcast": "sync_wait_seconds",
        "writes the step file": "step_file_seconds",
    }
    found = {name: sum(line.get(key, 0.0) for line in metrics) for name, key in parts.items()}
    total = sum(line.get("step_seconds", 0.0) for line in metrics)
    return {**found, "looks for groups, plans, commits": max(0.0, total - sum(found.values()))}
