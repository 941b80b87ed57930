"""A short chaos campaign on the real stack without reference, teacher and judge. The long one: `make chaos`."""

import random
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.failure_table import BEGIN, END, FAILURES, PAGE, load_campaigns, table
from tests.chaos.faults import SHORT_SUITE, all_faults, deck, faults_of
from tests.chaos.proxy import Loop
from tests.chaos.stack import ChaosStack, Progress

SEED = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_and_nothing_is_trained_twice_whatever_dies(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with Loop() as loop, ChaosStack(tmp_path, loop, SEED, "plain") as stack:
        campaign = Campaign(stack, rng, logs=tmp_path / "kept-logs", deadline_seconds=240.0)
        campaign.begin()
        campaign.run(iter(deck(len(SHORT_SUITE), rng, SHORT_SUITE)))
        last = campaign.end()
    outcomes = campaign.outcomes
    assert [o for o in outcomes if o.violations] == []
    assert last == []
    assert {o.fault for o in outcomes} == set(SHORT_SUITE)
    assert not any(o.missed for o in outcomes)
    assert sum(o.recomputed for o in outcomes) > 0  # else nothing was under way when something died
    assert campaign.books.steps[-1].number > len(outcomes)


def test_every_fault_is_in_one_row_of_the_failure_table() -> None:
    algorithms = ("critic", "teacher-engine", "agent", "program", "hosts")
    names = list(dict.fromkeys(fault.name for of in algorithms for fault in all_faults(of)))
    rows = [[name for name in names if any(fnmatchcase(name, p) for p in patterns)] for _, patterns, _ in FAILURES]
    assert sorted(name for row in rows for name in row) == sorted(names)
    assert all(rows)


def test_failure_table_is_that_of_the_recorded_campaigns() -> None:
    written = table(load_campaigns())
    assert f"{BEGIN}\n{written}\n{END}" in PAGE.read_text()
    assert "not measured" not in written


def test_faults_are_chosen_by_role() -> None:
    assert faults_of(["teacher"], all_faults()) == tuple(
        fault.name for fault in all_faults() if "teacher" in fault.name.split()
    )
    assert {"kill critic", "kill critic and trainer rank", "stall critic long", "cut: critic - redis"} < set(
        faults_of(["critic", "reference"], all_faults("critic"))
    )
    assert {"kill reference", "freeze reference rank"} < set(faults_of(["critic", "reference"], all_faults("critic")))
    with pytest.raises(ValueError, match="no fault befalls critic, reword: "):
        faults_of(["reward", "critic", "reword"], all_faults())


def test_a_deck_has_every_kind_equally_often() -> None:
    kinds = {fault.name for fault in all_faults()}
    assert len(kinds) == len(all_faults())
    dealt = [fault.name for fault in deck(2 * len(kinds), random.Random(0))]
    assert {name: dealt.count(name) for name in kinds} == dict.fromkeys(kinds, 2)
    assert [fault.name for fault in deck(9, random.Random(4))] == [fault.name for fault in deck(9, random.Random(4))]
    with pytest.raises(ValueError, match=r"this job has no fault 'kill agent', 'kill me'; it has .*kill advantage, "):
        deck(1, random.Random(0), ("kill me", "kill redis", "kill agent"))


def test_progress_of_an_engine_that_starts_again_is_added() -> None:
    progress = Progress()
    for name, count in [("rollout-1", 5), ("rollout-2", 7), ("rollout-1", 9), ("rollout-1", 2), ("rollout-1", 4)]:
        progress.see(name, count)
    assert progress.total == 9 + 4 + 7
