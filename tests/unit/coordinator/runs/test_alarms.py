"""Alarms of the coordinator: of waits, the disk and the health."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relaxd.config.load_toml import load
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.runs import alarms as alarms_module
from services.coordinator.runs.alarms import (
    SHOWN_MESSAGES,
    RefusedGroups,
    RunAlarms,
    disk_problem,
    health_problems,
    user_problems,
    wait_problem,
    weight_problems,
)
from services.coordinator.runs.wait_reasons import Reason
from services.coordinator.state.records import Health, HealthRecord, ReplicaHealth, RoleHealth
from tests.kit.run_folders import CONFIG

REDIS, PAUSED = pb.WAIT_KIND_REDIS, pb.WAIT_KIND_PAUSED
WAITS: list[tuple[Reason | None, str]] = [
    (None, ""),
    (Reason(REDIS, "Redis doesn't answer", since=100.0), "held up for more than 5 min: Redis doesn't answer"),
    (Reason(REDIS, "Redis doesn't answer", since=701.0), ""),
    (Reason(REDIS, "Redis doesn't answer"), ""),
    (Reason(PAUSED, "paused", since=100.0), ""),
]


@pytest.mark.parametrize(("reason", "text"), WAITS)
def test_a_wait_is_an_alarm_after_a_time(reason: Reason | None, text: str) -> None:
    assert wait_problem(reason, 1000.0, 300.0) == ({(pb.ALARM_KIND_WAIT, "redis"): text} if text else {})


@pytest.mark.parametrize(("free", "limit", "alarm"), [(5e9, 5.0, False), (4.9e9, 5.0, True), (0, 0.0, False)])
def test_a_disk_with_little_room_is_an_alarm(free: float, limit: float, alarm: bool) -> None:
    found = disk_problem(int(free), limit, Path("/runs/r"))
    assert bool(found) == alarm
    if alarm:
        assert list(found.values()) == [
            "the disk of /runs/r has 4.9 GB left (alerts.min_free_gb is 5): make room"
        ]  # fmt: skip


def test_roles_that_are_rebuilt_and_replicas_that_are_given_up_are_alarms() -> None:
    names = [f"rollout-{number}" for number in range(8)]
    replicas = {
        name: ReplicaHealth(instance=name, role="rollout", replica_id=name, state=Health.FAILED) for name in names
    }
    replicas["rollout-7"] = replicas["rollout-7"].model_copy(update={"reason": "no GPU"})
    replicas["trainer-0"] = ReplicaHealth(instance="trainer-0", role="trainer", replica_id="t", state=Health.RESTARTING)
    roles = {
        "reward": RoleHealth(role="reward", state=Health.REBUILDING, reason="all are gone"),
        "trainer": RoleHealth(role="trainer", state=Health.SUSPECT),
    }
    found = health_problems(HealthRecord(replicas=replicas, roles=roles))
    assert {name: text for (_, name), text in found.items()} == {
        "rollout replicas": f"could not be brought back: {', '.join(names[:5])} and 3 more (no GPU)",
        "reward": "role reward is rebuilt: all are gone",
    }


def test_a_text_of_users_code_is_one_alarm_and_many_are_counted() -> None:
    assert list(user_problems(["no quota"] * 3).values()) == ["the run's own code says: no quota"]
    found = user_problems(f"text {number:02}" for number in range(SHOWN_MESSAGES + 2))
    assert len(found) == SHOWN_MESSAGES + 1
    assert found[pb.ALARM_KIND_USER, ""] == "2 further messages of the run's own code are left out"


async def test_groups_of_other_weights_are_an_alarm_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the detail of the last one, which names engine and version, and ends ten minutes after it."""
    refused, now = RefusedGroups(), 1000.0
    monkeypatch.setattr(alarms_module, "monotonic", lambda: now)
    assert refused.problems() == {}
    records = [
        SimpleNamespace(reason="stale", detail=""),
        SimpleNamespace(reason="wrong_weights", detail="rollout-0 wrote ..."),
        SimpleNamespace(reason="wrong_weights", detail="an earlier one"),
    ]

    async def dropped() -> Any:
        return records

    async def look(count: int) -> None:
        await refused.look(cast("Any", SimpleNamespace(dropped_by_reason={"wrong_weights": count})), dropped)

    await look(2)
    text = "groups are dropped because of the weights that wrote them, 2 so far: rollout-0 wrote ..."
    assert weight_problems(refused.problems()) == {(pb.ALARM_KIND_WEIGHTS, ""): text}
    now += 590
    await look(2)
    assert refused.problems()
    now += 20
    assert refused.problems() == {}
    await look(3)
    assert "3 so far" in refused.problems()[""]


def test_the_log_says_when_an_alarm_begins_and_how_long_it_went_on(caplog: pytest.LogCaptureFixture) -> None:
    now = SimpleNamespace(time=1000.0, reason=Reason(REDIS, "Redis doesn't answer", since=1.0), messages=[])
    alarms = RunAlarms(
        load(CONFIG.format(steps=9)),
        Path("/runs/r"),
        record=lambda: cast("Any", SimpleNamespace(run_id="r")),
        health=HealthRecord,
        held_up=lambda: now.reason,
        wrong_weights=dict,
        user_messages=lambda: now.messages,
        step=lambda: 3,
        clock=lambda: now.time,
    )
    with caplog.at_level(logging.INFO, "services.coordinator.runs.alarms"):
        for now.time in (1000.0, 1100.0, 1720.0):
            alarms.look()
        now.reason = None
        alarms.look()
    text = "held up for more than 15 min: Redis doesn't answer"
    assert caplog.messages == [f"run r: since step 3: {text}", f"run r: it is over after 12 min: {text}"]
