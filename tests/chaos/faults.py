"""Everything that is done to the stack. A fault returns once it is over, with the time from which recovery counts."""

import contextlib
import json
import random
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis

from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.redis_client import key_prefix
from relaxd.roles import ROLES
from tests.chaos.environment import FORKS, MOODS
from tests.chaos.program import HARMED, PLAYED, TRICKS
from tests.chaos.program import MOODS as PROGRAM_MOODS
from tests.chaos.proxy import Link
from tests.chaos.relay import Moment
from tests.chaos.stack import LEASE_SECONDS, PROGRAM, REPLICA_LEASE_SECONDS, RUN, ChaosStack
from tests.chaos.teacher_engine import MODULE, WRONG_ANSWERS
from tests.kit.disks import no_descriptors
from tests.kit.processes import is_alive, start_python
from tests.kit.redis.redis_server import await_append_only_file
from tests.kit.waiting import wait_until

SHORT_SECONDS, LONG_SECONDS, VERY_LONG_SECONDS = LEASE_SECONDS / 2, 2 * LEASE_SECONDS, 1.5 * REPLICA_LEASE_SECONDS
"""Shorter than any lease; longer than a group's, so that others take its groups and it commits late; longer than a
replica's, so that it is taken for dead and restarted."""
FROZEN_ROLES = ("reference", "teacher")
LENGTHS = {"short": SHORT_SECONDS, "long": LONG_SECONDS, "very long": VERY_LONG_SECONDS}
DELAY_SECONDS = 0.2
NOTICE_SECONDS = 180.0
"""How long a fault waits for the moment that it is meant for."""

UPDATE_SECONDS = 0.3
"""About as long as a step's updates take with a critic: a rank is killed before, in or after any of them."""

AWAY_SECONDS = 26.0
"""Longer than the lease of an engine's pause, which has 9 s more than the timeouts of weight synchronisations."""
BUSY_SECONDS = 1.0
"""How long a service that holds something is looked for."""

STAGE_ROLES = ("rollout", "reward", "advantage", "reference", "teacher")
"""Roles with a stage of the same name; a run with the algorithm "critic" also has the critic's."""

DAYS_BACK, HOURS_AHEAD = 2 * 86400.0, 3 * 3600.0
"""Seconds by which clocks are set, back or ahead."""
CLOCK_ROLES = ("coordinator", "trainer", "rollout", "reward", "advantage")

STRANGERS = "strangers-1"
"""Identity of the other stack."""

Act = Callable[[ChaosStack, random.Random], float]
"""Does it; returns the Unix time at which it was over (of a kill: at which it was done)."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    act: Act


class MomentMissed(Exception):
    """What a fault waited for did not happen."""


def await_moment(reached: Callable[[], object], what: str, pause_seconds: float = 0.02) -> None:
    """Wait until something is reached. Raises MomentMissed after NOTICE_SECONDS."""
    deadline = time.monotonic() + NOTICE_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise MomentMissed(f"not within {NOTICE_SECONDS:g} s: {what}")
        time.sleep(pause_seconds)


# --- deaths ---------------------------------------------------------------------------------------------------------


def kill_now(processes: list[psutil.Process]) -> float:
    """Kill processes; returns the Unix time of it."""
    now = time.time()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return now


def _one(stack: ChaosStack, rng: random.Random, role: str) -> str:
    """A service of a role, if possible one that holds groups at this moment."""
    deadline = time.monotonic() + BUSY_SECONDS
    names = stack.names(role)
    while (stage := ROLES[role].stage if role in ROLES else "") and time.monotonic() < deadline:
        if holding := [name for name in stack.holding(stage) if name in names]:
            return rng.choice(holding)
        time.sleep(0.001)
    return rng.choice(names)


def kill_service(role: str, stack: ChaosStack, rng: random.Random) -> float:
    """The process that speaks gRPC; its supervisor kills what it leaves."""
    return kill_now([stack.process(_one(stack, rng, role))])


def kill_redis(stack: ChaosStack, rng: random.Random) -> float:
    """Once its file has what it acknowledged: it holds writes back while the disk is busy with the last sync."""
    await_append_only_file(stack.redis_url)
    return kill_service("redis", stack, rng)


def kill_all(role: str, stack: ChaosStack, rng: random.Random) -> float:
    return kill_now([stack.process(name) for name in stack.names(role)])


def kill_child(role: str, module: str, index: int, stack: ChaosStack, rng: random.Random) -> float:
    """A process that a service has started."""
    return kill_now([stack.child(_one(stack, rng, role), module, index)])


def kill_trainer_rank(number: int, stack: ChaosStack, rng: random.Random) -> float:
    """A rank of the trainer, on whichever host it is."""
    return kill_now([stack.trainer_rank(number)])


def kill_rank_when(pattern: str, within_seconds: float, stack: ChaosStack, rng: random.Random) -> float:
    """A rank of the trainer, at or soon after the moment when a file of the run's folder appears that was not there."""
    rank = stack.trainer_rank(rng.randrange(2))
    before = set(stack.run_folder.glob(pattern))
    await_moment(lambda: _new(stack.run_folder, pattern, before), f"a new {pattern}", 0.001)
    time.sleep(rng.uniform(0.0, within_seconds))
    return kill_now([rank])


def _new(folder: Path, pattern: str, before: set[Path]) -> bool:
    return not before.issuperset(folder.glob(pattern))


def kill_critic_and_trainer(stack: ChaosStack, rng: random.Random) -> float:
    """A rank of each: both go on from their own checkpoints."""
    return kill_now([stack.child("critic", CRITIC_RANK), stack.trainer_rank(rng.randrange(2))])


def restart(role: str, stack: ChaosStack, rng: random.Random) -> float:
    """In good order; the supervisor starts it again."""
    process = stack.process(_one(stack, rng, role))
    now = time.time()
    process.terminate()
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(15)
    return now


# --- strangers ------------------------------------------------------------------------------------------------------


def meet_another_stack(stack: ChaosStack, rng: random.Random) -> float:
    """A trainer and a replica of another stack, with the ids of ours, register here, and its command stops the run."""
    state = stack.state.read()
    assert state is not None
    names = ("trainer", rng.choice(stack.names("reward")))
    environment = {"RELAXD_COORDINATOR": state.coordinator, "RELAXD_REDIS": state.redis, "RELAXD_STACK": STRANGERS}
    strangers = [
        start_python(
            *("-m", ROLES[name.partition("-")[0]].module, "--replica-id", name, "--instance", name),
            environment=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    ]
    for stranger in strangers:
        output, _ = stranger.communicate(timeout=NOTICE_SECONDS)
        assert stranger.returncode, output
        assert f"this is stack {state.stack}, the caller belongs to stack '{STRANGERS}'" in output, output
    refused = pytest.raises(CliError, match=f"this is stack {state.stack}")
    with CoordinatorClient(state.coordinator, STRANGERS) as command, refused:
        command.stop_run(RUN, "by strangers")
    return time.time()


# --- stalls ---------------------------------------------------------------------------------------------------------


def stall(role: str, seconds: float, stack: ChaosStack, rng: random.Random) -> float:
    """A service with all its processes stands still: a host that swaps, a virtual machine that moves."""
    return stand_still(stack.tree(_one(stack, rng, role)), seconds, stack)


def stand_still(processes: list[psutil.Process], seconds: float, stack: ChaosStack) -> float:
    """Stop processes for so long."""
    with stack.frozen(processes):
        time.sleep(seconds)
    return time.time()


def stall_child(role: str, module: str, seconds: float, stack: ChaosStack, rng: random.Random) -> float:
    """Only a child stands still: its service answers and sends heartbeats."""
    return stand_still([stack.child(_one(stack, rng, role), module, 0)], seconds, stack)


def freeze_child(role: str, module: str, stack: ChaosStack, rng: random.Random) -> float:
    """A child stands still for good, while its service answers: somebody has to notice, and to end it."""
    child, now = stack.child(_one(stack, rng, role), module, 0), time.time()
    child.suspend()
    return now


# --- clocks ---------------------------------------------------------------------------------------------------------


def set_clock(role: str, ahead_seconds: float, stack: ChaosStack, rng: random.Random) -> float:
    """A service's clock is set, and set right after longer than a group's lease. It may be started again meanwhile."""
    name = _one(stack, rng, role)
    stack.set_clock(name, ahead_seconds)
    try:
        time.sleep(SHORT_SECONDS)
        if rng.random() < 0.5:
            kill_now([stack.process(name)])
        time.sleep(LONG_SECONDS)
    finally:
        stack.set_clock(name, 0.0)
    return time.time()


# --- descriptors ----------------------------------------------------------------------------------------------------


def take_descriptors(role: str, stack: ChaosStack, rng: random.Random) -> float:
    """A service may open no further file or connection, for longer than a group's lease; its workers, if any, die."""
    name = _one(stack, rng, role)
    with no_descriptors(stack.process(name).pid):
        kill_now(stack.children(name, WORKER))
        time.sleep(LONG_SECONDS)
    return time.time()


# --- network --------------------------------------------------------------------------------------------------------


def _links(stack: ChaosStack, rng: random.Random, role: str, other: str) -> list[Link]:
    return stack.between(_one(stack, rng, role), other)


@contextlib.contextmanager
def _bad(stack: ChaosStack, links: list[Link], how: str) -> Iterator[None]:
    for link in links:
        stack.loop.do(link.delay(DELAY_SECONDS) if how == "delay" else getattr(link, how)())
    try:
        yield
    finally:
        for link in links:
            stack.loop.do(link.restore())


def network(how: str, role: str, other: str, stack: ChaosStack, rng: random.Random) -> float:
    """cut, delay or drop everything between a service and another one; for shorter or longer than leases."""
    return worsen(how, _links(stack, rng, role, other), stack, rng)


def worsen(how: str, links: list[Link], stack: ChaosStack, rng: random.Random) -> float:
    """cut, delay or drop everything on some links."""
    seconds = LONG_SECONDS if how == "delay" else rng.choice(list(LENGTHS.values()))
    with _bad(stack, links, how):
        time.sleep(seconds)
    return time.time()


def reset_everything(stack: ChaosStack, rng: random.Random) -> float:
    """All connections break at once."""
    for link in stack.links.values():
        stack.loop.do(link.reset())
    return time.time()


# --- numbers --------------------------------------------------------------------------------------------------------


def overflow_a_gradient(stack: ChaosStack, rng: random.Random) -> float:
    """Rewards are huge until an update is skipped: they are finite, and so are the advantages.

    A critic service skips its own; the policy's advantages are whitened then, and nothing of it overflows.
    """
    ledger = f"{key_prefix(RUN)}ledger"
    last = stack.redis.xrevrange(ledger, count=1)[0][0].decode()
    stack.huge_rewards.touch()
    try:
        await_moment(
            lambda: any(_has_skipped(step) for _, step in stack.redis.xrange(ledger, f"({last}")), "a skipped update"
        )
    finally:
        stack.huge_rewards.unlink()
    return time.time()


def _has_skipped(step: dict[bytes, bytes]) -> bool:
    skipped = json.loads(step[b"plan"])["skipped_updates"]
    return bool(skipped or json.loads(step[b"metrics"]).get("value_skipped_updates"))


def _drops_from_now(stack: ChaosStack) -> Callable[[str], int]:
    """Return a function that counts the groups dropped from now on whose details have some words."""
    dropped = f"{key_prefix(RUN)}dropped"
    last = (stack.redis.xrevrange(dropped, count=1) or [(b"0-0", {})])[0][0].decode()

    def count(words: str) -> int:
        found = stack.redis.xrange(dropped, f"({last}")
        return sum(words.encode() in fields.get(b"detail", b"") for _, fields in found)

    return count


def fail_teacher(stack: ChaosStack, rng: random.Random) -> float:
    """The teacher's engine gives wrong answers until three groups are dropped for each: it stays up meanwhile."""
    drops = _drops_from_now(stack)
    stack.failing_teacher.touch()
    try:
        await_moment(
            lambda: all(drops(words) >= 3 for words in WRONG_ANSWERS), "three dropped groups for each wrong answer"
        )
        return time.time()
    finally:
        stack.failing_teacher.unlink()


def misbehave(mood: str, words: str, stack: ChaosStack, rng: random.Random) -> float:
    """The environment or the program of conversations does this until two groups are dropped with these words."""
    drops = _drops_from_now(stack)
    _in_mood(stack, mood, lambda: drops(words) >= 2, "two groups were dropped")
    return time.time()


def play_trick(trick: str, stack: ChaosStack, rng: random.Random) -> float:
    """Programs do this until two of them have come through with it, or one had harm done to it or to another."""
    played, harmed = (stack.mood.with_suffix(suffix) for suffix in (PLAYED, HARMED))
    played.unlink(missing_ok=True)

    def two_have_ended() -> bool:
        return harmed.exists() or (played.exists() and played.read_text().count("\n") >= 2)

    _in_mood(stack, trick, two_have_ended, "two programs ended")
    return time.time()


def _in_mood(stack: ChaosStack, mood: str, reached: Callable[[], bool], what: str) -> None:
    """Set the mood of environment and programs until something is reached. Raises MomentMissed."""
    stack.mood.write_text(mood)
    try:
        await_moment(reached, what)
    finally:
        stack.mood.unlink()


def kill_program(stack: ChaosStack, rng: random.Random) -> float:
    """A program that leads a conversation."""
    return kill_now([_program(stack, rng)])


def freeze_program(stack: ChaosStack, rng: random.Random) -> float:
    """A program stands still for good."""
    program, now = _program(stack, rng), time.time()
    program.suspend()
    return now


def _program(stack: ChaosStack, rng: random.Random) -> psutil.Process:
    """Return a running program. Raises MomentMissed: there is none."""
    deadline = time.monotonic() + NOTICE_SECONDS
    while time.monotonic() < deadline:
        if found := [one for name in stack.names("agent") for one in stack.children(name, PROGRAM.name)]:
            return rng.choice(found)
        time.sleep(0.001)
    raise MomentMissed(f"no program has run in {NOTICE_SECONDS:g} s")


def fork_and_kill_host(stack: ChaosStack, rng: random.Random) -> float:
    """The environment forks; its host is killed. What it has forked must end, too."""
    left = stack.mood.with_suffix(f".{FORKS}")
    left.unlink(missing_ok=True)
    _in_mood(stack, FORKS, left.exists, "something was forked")
    hosts = [host for name in stack.names("agent") for host in stack.children(name, HOST)]
    now = kill_now(hosts)
    forked = [int(line) for line in left.read_text().split()]
    wait_until(lambda: not any(map(is_alive, forked)), "the end of what a killed environment has forked")
    return now


# --- Redis ----------------------------------------------------------------------------------------------------------


def fill_redis(stack: ChaosStack, rng: random.Random) -> float:
    """No memory is left, for longer than a group's lease."""
    with limited_memory(stack.redis, int(stack.redis.info("memory")["used_memory"])):
        time.sleep(LONG_SECONDS)
    return time.time()


@contextlib.contextmanager
def limited_memory(client: redis.Redis, most: int) -> Iterator[None]:
    """Let a Redis use at most `most` bytes inside the context."""
    try:
        client.config_set("maxmemory", most)
        yield
    finally:
        client.config_set("maxmemory", 0)


def fill_disk(stack: ChaosStack, rng: random.Random) -> float:
    """Redis can't write to its append-only file any more, and refuses writes until it can."""
    process = psutil.Process(stack.process("redis").pid)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    try:
        process.rlimit(psutil.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        time.sleep(LONG_SECONDS)
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, unlimited)
    return time.time()


def demote_redis(stack: ChaosStack, rng: random.Random) -> float:
    """Redis is a replica, of a primary that isn't there, and takes no writes; then it is the primary again."""
    try:
        stack.redis.replicaof("127.0.0.1", 1)
        time.sleep(LONG_SECONDS)
    finally:
        stack.redis.replicaof("NO", "ONE")
    return time.time()


def occupy_redis(stack: ChaosStack, rng: random.Random) -> float:
    """A script runs for ever, until somebody kills it: Redis answers everybody that it is busy."""

    def run() -> None:
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(stack.redis_url, socket_timeout=60) as client:
            client.eval("while true do end", 0)

    stack.redis.config_set("busy-reply-threshold", 100)
    script = threading.Thread(target=run)
    script.start()
    time.sleep(LONG_SECONDS)
    stack.redis.script_kill()
    script.join()
    return time.time()


# --- weight synchronisation -----------------------------------------------------------------------------------------


def _at(
    relay: str,
    method: str,
    moment: Moment,
    victim: Callable[[], psutil.Process],
    stack: ChaosStack,
    strike_at: Callable[[psutil.Process], object] = lambda process: kill_now([process]),
) -> "threading.Event":
    """Kill the victim, or do something else to it, at a moment of a call."""
    process, done = victim(), threading.Event()

    def strike() -> None:
        strike_at(process)
        done.set()

    stack.loop.do(stack.relays[relay].arm(method, moment, strike))
    return done


def _await(done: threading.Event, relay: str, stack: ChaosStack) -> float:
    happened = done.wait(NOTICE_SECONDS)
    now = time.time()
    stack.loop.do(stack.relays[relay].disarm())
    if not happened:
        raise MomentMissed(f"{relay} was not called in {NOTICE_SECONDS:g} s")
    return now


def kill_in_sync(
    relay_role: str, method: str, moment: Moment, role: str, module: str, stack: ChaosStack, rng: random.Random
) -> float:
    """Kill somebody (his child, if a module is given) at a moment of a call to an engine or the trainer."""
    name = _one(stack, rng, role)
    relay = name if relay_role == role else _one(stack, rng, relay_role)
    victim = partial(stack.child, name, module) if module else partial(stack.process, name)
    return _await(_at(relay, method, moment, victim, stack), relay, stack)


def stall_coordinator_after_commit(stack: ChaosStack, rng: random.Random) -> float:
    """An engine has received weights, and hears nothing of them for longer than the lease of its pause."""
    engine, name = _one(stack, rng, "rollout"), _one(stack, rng, "coordinator")
    coordinator = stack.process(name)
    stopped = _at(engine, "ReceiveWeights", "answered", lambda: coordinator, stack, psutil.Process.suspend)
    _await(stopped, engine, stack)
    return stand_still([coordinator], AWAY_SECONDS, stack)


def kill_engine_in_join(stack: ChaosStack, rng: random.Random) -> float:
    """A weight group is built anew, because one engine died; another one dies while it is."""
    first, second = rng.sample(stack.names("rollout"), 2)
    done = _at(second, "JoinWeightGroup", "passed_on", partial(stack.child, second, ENGINE), stack)
    kill_now([stack.child(first, ENGINE)])
    return _await(done, second, stack)


ENGINE, RANK, WORKER, FROZEN_RANK, CRITIC_RANK, TEACHER_ENGINE = (
    "services.rollout.engines.transformers.transformers_process",
    "services.trainer.loop.training_rank",
    "services.reward.worker",
    "services.trainer.reference_models.frozen_rank",
    "services.trainer.critic_rank",
    MODULE,
)


HOST = "relaxd.envs.host"


def _named(name: str, act: Callable[..., float], *arguments: object) -> Fault:
    return Fault(name, partial(act, *arguments))


def critic_faults() -> list[Fault]:
    """Faults of runs with the algorithm "critic"."""
    return [
        _named("kill critic", kill_service, "critic"),
        _named("kill critic rank", kill_child, "critic", CRITIC_RANK, 0),
        _named("kill critic and trainer rank", kill_critic_and_trainer),
        _named("freeze critic rank", freeze_child, "critic", CRITIC_RANK),
        _named("restart critic", restart, "critic"),
        *(_named(f"stall critic {length}", stall, "critic", seconds) for length, seconds in LENGTHS.items()),
        _named("cut: critic - redis", network, "cut", "critic", "redis"),
    ]


def teacher_engine_faults() -> list[Fault]:
    """Faults of runs whose teacher is in an engine."""
    return [
        _named("kill teacher engine", kill_child, "teacher", TEACHER_ENGINE, 0),
        _named("freeze teacher engine", freeze_child, "teacher", TEACHER_ENGINE),
        _named("stall teacher engine long", stall_child, "teacher", TEACHER_ENGINE, LONG_SECONDS),
        _named("wrong answers of the teacher engine", fail_teacher),
    ]


def host_faults() -> list[Fault]:
    """Faults of runs whose trainer is on two hosts."""
    return [
        _named("kill ranks", kill_service, "ranks"),
        _named("restart ranks", restart, "ranks"),
        _named("freeze ranks rank", freeze_child, "ranks", RANK),
        _named("stall ranks rank long", stall_child, "ranks", RANK, LONG_SECONDS),
        *(_named(f"stall ranks {length}", stall, "ranks", seconds) for length, seconds in LENGTHS.items()),
        *(
            _named(f"{how}: ranks - {other}", network, how, "ranks", other)
            for how in ("cut", "drop")
            for other in ("coordinator", "redis")
        ),
        _named("clock back: ranks", set_clock, "ranks", -DAYS_BACK),
        _named("clock ahead: ranks", set_clock, "ranks", HOURS_AHEAD),
    ]


def agent_faults() -> list[Fault]:
    """Faults of runs whose samples are conversations with an environment."""
    return [
        *replica_faults(),
        _named("kill agent environment", kill_child, "agent", HOST, 0),
        _named("freeze agent environment", freeze_child, "agent", HOST),
        _named("agent environment forks and dies", fork_and_kill_host),
        *(_named(f"agent environment {mood}", misbehave, mood, words) for mood, words in MOODS.items()),
    ]


def program_faults() -> list[Fault]:
    """Faults of runs whose samples are conversations that programs lead."""
    return [
        *replica_faults(),
        _named("kill agent program", kill_program),
        _named("freeze agent program", freeze_program),
        *(_named(f"agent program {mood}", misbehave, mood, words) for mood, words in PROGRAM_MOODS.items()),
        *(_named(f"agent program {trick}", play_trick, trick) for trick in TRICKS),
    ]


def replica_faults() -> list[Fault]:
    """Faults of agent replicas."""
    return [
        _named("kill agent", kill_service, "agent"),
        _named("kill both agents", kill_all, "agent"),
        _named("restart agent", restart, "agent"),
        *(_named(f"stall agent {length}", stall, "agent", seconds) for length, seconds in LENGTHS.items()),
        _named("cut: agent - redis", network, "cut", "agent", "redis"),
        _named("drop: agent - coordinator", network, "drop", "agent", "coordinator"),
    ]


def all_faults(algorithm: str = "grpo") -> list[Fault]:
    """Every kind, for a run with an algorithm of the stack."""
    in_ranks = ("reference",) if algorithm == "teacher-engine" else FROZEN_ROLES
    faults = [
        *(_named(f"kill {role}", kill_service, role) for role in (*STAGE_ROLES, "trainer", "judge")),
        _named("kill coordinator", kill_service, "coordinator"),
        _named("kill redis", kill_redis),
        _named("kill both rollouts", kill_all, "rollout"),
        _named("kill both rewards", kill_all, "reward"),
        _named("kill engine", kill_child, "rollout", ENGINE, 0),
        _named("kill reward worker", kill_child, "reward", WORKER, 0),
        *(_named(f"kill {role} rank", kill_child, role, FROZEN_RANK, 0) for role in in_ranks),
        _named("kill trainer rank 0", kill_trainer_rank, 0),
        _named("kill trainer rank 1", kill_trainer_rank, 1),
        _named("kill a rank: step file written", kill_rank_when, "steps/step-*.safetensors", 0.0),
        _named("kill a rank: updates", kill_rank_when, "steps/step-*.safetensors", UPDATE_SECONDS),
        _named("kill a rank: writing a step file", kill_rank_when, "steps/*.partial", 0.0),
        _named("kill a rank: checkpoint", kill_rank_when, "checkpoints/.*.partial", 0.0),
        _named("kill a rank: checkpoint complete", kill_rank_when, "checkpoints/step-*", UPDATE_SECONDS),
        _named("restart coordinator", restart, "coordinator"),
        _named("restart redis", restart, "redis"),
        _named("restart rollout", restart, "rollout"),
        *(_named(f"restart {role}", restart, role) for role in FROZEN_ROLES),
        *(
            _named(f"stall {role} {length}", stall, role, seconds)
            for role in (*STAGE_ROLES, "trainer", "coordinator", "redis")
            for length, seconds in LENGTHS.items()
        ),
        _named("stall engine long", stall_child, "rollout", ENGINE, LONG_SECONDS),
        _named("freeze engine", freeze_child, "rollout", ENGINE),
        _named("kill judge engine", kill_child, "judge", ENGINE, 0),
        _named("freeze judge engine", freeze_child, "judge", ENGINE),
        *(_named(f"freeze {role} rank", freeze_child, role, FROZEN_RANK) for role in in_ranks),
        _named("stall trainer rank long", stall_child, "trainer", RANK, LONG_SECONDS),
        *(
            _named(f"{how}: {role} - {other}", network, how, role, other)
            for how in ("cut", "delay", "drop")
            for role, other in (
                ("rollout", "redis"),
                ("reward", "redis"),
                ("trainer", "redis"),
                ("coordinator", "redis"),
                ("rollout", "coordinator"),
                ("advantage", "coordinator"),
                ("trainer", "coordinator"),
                ("reference", "redis"),
                ("teacher", "coordinator"),
            )
        ),
        _named("reset all connections", reset_everything),
        _named("two stacks", meet_another_stack),
        *(_named(f"descriptors: {role}", take_descriptors, role) for role in ("coordinator", "reward")),
        *(_named(f"clock back: {role}", set_clock, role, -DAYS_BACK) for role in CLOCK_ROLES),
        *(_named(f"clock ahead: {role}", set_clock, role, HOURS_AHEAD) for role in ("coordinator", "trainer")),
        _named("overflow a gradient", overflow_a_gradient),
        _named("fill redis", fill_redis),
        _named("redis: disk full", fill_disk),
        _named("redis: demoted", demote_redis),
        _named("redis: busy", occupy_redis),
        _named("sync: engine dies in join", kill_engine_in_join),
        _named("sync: coordinator stalls after commit", stall_coordinator_after_commit),
    ]
    sync: list[tuple[str, str, str, Moment, str, str]] = [
        ("engine dies before pause", "rollout", "ReceiveWeights", "asked", "rollout", ENGINE),
        ("engine dies in pause", "rollout", "ReceiveWeights", "passed_on", "rollout", ENGINE),
        ("engine dies in broadcast", "trainer", "BroadcastWeights", "passed_on", "rollout", ENGINE),
        ("engine dies after commit", "rollout", "ReceiveWeights", "answered", "rollout", ENGINE),
        ("engine dies in resume", "rollout", "ResumeGeneration", "passed_on", "rollout", ENGINE),
        ("rollout dies in broadcast", "trainer", "BroadcastWeights", "passed_on", "rollout", ""),
        ("rank dies in broadcast", "trainer", "BroadcastWeights", "passed_on", "trainer", RANK),
        ("trainer dies in broadcast", "trainer", "BroadcastWeights", "passed_on", "trainer", ""),
        ("coordinator dies in broadcast", "trainer", "BroadcastWeights", "passed_on", "coordinator", ""),
        ("coordinator dies after commit", "rollout", "ReceiveWeights", "answered", "coordinator", ""),
    ]
    faults += [_named(f"sync: {name}", kill_in_sync, *rest) for name, *rest in sync]
    own = {
        "critic": critic_faults,
        "teacher-engine": teacher_engine_faults,
        "agent": agent_faults,
        "shown-media": agent_faults,
        "program": program_faults,
        "hosts": host_faults,
    }
    return faults + (own[algorithm]() if algorithm in own else [])


def faults_of(roles: Collection[str], kinds: Sequence[Fault]) -> tuple[str, ...]:
    """The names of the faults that befall one of these roles. Raises ValueError: none befalls one of them."""
    faults = {fault.name: set(fault.name.split()) for fault in kinds}
    if spared := sorted(set(roles).difference(*faults.values())):
        raise ValueError(f"no fault befalls {', '.join(spared)}: the roles are in the faults' names (--list)")
    return tuple(name for name, words in faults.items() if not words.isdisjoint(roles))


SHORT_SUITE = (
    *("stall advantage long", "cut: reward - redis", "delay: trainer - redis"),
    *("drop: rollout - coordinator", "fill redis", "redis: demoted", "overflow a gradient"),
    "sync: engine dies in broadcast",
)
"""Faults of the ordinary tests: one of every kind, those that pass quickly, except deaths of services, which a test of
`tests/e2e/test_run.py` has. The nightly tests have all."""


def gentle(kinds: Sequence[Fault]) -> tuple[str, ...]:
    """Return the names of the faults that end no process: memory can be watched for as long as one likes."""
    return tuple(
        fault.name
        for fault in kinds
        if fault.name.startswith(("stall", "delay", "reset", "overflow", "fill", "redis:"))
        and "very long" not in fault.name
    )


def deck(count: int, rng: random.Random, names: tuple[str, ...] = (), of: Sequence[Fault] | None = None) -> list[Fault]:
    """`count` faults in random order, each kind (or each of `names`) equally often.

    `of`: the kinds; by default those of a run with the algorithm "grpo". Raises ValueError: `names` has others.
    """
    kinds = {fault.name: fault for fault in (all_faults() if of is None else of)}
    if unknown := sorted(set(names) - kinds.keys()):
        raise ValueError(f"this job has no fault {', '.join(map(repr, unknown))}; it has {', '.join(sorted(kinds))}")
    chosen = [kinds[name] for name in names] or list(kinds.values())
    faults: list[Fault] = []
    while len(faults) < count:
        faults += rng.sample(chosen, len(chosen))
    return faults[:count]


PASSING = (redis.RedisError, psutil.Error, RuntimeError)
"""What looking at a stack that is broken may raise."""
