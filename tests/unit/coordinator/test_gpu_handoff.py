"""GPU handoff of a colocated run: its next move, how long failures are waited for, and what a run leaves behind."""

import asyncio
import contextlib
import time
from dataclasses import replace
from itertools import product

import pytest

from relaxd.config import BoardConfig, DataConfig, ModelConfig, RewardConfig, RunConfig, RunSection
from relaxd.roles import REPLICA_ROLES, ROLLOUT, TRAINER
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY, ReplicaStatus, WeightVersion
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry
from services.coordinator.fleet.run_fleet import Fleet, RunContext
from services.coordinator.state.records import WeightsRecord
from services.coordinator.state.store import AsyncStore, RunBoard, Store
from services.coordinator.weights.gpu_handoff import GpuHandoff, HandoffFailures, HandoffMove, Situation, next_move
from services.coordinator.weights.weight_sync import WeightSync
from tests.kit.boards import STAGES
from tests.kit.cases import each
from tests.kit.waiting import eventually

GENERATING = Situation(
    trainer="ready", trainer_awake=False, engines_awake=True, engines_able=True, engines_serving=True,
    generating=True, announced=True,
)  # fmt: skip
TRAINING = Situation(trainer="ready", trainer_awake=True, engines_able=True, due=True, announced=True)
TRAINED = replace(TRAINING, due=False)


@each(
    ("what", "now", "move"),
    [
        ("groups are generated", GENERATING, HandoffMove.WAIT),
        ("all are there", replace(GENERATING, generating=False, due=True), HandoffMove.TRAIN),
        ("the step is trained", TRAINING, HandoffMove.WAIT),
        ("it is committed, and not announced", replace(TRAINED, announced=False), HandoffMove.WAIT),
        ("it is announced", TRAINED, HandoffMove.SYNCHRONISE),
        ("a synchronisation broke", replace(TRAINED, engines_awake=True), HandoffMove.SYNCHRONISE),
        ("a wake-up broke", replace(TRAINING, engines_awake=True), HandoffMove.TRAIN),
        ("the trainer died while the engines generate", replace(GENERATING, trainer="waiting"), HandoffMove.WAIT),
        (
            "and they have ended",
            replace(GENERATING, trainer="waiting", generating=False, due=True),
            HandoffMove.START_TRAINER,
        ),
        ("they sleep, so it may ask", Situation(trainer="waiting", trainer_awake=False), HandoffMove.WAIT),
        ("it replays", replace(TRAINING, trainer="starting"), HandoffMove.WAIT),
        ("an engine died beside others", replace(GENERATING, engines_waiting=True), HandoffMove.WAIT),
        ("an engine died in its sleep", replace(TRAINING, engines_waiting=True, engines_able=False), HandoffMove.WAIT),
        ("the step after that", replace(TRAINED, engines_waiting=True, engines_able=False), HandoffMove.START_ENGINES),
        (
            "it loads",
            replace(TRAINED, trainer_awake=False, engines_starting=True, engines_awake=True, engines_able=False),
            HandoffMove.WAIT,
        ),
        (
            "it is there, without weights",
            replace(GENERATING, engines_serving=False, generating=False),
            HandoffMove.SYNCHRONISE,
        ),
        ("no trainer yet", Situation(trainer="absent", trainer_awake=False, engines_awake=True), HandoffMove.WAIT),
        ("no engine yet", replace(TRAINED, engines_able=False), HandoffMove.WAIT),
        ("groups were dropped while training", TRAINED, HandoffMove.SYNCHRONISE),
        ("the judge sleeps with the engines", replace(TRAINING, judges_asleep=True), HandoffMove.WAIT),
        ("and sleeps on while they get weights", replace(TRAINED, judges_asleep=True), HandoffMove.SYNCHRONISE),
        ("its wake-up broke", replace(GENERATING, judges_asleep=True), HandoffMove.WAKE_JUDGES),
        (
            "it failed, but others have answered for every group",
            replace(GENERATING, judges_asleep=True, generating=False, due=True),
            HandoffMove.TRAIN,
        ),
        (
            "a checkpoint is wanted while groups wait for it",
            replace(GENERATING, judges_asleep=True, due=True),
            HandoffMove.WAKE_JUDGES,
        ),
        (
            "and the trainer died, whose turn would never come without rewards",
            replace(GENERATING, judges_asleep=True, trainer="waiting"),
            HandoffMove.WAKE_JUDGES,
        ),
        (
            "another engine loads beside it",
            replace(GENERATING, judges_asleep=True, engines_starting=True),
            HandoffMove.WAKE_JUDGES,
        ),
        (
            "the trainer starts, and has the device",
            replace(GENERATING, judges_asleep=True, trainer="starting"),
            HandoffMove.WAIT,
        ),
    ],
)
def test_each_situation_has_its_move(what: str, now: Situation, move: HandoffMove) -> None:
    assert next_move(now) == move, what


def test_no_move_takes_a_device_from_a_replica_that_starts_or_works() -> None:
    flags = [name for name in Situation.__dataclass_fields__ if name != "trainer"]
    for trainer, values in product(
        ("absent", "waiting", "starting", "ready"), product((False, True), repeat=len(flags))
    ):
        now = Situation(trainer=trainer, **dict(zip(flags, values, strict=True)))  # type: ignore[arg-type]
        move = next_move(now)
        if move == HandoffMove.WAKE_JUDGES:  # onto devices that engines have
            assert now.judges_asleep
            assert now.engines_serving
            assert trainer != "starting"
            assert not now.trainer_awake
            continue
        if now.engines_starting or trainer == "starting":
            assert move == HandoffMove.WAIT, now
        if move in (HandoffMove.TRAIN, HandoffMove.START_TRAINER):
            assert not now.generating, now
        if move == HandoffMove.START_ENGINES:
            assert not now.due, now
        if move != HandoffMove.WAIT and trainer != "ready":
            assert move == HandoffMove.START_TRAINER, now


Call = tuple[float, str, str, float]
"""When a call begins, what it asks for, its error (empty: it worked), and how long it takes."""


@each(
    ("what", "calls", "seconds", "given_up"),
    [
        ("nothing was asked", [], None, False),
        ("one call hung", [(0, "wake up", "late", 125)], 125, False),
        ("three did", [(n * 126, "wake up", "late", 125) for n in range(3)], 377, True),
        ("it refuses at once, many times", [(n * 2, "wake up", "no memory", 0.1) for n in range(179)], 356.1, False),
        ("and goes on", [(n * 2, "wake up", "no memory", 0.1) for n in range(182)], 362.1, True),
        ("it works in the end", [(0, "wake up", "late", 400), (401, "wake up", "", 1)], None, False),
        ("nobody asked for long", [(0, "wake up", "late", 10), (10, "wake up", "late", 1)], 11, False),
        ("it wakes up, and can't sleep", [(0, "wake up", "late", 300), (301, "sleep", "late", 100)], 100, False),
    ],
)
def test_a_process_is_given_up_after_three_timeouts_in_a_row(
    what: str, calls: list[Call], seconds: float | None, given_up: bool
) -> None:
    now = 1000.0
    failures = HandoffFailures(120.0, lambda: now)
    for begins, action, error, takes in calls:
        began, now = 1000.0 + begins, 1000.0 + begins + takes
        if error:
            failures.failed("judge-1", action, error, began)
        else:
            failures.worked("judge-1")
    now += 5000.0  # no call was made meanwhile
    failure = failures.of("judge-1")
    assert (None if failure is None else round(failure.seconds, 3)) == seconds, what
    assert failures.given_up("judge-1") == given_up, what
    assert failures.of("judge-2") is None
    assert not failures.given_up("judge-2")


async def colocated(redis_url: str) -> tuple[Registry, WeightSync, GpuHandoff, RunBoard]:
    """A colocated run with an engine that can't be reached."""
    store = AsyncStore(Store(redis_url))
    store.in_threads.take_over()
    registry = Registry(store, lease_seconds=6.0, heartbeat_seconds=1.0, gpu_lease_seconds=60.0)
    await registry.register(Registration(replica_id="rollout-0", role=ROLLOUT, address="127.0.0.1:9"))
    config = RunConfig(
        run=RunSection(steps=9, colocate=True),
        model=ModelConfig(path="none"),
        data=DataConfig(source="addition"),
        reward=RewardConfig(name="addition"),
        board=BoardConfig(max_staleness=0),
    )
    board = RunBoard(redis_url, "run", STAGES, config.board, retry_seconds=0.2)
    context = RunContext("run", config, board, store, Fleet(registry, "run", REPLICA_ROLES), Peers("", None, 1))
    sync = WeightSync(context, WeightsRecord())
    handoff = GpuHandoff(context, sync, training=lambda: True, evaluating=lambda: False)
    return registry, sync, handoff, board


async def test_engines_that_slept_serve_the_next_run(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, sync, handoff, board = await colocated(redis_url)
    engine = registry.of_role(ROLLOUT)[0]

    task = asyncio.create_task(handoff.run_forever())
    await asyncio.sleep(0)  # it begins
    engine.set_serving(serving=False)
    engine.request_gpu()
    task.cancel()  # as at the end of the run
    with contextlib.suppress(asyncio.CancelledError):
        await task

    weights = WeightVersion(term=2, version=0)
    registry.heartbeat("rollout-0", ReplicaStatus(state=REPLICA_STATE_READY, run_id="next", weights=weights))
    assert engine.version == (2, 0)
    assert engine.gpu_requested_at == 0.0

    # Turns aren't on record: only the clock makes their ids ascend.
    turn, now = sync.next_id(), time.time
    monkeypatch.setattr(time, "time", lambda: now() - 40 * 86400)
    assert sync.next_id() >= turn
    await board.close()


async def test_no_move_is_made_once_it_rests(redis_url: str) -> None:
    registry, _, handoff, board = await colocated(redis_url)
    await board.create(term=1, groups_per_step=4, steps=9)
    await registry.register(Registration(replica_id="trainer", role=TRAINER, address="127.0.0.1:9"))
    for name, awake in (("rollout-0", True), ("trainer", False)):
        status = ReplicaStatus(state=REPLICA_STATE_READY, run_id="run", awake=awake)
        registry.heartbeat(name, status)
    task = asyncio.create_task(handoff.run_forever())
    with handoff.trainer_awake():
        await eventually(lambda: handoff.last_failure, "a move that fails")
        await handoff.rest()
        handoff.last_failure = ""
        with pytest.raises(TimeoutError):  # the failed move would be repeated after 0.1 s
            await asyncio.wait_for(task, 0.5)
    assert handoff.waiting_for == ""
    await board.close()
