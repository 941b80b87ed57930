"""What the coordinator measures for a step: shares of its time from heartbeats, which add up over steps, and pass rates
of its groups.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relaxd.roles import ROLLOUT
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import ReplicaStatus
from services.coordinator.fleet.registry import Replica
from services.coordinator.runs.step_recorder import MOST_IN_LINE, ClosedGroups, Usage, metrics_of, speed_per_gpu


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A rollout replica whose engine follows the test and reports in heartbeats."""

    def __init__(self, clock: Clock, name: str = "rollout-1") -> None:
        self.clock = clock
        self.counted = {"engine_busy_seconds": 50.0, "engine_paused_seconds": 7.0, "engine_state": 0.0}
        self.replica = Replica(Registration(replica_id=name, role=ROLLOUT), 1.0, seen=clock.now, status=ReplicaStatus())
        self.heartbeat()

    def spend(self, seconds: float, state: str) -> None:
        """Advance the clock and the engine's counters."""
        if state != "idle":
            self.counted[f"engine_{state}_seconds"] += seconds
        self.counted["engine_state"] = {"idle": 0.0, "busy": 1.0, "paused": 2.0}[state]
        self.clock.now += seconds

    def heartbeat(self, **gauges: float) -> None:
        self.replica.seen = self.clock.now
        self.replica.status = ReplicaStatus(gauges=self.counted | gauges)


def test_shares_of_a_step() -> None:
    clock = Clock()
    engine, usage = Engine(clock), Usage(clock)
    usage.sample([engine.replica])
    engine.spend(6, "busy")
    engine.spend(1, "paused")
    engine.spend(3, "idle")
    engine.heartbeat()
    assert usage.take([engine.replica]).line == {
        "engine_busy_share": pytest.approx(0.6),
        "engine_paused_share": pytest.approx(0.1),
        "engine_idle_share": pytest.approx(0.3),
    }


PROMPTS: list[tuple[list[tuple[float, float] | None], list[float | None]]] = [
    # prompted and prefilled tokens at each heartbeat; shares of the steps
    ([(100, 100), (500, 200), (900, 200), (900, 200)], [0.75, 1.0, None]),
    ([None, None], [None]),  # the engine counts none
    ([None, (500, 200), (900, 500)], [0.6, 0.25]),  # its first samples began in the first step
    ([(900, 200), (100, 50), (200, 75)], [None, 0.75]),  # it was started again
    ([(0, 0), (100, 120)], [0.0]),  # read again after it ran out of memory
]


@pytest.mark.parametrize(("heartbeats", "shares"), PROMPTS)
def test_share_of_prompts_found_in_a_cache(
    heartbeats: list[tuple[float, float] | None], shares: list[float | None]
) -> None:
    clock = Clock()
    engine, usage = Engine(clock), Usage(clock)
    found = []
    for tokens in heartbeats:
        engine.spend(1, "busy")
        names = ("engine_prompted_tokens", "engine_prefilled_tokens")
        engine.heartbeat(**dict(zip(names, tokens or (), strict=False)))
        found.append(usage.take([engine.replica]).metrics.get("engine_prefix_hit_share"))
    assert found[1:] == shares


def test_the_time_after_the_last_heartbeat_is_corrected_later() -> None:
    clock = Clock()
    engine, usage = Engine(clock), Usage(clock)
    usage.sample([engine.replica])
    engine.spend(1, "busy")
    engine.heartbeat()
    engine.spend(1, "idle")  # not told: taken for busy
    first = usage.take([engine.replica]).metrics
    assert first["engine_busy_share"] == 1.0
    engine.spend(2, "busy")
    engine.heartbeat()
    second = usage.take([engine.replica]).metrics
    assert 2 * first["engine_busy_share"] + 2 * second["engine_busy_share"] == pytest.approx(3.0)
    assert second["engine_idle_share"] == pytest.approx(0.5)


def test_no_share_is_above_one_and_nothing_is_lost() -> None:
    clock = Clock()
    engine, usage = Engine(clock), Usage(clock)
    usage.sample([engine.replica])
    engine.heartbeat()
    engine.spend(3, "busy")  # not told: taken for idle
    assert usage.take([engine.replica]).metrics["engine_busy_share"] == 0.0
    engine.spend(2, "busy")
    engine.heartbeat()
    assert usage.take([engine.replica]).metrics["engine_busy_share"] == 1.0
    engine.spend(4, "idle")
    engine.heartbeat()
    assert 4 * usage.take([engine.replica]).metrics["engine_busy_share"] == pytest.approx(3.0)


def test_each_engine_and_their_mean() -> None:
    clock = Clock()
    one, two, usage = Engine(clock), Engine(clock, "rollout-2"), Usage(clock)
    replicas = [one.replica, two.replica]
    usage.sample(replicas)
    one.spend(2, "busy")
    one.heartbeat()
    two.heartbeat()
    line = usage.take(replicas).line
    assert line["engine_idle_share"] == pytest.approx(0.5)
    assert line["replicas"] == {"engine_idle_share": pytest.approx({"rollout-1": 0.0, "rollout-2": 1.0})}


@pytest.mark.parametrize("count", [MOST_IN_LINE, MOST_IN_LINE + 1])
def test_a_line_does_not_have_many_replicas_apart(count: int) -> None:
    clock = Clock()
    engines, usage = [Engine(clock, f"rollout-{number}") for number in range(count)], Usage(clock)
    replicas = [engine.replica for engine in engines]
    for engine in engines:
        engine.heartbeat(gpu_utilisation=0.5)
    usage.sample(replicas)
    clock.now += 1
    taken = usage.take(replicas)
    assert taken.metrics.keys() == {*(f"engine_{name}_share" for name in ("busy", "paused", "idle")), "gpu_idle_share"}
    assert {name: len(single) for name, single in taken.replicas.items()} == {
        "engine_idle_share": count,
        "gpu_idle_share": count,
    }
    assert taken.line.get("replicas") == (taken.replicas if count <= MOST_IN_LINE else None)


def test_a_restarted_replica_is_counted_from_its_restart() -> None:
    clock = Clock()
    engine, usage = Engine(clock), Usage(clock)
    usage.sample([engine.replica])
    engine.spend(5, "busy")
    engine.heartbeat()
    new = Engine(clock)
    new.counted["engine_busy_seconds"] = 0.0
    new.replica.registered_at = 2.0
    new.heartbeat()
    usage.sample([new.replica])
    new.spend(1, "busy")
    new.heartbeat()
    assert usage.take([new.replica]).metrics["engine_busy_share"] == pytest.approx(1.0)


def test_gpus_are_weighted_by_time_and_number() -> None:
    clock = Clock()
    one, two, usage = Engine(clock), Engine(clock, "trainer-1"), Usage(clock)
    replicas = [one.replica, two.replica]
    one.heartbeat(gpu_utilisation=1.0)
    two.heartbeat(gpu_utilisation=0.25)
    usage.sample(replicas)
    for replica, count in ((one, 1), (two, 3)):
        replica.replica.status.gpu_uuids.extend(f"GPU-{index}" for index in range(count))
    clock.now += 3
    usage.sample(replicas)
    one.replica.status.gauges["gpu_utilisation"] = 0.0
    clock.now += 1
    taken = usage.take(replicas)
    assert taken.replicas["gpu_idle_share"] == pytest.approx({"rollout-1": 0.25, "trainer-1": 0.75})
    assert taken.metrics["gpu_idle_share"] == pytest.approx((0.25 + 3 * 0.75) / 4)


def test_speed_is_divided_among_the_gpus_that_are_held() -> None:
    colocated = (["GPU-1", "GPU-2"], ["GPU-2", "GPU-3"], [])
    held = [
        Replica(Registration(replica_id=f"r{number}"), 1.0, seen=0.0, status=ReplicaStatus(gpu_uuids=uuids))
        for number, uuids in enumerate(colocated)
    ]
    assert speed_per_gpu({"tokens_per_second": 60.0}, held) == {"tokens_per_second_per_gpu": 20.0}
    assert speed_per_gpu({"tokens_per_second": 60.0}, held[2:]) == {}
    assert speed_per_gpu({}, held) == {}


def test_replicas_without_gauges_have_no_shares() -> None:
    clock = Clock()
    silent = Replica(Registration(replica_id="r"), 1.0, seen=clock.now, status=ReplicaStatus())
    usage = Usage(clock)
    assert usage.take([]).line == {}
    usage.sample([silent])
    clock.now += 1
    assert usage.take([silent]).line == {}
    strange = ReplicaStatus(gauges={"engine_state": float("nan"), "engine_busy_seconds": float("inf")})
    silent.status = strange
    clock.now += 1
    usage.take([silent])
    clock.now += 1
    assert set(usage.take([silent]).line) == {"engine_busy_share", "engine_paused_share", "engine_idle_share"}


def line(samples: int, right: int, step: int = 0, **more: Any) -> dict[str, Any]:
    counted = {"samples": samples, "right": right} if samples else {}
    return counted | more | ({"step": step} if step else {"reason": "zero_variance"})


STEP_1 = [line(4, 4, equal_rewards=1), line(0, 0), line(4, 1, 1), line(4, 2, 1)]
STEP_2 = [line(4, 0, equal_rewards=1), line(2, 1, 2)]


def drawn(n: int, right: int, k: int) -> float:
    """Return pass@k by counting all draws."""
    draws = list(itertools.combinations([True] * right + [False] * (n - right), k))
    return sum(map(any, draws)) / len(draws)


def test_dropped_groups_count_for_the_next_step() -> None:
    groups = ClosedGroups()
    groups.observe([*STEP_1, *STEP_2, line(4, 4, equal_rewards=1)])
    first, second = groups.take(1), groups.take(2)
    assert (first["scored_groups"], second["scored_groups"]) == (3.0, 2.0)
    for k in (1, 2, 4):
        assert first[f"pass_at_{k}"] == pytest.approx((1 + drawn(4, 1, k) + drawn(4, 2, k)) / 3)
    assert second["pass_at_2"] == pytest.approx((0 + 1) / 2)
    assert second["pass_at_4"] == 0.0, "only groups with four samples"
    assert (first["zero_variance_share"], first["all_right_share"], first["all_wrong_share"]) == (1 / 3, 1 / 3, 0)
    assert (second["zero_variance_share"], second["all_right_share"], second["all_wrong_share"]) == (0.5, 0, 0.5)
    assert groups.take(3) == {}
    groups.observe([line(4, 0, 3)])
    assert groups.take(3)["scored_groups"] == 2.0, "one was dropped before"


def test_a_new_coordinator_counts_what_was_closed_since_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*STEP_1, *STEP_2]))
    groups = ClosedGroups()
    groups.load(tmp_path, last_step=1)
    assert groups.take(1) == {}
    expected = metrics_of(Counter({(4, 0, True): 1, (2, 1, False): 1}))
    assert groups.take(2) == expected
