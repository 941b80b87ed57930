"""Short campaigns with large columns, on data nodes, and on primaries.

Long ones: `make chaos COLUMNS=large`, `COLUMNS=on-nodes` or `REDIS=cluster`.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import deck
from tests.chaos.planes import data_node_faults, payload_faults
from tests.chaos.planes.choose import kinds_of
from tests.chaos.planes.primaries import RUN, tags
from tests.chaos.proxy import Loop
from tests.chaos.stack import ChaosStack

SEED = 14


def campaign(folder: Path, names: Sequence[str], *, columns: str = "small", servers: str = "single") -> Campaign:
    """Do faults to a job, once each, and check that nothing is lost, trained twice, left behind or missed."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with Loop() as loop, ChaosStack(folder, loop, SEED, "plain", columns=columns, servers=servers) as stack:
        done = Campaign(stack, rng, logs=folder / "kept-logs", deadline_seconds=240.0)
        done.begin()
        kinds = kinds_of("plain", columns, servers)
        done.run(iter(deck(len(names), rng, tuple(names), kinds)))
        last = done.end()
    assert [outcome for outcome in done.outcomes if outcome.violations] == []
    assert last == []
    assert {outcome.fault for outcome in done.outcomes} == set(names)
    assert not any(outcome.missed for outcome in done.outcomes)
    return done


@pytest.mark.night
@pytest.mark.timeout(900)
def test_no_payload_is_lost_or_leaks_wherever_a_connection_breaks_or_a_process_dies(tmp_path: Path) -> None:
    done = campaign(tmp_path, payload_faults.SHORT_SUITE, columns="large")
    assert done.payloads is not None
    assert done.payloads.looks > len(payload_faults.SHORT_SUITE)
    assert done.payloads.most["payloads"] > 0


@pytest.mark.night
@pytest.mark.timeout(900)
def test_no_payload_is_lost_or_leaks_when_a_data_node_dies_is_full_or_out_of_reach(tmp_path: Path) -> None:
    done = campaign(tmp_path, data_node_faults.SHORT_SUITE, columns="on-nodes")
    assert done.payloads is not None
    assert done.payloads.most["on nodes"] > 0


@pytest.mark.night
@pytest.mark.timeout(900)
@pytest.mark.parametrize("servers", ["sentinel", "cluster"])
def test_nothing_is_lost_when_a_primary_dies_or_hands_over(tmp_path: Path, servers: str) -> None:
    done = campaign(tmp_path, ("primary killed", "primary handed over"), servers=servers)
    killed = next(outcome for outcome in done.outcomes if outcome.fault == "primary killed")
    assert killed.stalled is not None
    assert killed.stalled > 1.0  # no step was committed while there was no primary
    assert done.stack.primaries is not None
    assert done.stack.primaries.failovers >= 2


def test_each_job_has_its_own_faults() -> None:
    names = {fault.name for fault in kinds_of(columns="large")}
    assert set(payload_faults.SHORT_SUITE) < names
    steps = [step for role, own in payload_faults.STEPS.items() if role != "agent" for step in own]
    assert len(names) == len(kinds_of(columns="large")) == 4 * len(steps)
    on_nodes = [fault.name for fault in kinds_of(columns="on-nodes")]
    assert set(data_node_faults.SHORT_SUITE) < set(on_nodes)
    assert len(set(on_nodes)) == len(on_nodes)
    media = [fault.name for fault in kinds_of("media", "on-nodes")]
    assert {*on_nodes, "kill coordinator", "restart redis", "stall rollout long", "freeze engine"} - set(media) == {
        name for name in on_nodes if "teacher" in name
    }
    assert len(set(media)) == len(media)
    assert "media host away" in media
    shown = {fault.name for fault in kinds_of("shown-media", "on-nodes")}
    assert {name.replace("agent", "rollout") for name in shown if name.startswith("payload: agent")} == {
        name for name in media if name.startswith("payload: rollout") and "save" not in name
    }
    assert {"kill agent", "freeze agent environment"} < shown - set(media)
    assert not any(name.startswith("payload: rollout") for name in shown)
    sentinel, cluster = ([fault.name for fault in kinds_of(redis=servers)] for servers in ("sentinel", "cluster"))
    assert set(sentinel) < set(cluster)
    assert len(set(cluster)) == len(cluster)


def test_each_primary_of_a_cluster_has_keys_that_need_a_replica() -> None:
    assert tags()[0] == RUN
    assert len(set(tags())) == len(tags())
