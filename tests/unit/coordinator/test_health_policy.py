"""What health decides over time: restarts of replicas, rebuilds of roles, and when it gives up."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from services.coordinator.health.policy import RestartMode
from services.coordinator.state.records import Health
from tests.unit.coordinator.health_world import LEASE_SECONDS, ROLES, START_SECONDS, TICK_SECONDS, World

FAILED, HEALTHY, REBUILDING = Health.FAILED, Health.HEALTHY, Health.REBUILDING
RESTARTING, SUSPECT = Health.RESTARTING, Health.SUSPECT
REQUEST, PROBE, FORCE = RestartMode.REQUEST, RestartMode.PROBE, RestartMode.FORCE
QUICK = {"stuck_seconds": 10.0, "restart_timeout_seconds": 20.0, "first_backoff_seconds": 5.0, "max_restarts": 3}

MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(redis_url: str) -> MakeWorld:
    return lambda **health: World(redis_url, {**QUICK, **health})


async def start(world: World, *besides: str) -> World:
    """One replica of each role, and these, at work."""
    for name in ("trainer-1", "rollout-1", "reward-1", "advantage-1", *besides):
        await world.add(name)
    await world.passes(5.0)
    assert not world.record.events
    return world


@pytest.mark.parametrize(
    ("plan", "expected", "modes"),
    [
        ("works", [], []),
        ("stuck works", [(RESTARTING, "it is stuck: it holds 2 groups"), (HEALTHY, "r1 works after")], [REQUEST]),
        ("wrong works", [(RESTARTING, "4 weight synchronisations in a row"), (HEALTHY, "works")], [REQUEST]),
        ("frozen works", [(RESTARTING, "its heartbeats stopped"), (HEALTHY, "works after")], [PROBE]),
        (
            "stuck gone works",
            [(RESTARTING, "it is stuck"), (RESTARTING, "it did not come back within 20 s"), (HEALTHY, "works after")],
            [REQUEST, FORCE],
        ),
        (
            "stuck gone gone",
            [
                (RESTARTING, "it is stuck"),
                (RESTARTING, "it did not come back within 20 s"),
                (RESTARTING, "it did not come back within 40 s"),
                (FAILED, "failed after 3 tries: it did not come back within 80 s"),
            ],
            [REQUEST, FORCE, FORCE],
        ),
    ],
)
async def test_a_replica_of_several(
    make_world: MakeWorld, plan: str, expected: list[tuple[Health, str]], modes: list[RestartMode]
) -> None:
    world = await start(make_world())
    await world.add("rollout-2", *plan.split())
    await world.passes(250.0)
    events = world.events("rollout-2")
    assert [event.state for event in events] == [state for state, _ in expected]
    for event, (_, text) in zip(events, expected, strict=True):
        assert text in event.text
    assert [restart.mode for restart in world.restarts] == modes
    assert len(world.record.events) == len(events)  # the role has another engine
    assert world.record.roles["rollout"].state == HEALTHY
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    if expected:
        assert "rollout-2" in world.lost or plan.startswith("stuck gone gone")


async def test_restarts_back_off_and_end(make_world: MakeWorld) -> None:
    world = await start(make_world())
    await world.add("rollout-2", "stuck")
    gave_up = await world.until(FAILED, "rollout-2")
    assert "failed after 3 tries: it is stuck" in gave_up.text
    gaps = [after.at - before.at for before, after in pairwise(world.restarts)]
    # Each process starts, is stuck for a while, and is left alone for as long as the back-off says.
    stuck_seconds = QUICK["stuck_seconds"] + 2.0  # and the timeouts of the weights
    assert gaps == [pytest.approx(START_SECONDS + stuck_seconds, abs=3 * TICK_SECONDS)] * 2
    await world.passes(500.0)
    assert len(world.restarts) == 3
    # One more try for each window.
    await world.passes(1300.0)
    assert len(world.restarts) == 5


@pytest.mark.parametrize(("first_seconds", "expected"), [(20.0, [20.0, 40.0, 80.0]), (60.0, [60.0, 120.0, 240.0])])
async def test_a_replica_that_is_stuck_at_once_waits_for_its_back_off(
    make_world: MakeWorld, first_seconds: float, expected: list[float]
) -> None:
    world = await start(make_world(first_backoff_seconds=first_seconds, max_restarts=4))
    await world.add("rollout-2", "stuck")
    await world.until(FAILED, "rollout-2", 1000.0)
    gaps = [after.at - before.at for before, after in pairwise(world.restarts)]
    assert gaps == [pytest.approx(gap, abs=TICK_SECONDS) for gap in expected]


async def test_a_short_stall_is_none_of_healths_business(make_world: MakeWorld) -> None:
    world = await start(make_world())
    process = world.instances["rollout-1"].process
    assert process is not None
    process.does = "frozen"
    await world.passes(LEASE_SECONDS - TICK_SECONDS)
    process.does = "works"
    await world.passes(60.0)
    assert not world.record.events


@pytest.mark.parametrize("name", ["trainer-1", "reward-1", "advantage-1"])
async def test_the_only_replica_of_a_role_is_restarted_too(make_world: MakeWorld, name: str) -> None:
    world = await start(make_world(stuck_seconds=200.0))
    process = world.instances[name].process
    assert process is not None
    process.does = "stuck"
    world.instances[name].plan = ["works"]
    assert "it is stuck" in (await world.until(RESTARTING, name, 1000.0)).text
    await world.until(HEALTHY, name)
    await world.passes(60.0)
    role = world.record.roles[name.split("-")[0]]
    assert (role.state, role.rebuilds) == (HEALTHY, 0)


async def test_a_death_that_its_supervisor_noticed_first(make_world: MakeWorld) -> None:
    world = await start(make_world())
    world.die("rollout-1", next_after=1.0)
    event = await world.until(RESTARTING, "rollout-1", 2.0)
    assert event.text == "rollout-1 died, and rollout-1-r1 replaced it"
    assert world.lost == ["rollout-1"]  # others get its groups at once
    await world.until(HEALTHY, "rollout-1", 5.0)
    assert not world.restarts


async def test_a_process_that_said_why_it_gives_up_is_replaced_with_its_reason(make_world: MakeWorld) -> None:
    world = await start(make_world())
    process = world.instances["reward-1"].process
    assert process is not None
    world.supervisor_seconds = 2 * LEASE_SECONDS
    process.does = "dies"
    event = await world.until(RESTARTING, "reward-1")
    assert event.text.endswith("its heartbeats stopped; its last error: the file of step 4 isn't there")


async def test_what_nobody_supervises_is_not_restarted(make_world: MakeWorld) -> None:
    world = await start(make_world())
    await world.add("rollout-2", "stuck", supervised=False)
    await world.passes(60.0)
    by_hand = world.record.replicas["rollout-2"]
    assert by_hand.state == SUSPECT
    assert by_hand.reason.startswith("it is stuck")
    assert "restart it by hand" in by_hand.reason
    assert not world.record.events
    world.die("rollout-2")
    event = await world.until(FAILED, "rollout-2", 2 * LEASE_SECONDS)
    assert event.text == "rollout-2 is gone, and no supervisor restarts it"
    await world.passes(60.0)
    assert "rollout-2" not in world.record.replicas
    assert not world.restarts


async def test_a_restart_goes_on_under_the_next_coordinator(make_world: MakeWorld) -> None:
    world = await start(make_world())
    world.die("reward-1")
    await world.until(RESTARTING, "reward-1")
    await world.passes(15.0)
    world.coordinator()
    began = world.now
    await world.until(HEALTHY, "reward-1")
    assert [restart.mode for restart in world.restarts] == [PROBE, FORCE]
    assert world.restarts[-1].at - began == pytest.approx(20.0, abs=2 * TICK_SECONDS)  # a whole wait of its own
    assert len({event.number for event in world.record.events}) == len(world.record.events)


ROLE = {"restart_timeout_seconds": 4.0, "max_restarts": 1, "role_timeout_seconds": 60.0, "max_rebuilds": 2}


async def test_a_role_that_never_comes_back_is_given_up(make_world: MakeWorld) -> None:
    world = await start(make_world(**ROLE))
    world.instances["rollout-1"].plan = ["gone"]
    world.die("rollout-1")
    await world.until(FAILED, "rollout")
    assert [event.state for event in world.events("rollout")] == [REBUILDING, REBUILDING, FAILED]
    assert world.record.roles["rollout"].pause.startswith(
        "rebuilding rollout (1 of 2): it did not come back within 4 s"
    )
    assert str(world.policy.failure).startswith("rollout could not be rebuilt: it did not come back")
    assert str(world.policy.failure).endswith("(2 attempts)")
    assert len(world.events("rollout-1")) < 20  # no storm
    world.coordinator()
    await world.passes(TICK_SECONDS)
    assert world.policy.failure  # for good


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_role_that_comes_back_is_healthy(make_world: MakeWorld, restarted: bool) -> None:
    world = await start(make_world(**ROLE))
    world.die("trainer-1")
    world.launcher_errors["trainer-1"] = "the launcher is away"
    assert "within 4 s: the launcher is away" in (await world.until(REBUILDING, "trainer")).text
    if restarted:
        world.coordinator()
    assert "rebuilt after" in (await world.until(HEALTHY, "trainer")).text
    assert world.record.roles["trainer"].rebuilds == 1
    world.step += 1
    await world.passes(TICK_SECONDS)
    assert world.record.roles["trainer"].rebuilds == 0  # it has done something


async def test_a_role_without_replicas_waits_for_new_ones(make_world: MakeWorld) -> None:
    world = await start(make_world(role_timeout_seconds=20.0, max_rebuilds=1))
    leaving = world.registry.get("rollout-1")
    assert leaving is not None
    await world.registry.drain(leaving)
    await world.passes(1.0)
    await world.registry.remove([leaving])
    world.die("rollout-1")
    assert "no rollout replica for" in (await world.until(REBUILDING, "rollout", 30.0)).text
    await world.passes(500.0)  # no rebuild is left, and nothing is there to rebuild
    assert world.policy.failure is None
    assert not world.events("rollout-1")  # who goes in peace is not missed
    assert world.lost == ["rollout-1"]
    await world.add("rollout-3")
    await world.until(HEALTHY, "rollout", 5.0)
    assert not world.restarts


DIES = "the file of step 4 isn't there"


@pytest.mark.parametrize(
    ("does", "supervisor_seconds", "error", "most_seconds"),
    [
        ("fails", 1.0, "its checkpoint doesn't fit", 1200.0),
        ("dies", 1.0, DIES, 300.0),
        ("dies", 2 * LEASE_SECONDS, DIES, 300.0),  # its lease ends before the next process registers
    ],
)
@pytest.mark.parametrize("role", ["critic", "trainer"])
async def test_a_role_that_fails_in_the_same_way_each_time_fails_the_run(
    redis_url: str, role: str, does: str, supervisor_seconds: float, error: str, most_seconds: float
) -> None:
    """Whether it fails to start, or each of its processes ends soon after: such as a critic that can't catch up."""
    quick = {**QUICK, "failed_seconds": 20.0, "max_rebuilds": 1}
    world = World(redis_url, quick, (*ROLES, "critic"), supervisor_seconds)
    await start(world, "critic-1")
    world.instances[f"{role}-1"].plan = [does]
    world.die(f"{role}-1", next_after=1.0)
    gave_up = await world.until(FAILED, f"{role}-1", most_seconds)
    assert error in gave_up.text
    assert gave_up.text.count(error) == 1
    await world.until(FAILED, role, most_seconds)
    assert str(world.policy.failure).startswith(f"{role} could not be rebuilt: ")
    assert error in str(world.policy.failure)
    assert [event.state for event in world.events(role) if event.state != HEALTHY] == [REBUILDING, FAILED]
    assert len(world.events(f"{role}-1")) < 30  # no storm


REFUSAL = "its checkpoint doesn't fit (attempt 1)"


@pytest.mark.parametrize("name", ["trainer-1", "rollout-1"])
async def test_a_refused_start_fails_the_run_at_once(make_world: MakeWorld, name: str) -> None:
    world = await start(make_world())
    world.instances[name].plan = ["refuses"]
    world.die(name, next_after=1.0)
    role = world.instances[name].role
    gave_up = await world.until(FAILED, role, 10.0)
    assert gave_up.text == str(world.policy.failure) == f"{role} can't start: it has failed: {REFUSAL}"
    (refused,) = [event for event in world.events(name) if event.state == FAILED]
    assert refused.text == f"{name}-r1 is not restarted, which would not help: it has failed: {REFUSAL}"
    assert world.record.replicas[name].reason == f"it has failed: {REFUSAL}"
    assert world.restarts == []
    world.coordinator()
    await world.passes(TICK_SECONDS)
    assert world.policy.failure  # for good


async def test_a_refused_start_of_one_of_several_costs_only_this_one(make_world: MakeWorld) -> None:
    world = await start(make_world())
    await world.add("rollout-2", "refuses", "works")
    await world.until(FAILED, "rollout-2", 10.0)
    await world.passes(100.0)
    assert (world.policy.failure, world.events("rollout"), world.restarts) == (None, [], [])
    world.die("rollout-2", next_after=1.0)  # a person has started it again, with other settings
    await world.until(HEALTHY, "rollout-2", 10.0)
    assert not world.record.replicas["rollout-2"].refused


async def test_a_role_waits_for_a_replica_that_may_still_start(make_world: MakeWorld) -> None:
    world = await start(make_world(failed_seconds=300.0))
    await world.add("rollout-2", "fails")
    world.instances["rollout-1"].plan = ["refuses"]
    world.die("rollout-1", next_after=1.0)
    await world.until(FAILED, "rollout-1", 10.0)
    await world.passes(60.0)
    assert world.policy.failure is None


@pytest.mark.parametrize("supervisor_seconds", [1.0, 2 * LEASE_SECONDS])
async def test_a_replica_that_works_before_it_dies_is_restarted_without_end(
    redis_url: str, supervisor_seconds: float
) -> None:
    world = await start(World(redis_url, {**QUICK, "max_rebuilds": 1}, supervisor_seconds=supervisor_seconds))
    world.instances["reward-1"].plan = ["works and dies"]
    world.die("reward-1", next_after=1.0)
    await world.passes(100.0)
    assert {event.state for event in world.events("reward-1")} == {RESTARTING, HEALTHY}
    assert len(world.events("reward-1")) > 15
    assert world.events("reward") == []


@pytest.mark.parametrize("does", ["fails", "dies"])
async def test_an_outage_costs_no_tries(make_world: MakeWorld, does: str) -> None:
    """Of Redis or of the coordinator: a process may have ended because of it."""
    world = await start(make_world(failed_seconds=10.0, restart_window_seconds=30.0))
    instance = world.instances["reward-1"]
    instance.plan = [does]
    world.die("reward-1", next_after=1.0)
    for outage in range(1, 4):
        while instance.count < 2 * outage:
            await world.passes(TICK_SECONDS)
        world.coordinator()
    assert {event.state for event in world.events("reward-1")} <= {RESTARTING, HEALTHY}
    await world.until(FAILED, "reward-1")  # without an outage


async def test_a_replica_that_died_too_often_is_well_once_it_works(make_world: MakeWorld) -> None:
    """Not as soon as it is ready: it was ready each time."""
    world = await start(make_world())
    await world.add("rollout-2", "dies")
    await world.until(FAILED, "rollout-2")
    before = len(world.events("rollout-2"))
    await world.passes(60.0)
    assert len(world.events("rollout-2")) == before
    assert list(world.record.given_up) == ["rollout-2"]
    world.instances["rollout-2"].plan = ["works"]
    await world.passes(20.0)
    assert world.events("rollout-2")[-1].state == HEALTHY
    assert world.events("rollout") == []


async def two_critics(world: World, *plan: str) -> World:
    """Let the first of two critics work, and the second stand by."""
    await start(world, "critic-1")
    await world.add("critic-2", *plan)
    await world.passes(5.0)
    assert world.working("critic") == ["critic-1"]
    assert not world.record.events
    return world


async def test_a_critic_that_stands_by_takes_over_once(redis_url: str) -> None:
    world = await two_critics(World(redis_url, QUICK, (*ROLES, "critic")))
    world.die("critic-1", next_after=1.0)
    await world.passes(4.0)
    assert world.working("critic") == ["critic-2"]
    assert [event.text for event in world.events("critic-1")][1:] == ["critic-1-r1 stands by"]
    leaving = world.registry.get("critic-2")
    assert leaving is not None
    await world.registry.drain(leaving)
    await world.passes(5.0)
    assert world.working("critic") == ["critic-1-r1"]
    assert (world.record.roles["critic"].state, world.events("critic")) == (HEALTHY, [])
    world.coordinator()
    await world.passes(5.0)
    assert world.working("critic") == ["critic-1-r1"]


async def test_a_critic_that_is_given_up_stands_by(redis_url: str) -> None:
    world = await two_critics(World(redis_url, QUICK, (*ROLES, "critic")), "works")
    world.instances["critic-1"].plan = ["dies"]
    for _ in range(QUICK["max_restarts"] + 1):  # the other one is lost each time, too
        world.die("critic-1", next_after=1.0)
        await world.passes(3.0)
        world.die("critic-2", next_after=1.0)
        await world.passes(10.0)
    assert list(world.record.given_up) == ["critic-1"]
    world.die("critic-2", next_after=1.0)
    await world.passes(3.0)
    assert world.working("critic") == ["critic-2-r5"]


async def test_two_critics_that_fail_in_the_same_way_fail_the_run(redis_url: str) -> None:
    quick = {**QUICK, "failed_seconds": 10.0, "max_rebuilds": 1}
    world = await two_critics(World(redis_url, quick, (*ROLES, "critic")), "fails")
    world.instances["critic-1"].plan = ["fails"]
    world.die("critic-1", next_after=1.0)
    await world.until(FAILED, "critic", 2400.0)
    assert "its checkpoint doesn't fit" in str(world.policy.failure)
