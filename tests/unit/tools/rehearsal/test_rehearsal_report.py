"""The report's arithmetic, on numbers that can be followed by hand."""

from dataclasses import replace

import pytest

from relaxd.tools.rehearsal import rehearsal_report
from relaxd.tools.rehearsal.assumptions import Scale
from relaxd.tools.rehearsal.capacity import CallTimes
from relaxd.tools.rehearsal.counters import EngineNumbers, Sample
from relaxd.tools.rehearsal.rehearsal_report import Measured


def sample(time: float, step: int, count: float, **cpu: float) -> Sample:
    """A sample at which Redis had carried out `count` commands, and received ten times as many bytes."""
    return Sample(time, step, {"machine": 0.0, **cpu}, int(count), int(10 * count), int(20 * count))


# Ten steps in 20 s at 30 times the speed: a step takes 60 s. In 20 idle seconds Redis has 2,000 commands; and the run
# had 12,000, so a step has 1,000 of its own.
FOUND = Measured(
    scale=Scale(rollout=4, time=30.0, payload=8, ranks=2),
    first=sample(100.0, 5, 0, coordinator=1.0, redis=0.0, trainer=0.0, rollout=0.0, machine=0.0),
    last=sample(120.0, 15, 12_000, coordinator=9.0, redis=4.0, trainer=6.0, rollout=8.0, machine=20.0),
    idle_first=sample(130.0, 15, 20_000, coordinator=10.0, redis=4.0, trainer=10.0, rollout=8.0),
    idle_last=sample(135.0, 15, 20_500, coordinator=11.0, redis=4.0, trainer=14.0, rollout=8.5),
    cores=2,
    waits={"trainer": 30, "stage rollout": 10},
    peak_bytes=1000,
    step_bytes=500.0,
    step_file_seconds=0.5,
    trainer_shares={"works": 15.0, "waits for groups": 5.0},
    call_p99=0.02,
    dropped={},
    groups_per_step=16,
    admitted_groups=32,
    max_group_bytes=256,
    worst_group_bytes=64,
    redis_bytes=1 << 30,
    call_times=CallTimes(heartbeat_at_rest=0.01, heartbeat_working=0.2, lease=0.5),
    least_step_seconds=50.0,
    engines=EngineNumbers([(90.0, 4)]),
)


def test_costs_of_a_step_and_of_an_idle_run() -> None:
    assert FOUND.step_seconds == pytest.approx(60.0)
    assert FOUND.idle_operations == pytest.approx(100.0)
    assert FOUND.step_operations == pytest.approx(1000.0)
    assert FOUND.operations == pytest.approx(100.0 + 1000.0 / 60.0)
    assert FOUND.idle_cpu("coordinator") == pytest.approx(0.2)
    assert FOUND.step_cpu("coordinator") == pytest.approx((8.0 - 0.2 * 20) / 10)
    assert FOUND.cpu("coordinator") == pytest.approx(0.2 + 0.4 / 60)
    assert FOUND.written == pytest.approx(12_000 * 10 / 10 * 8)  # of full size
    assert FOUND.read == pytest.approx(12_000 * 20 / 10 * 8)
    assert FOUND.machine_share == pytest.approx(0.5)
    assert FOUND.own_share == pytest.approx((8.0 + 4.0 + 6.0 + 8.0) / 40)


def test_the_trainer_has_no_idle_costs() -> None:
    """While it is paused it is busier than while it waits for groups."""
    assert FOUND.step_cpu("trainer") == pytest.approx(0.6)


LIMITS = [
    ({"worst_group_bytes": 150}, "met when sizes double (at 1.71 x): a group's answers: 150 B of 256 B", 256 / 150),
    ({"worst_group_bytes": 300}, "met already: a group's answers", 256 / 300),
    ({"redis_bytes": 100_000}, "met when sizes double (at 1.04 x): a step's groups in Redis", 100_000 / 96_000),
    (
        {"call_times": CallTimes(heartbeat_at_rest=0.09, heartbeat_working=3.0, lease=None)},
        "met when sizes double (at 1.11 x): the coordinator's answers (p99 of Heartbeat)",
        0.1 / 0.09,
    ),
    ({"step_file_seconds": 5.0}, "met when sizes double (at 1.5 x): writing the step file", 60 / 40),
]


def test_the_host_of_a_rollout_replica_has_the_mean_number() -> None:
    """Two replicas for 5 s and six for 15 s are five."""
    rest = replace(FOUND, engines=EngineNumbers([(90.0, 5)]))
    scaled = replace(FOUND, engines=EngineNumbers([(90.0, 2), (105.0, 6)], "on"))
    name = "the host of a rollout replica"
    (alike,) = (one.used for one in rehearsal_report.limits(rest) if one.name == name)
    (used,) = (one.used for one in rehearsal_report.limits(scaled) if one.name == name)
    assert used == pytest.approx(alike)
    assert used == pytest.approx(FOUND.cpu("rollout") / 5)


@pytest.mark.parametrize(("changes", "said", "factor"), LIMITS)
def test_the_first_limit(changes: dict[str, float], said: str, factor: float) -> None:
    found = replace(FOUND, **changes)
    assert rehearsal_report.first_limit(found).startswith(said)
    assert rehearsal_report.limits(found)[0].factor == pytest.approx(factor)


def test_no_limit_when_sizes_double() -> None:
    said = rehearsal_report.first_limit(FOUND)
    assert said.startswith("none when sizes double; the nearest, at 4 x, is a group's answers: 64 B of 256 B.")
    assert "Raise board.max_group_bytes" in said


def test_heartbeats_are_no_limit_on_a_machine_that_is_too_busy() -> None:
    slow = CallTimes(heartbeat_at_rest=5.0, heartbeat_working=5.0, lease=None)
    last = sample(120.0, 15, 12_000, machine=40.0, coordinator=5.0)
    idle_last = sample(135.0, 15, 20_500, machine=10.0, coordinator=11.0)
    idle_first = sample(130.0, 15, 20_000, machine=0.5, coordinator=10.0)
    busy = replace(FOUND, call_times=slow, last=last, idle_first=idle_first, idle_last=idle_last)
    assert all("Heartbeat" not in limit.name for limit in rehearsal_report.limits(busy))
    assert dict(rehearsal_report.rows(busy))["doubtful"].startswith("this machine's processors were 100% busy")
    assert "doubtful" not in dict(rehearsal_report.rows(FOUND))


def test_a_scale_that_the_machine_cant_carry_gets_no_verdict() -> None:
    found = replace(FOUND, last=sample(120.0, 15, 12_000, machine=40.0, coordinator=35.0, rollout=25.0))
    rows = dict(rehearsal_report.rows(found))
    assert rows["no verdict"].startswith("this machine can't carry this scale: at --time-scale 30 the rehearsal needs")
    assert "would do" in rows["no verdict"]
    assert not {"would it fill steps?", "first limit", "next limits", "doubtful"} & rows.keys()
    assert "processor, coordinator" in rows  # costs of a step are what they are


def test_rows() -> None:
    rows = dict(rehearsal_report.rows(FOUND))
    assert rows["would it fill steps?"] == "yes: a step every 60 s"
    assert rows["the open step waits for"] == "trainer 75%, stage rollout 25%"
    assert rows["the trainer's time"] == "works 75%, waits for groups 25%"
    assert rows["Redis, memory at most"] == "8 kB"
    assert rows["disk, a step"] == "4 kB"
    assert rows["the control plane"].startswith("meets its goals with 4 rollout replicas: uses 0.21 of 1 cores")
    assert rows["replicas' calls"] == (
        "Heartbeat p99 10 ms at rest, 200 ms with steps 30 times as fast; LeaseGpus p99 500 ms while all started"
    )
    assert "idle replicas" not in rows
    assert "autoscaler" not in str(rows)
    few = replace(FOUND, engines=EngineNumbers([(90.0, 40)]))
    assert dict(rehearsal_report.rows(few))["idle replicas"].startswith(
        "8 of 40 rollout replicas never have work: the gate admits"
    )
    scaled = dict(rehearsal_report.rows(replace(FOUND, engines=EngineNumbers([(90.0, 2), (105.0, 8)], "on"))))
    assert scaled["the autoscaler (on)"] == "2 for 5 s, 8 for 15 s. Decisions: none"
    assert scaled["the control plane"].startswith("meets its goals with 8 rollout replicas")  # of the window at rest
    many = replace(FOUND, dropped={"stale": 60, "too_long": 20})
    assert (
        rehearsal_report.verdict(many)
        == "yes: a step every 60 s; 25% of the groups were dropped (stale 60, too_long 20)"
    )
