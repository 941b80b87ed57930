"""Who may hold a GPU beside whom in a colocated run."""

from itertools import permutations

import pytest

from relaxd.roles import JUDGE, REFERENCE, ROLLOUT, TRAINER
from relaxd.rpc.errors import ResourceExhausted
from services.coordinator.fleet.gpu_allocation import OWN, SHARED, choose, seen_by, share_of, suffix_for, uuid_of

SEEN = ("GPU-a", "GPU-b", "GPU-c")


def granted(
    who: str, role: str, count: int, holders: dict[str, str], *, shared: bool = True, share: float = 1.0
) -> list[str]:
    """What a replica gets, which then holds it."""
    others, rather = seen_by(who, role, holders, shared=shared, share=share)
    chosen = choose(who, SEEN, count, others, rather, share)
    suffix = suffix_for(role, shared=shared, share=share)
    holders |= dict.fromkeys((uuid + suffix for uuid in chosen), who)
    return chosen


def test_the_trainer_and_each_engine_share_a_gpu_whoever_comes_first() -> None:
    for order in (("trainer", "engine-1", "engine-2"), ("engine-1", "trainer", "engine-2")):
        holders: dict[str, str] = {}
        found = {
            who: granted(who, TRAINER if who == "trainer" else ROLLOUT, 2 if who == "trainer" else 1, holders)
            for who in order
        }
        assert found == {"trainer": ["GPU-a", "GPU-b"], "engine-1": ["GPU-a"], "engine-2": ["GPU-b"]}
        assert granted("engine-1", ROLLOUT, 1, holders) == ["GPU-a"]  # again


def test_a_gpu_that_the_partner_has_is_taken_rather_than_a_free_one() -> None:
    assert granted("trainer", TRAINER, 1, {"GPU-c" + SHARED: "engine-1"}) == ["GPU-c"]
    assert granted("engine-1", ROLLOUT, 1, {"GPU-b": "trainer"}) == ["GPU-b"]


def test_two_engines_or_two_trainers_share_none() -> None:
    holders = dict.fromkeys((uuid + SHARED for uuid in SEEN), "engine-1")
    with pytest.raises(ResourceExhausted, match="engine-1 holds GPU-a"):
        granted("engine-2", ROLLOUT, 1, holders)
    with pytest.raises(ResourceExhausted, match="trainer-1 holds GPU-b"):
        granted("trainer-2", TRAINER, 1, dict.fromkeys(SEEN, "trainer-1"))


def test_without_colocation_nothing_is_shared() -> None:
    holders = {"GPU-a" + SHARED: "engine-1", "GPU-b": "trainer"}
    assert granted("engine-2", ROLLOUT, 1, holders, shared=False) == ["GPU-c"]
    with pytest.raises(ResourceExhausted):
        granted("trainer-2", TRAINER, 1, holders, shared=False)


def test_a_replica_that_takes_no_turns_has_its_gpus_alone() -> None:
    assert suffix_for(REFERENCE, shared=True) == suffix_for(REFERENCE, shared=False) == OWN
    holders = {"GPU-a" + OWN: "reference-1"}
    for shared in (True, False):
        assert granted("trainer", TRAINER, 1, dict(holders), shared=shared) == ["GPU-b"]
        with_trainer = holders | {"GPU-c": "trainer"}
        assert granted("engine-1", ROLLOUT, 1, with_trainer, shared=shared) == (["GPU-c"] if shared else ["GPU-b"])
        taken = holders | {"GPU-b": "trainer", "GPU-c" + SHARED: "engine-1"}
        with pytest.raises(ResourceExhausted, match="holds GPU-b"):
            granted("reference-2", REFERENCE, 1, taken, shared=shared)


def part(who: str, role: str, share: float, holders: dict[str, str], count: int = 1) -> list[str]:
    """What a replica gets that wants shares of GPUs, in a run that isn't colocated."""
    return granted(who, role, count, holders, shared=False, share=share)


def test_a_judge_and_an_engine_have_a_gpu_together_whoever_comes_first() -> None:
    for order in ((JUDGE, ROLLOUT), (ROLLOUT, JUDGE)):
        holders = {"GPU-a": "trainer"}
        shares = {JUDGE: 0.3, ROLLOUT: 0.7}
        assert [part(f"{role}-1", role, shares[role], holders) for role in order] == [["GPU-b"], ["GPU-b"]]
        assert part("judge-1", JUDGE, 0.3, holders) == ["GPU-b"]  # again
        assert sorted(map(share_of, holders)) == [0.3, 0.7, 1.0]
        assert [uuid_of(record) for record in holders] == ["GPU-a", "GPU-b", "GPU-b"]
    assert part("judge-1", JUDGE, 0.3, {"GPU-c@rollout:0.7": "rollout-1"}) == ["GPU-c"]  # rather than a free one


def test_two_of_a_role_share_none_and_a_full_gpu_is_named() -> None:
    holders: dict[str, str] = {}
    judges = [part(f"judge-{number}", JUDGE, 0.3, holders) for number in range(3)]
    assert judges == [["GPU-a"], ["GPU-b"], ["GPU-c"]]
    with pytest.raises(ResourceExhausted, match=r"judge-3 needs 0.3 of 1 GPU .* judge-0 \(with a share of 0.3\) holds"):
        part("judge-3", JUDGE, 0.3, holders)
    with pytest.raises(ResourceExhausted, match=r"rollout-1 needs 0.8 of 2 GPUs and sees 3, of which 0 are available"):
        part("rollout-1", ROLLOUT, 0.8, holders, 2)
    assert part("rollout-1", ROLLOUT, 0.7, holders, 2) == ["GPU-a", "GPU-b"]


def test_shares_add_up_to_a_gpu_and_no_more() -> None:
    holders = {"GPU-a@judge:0.33": "judge-1", "GPU-a@rollout:0.56": "rollout-1", "GPU-b": "trainer", "GPU-c": "trainer"}
    with pytest.raises(ResourceExhausted, match="trainer holds GPU-b"):
        part("reference-1", REFERENCE, 0.12, holders)
    assert 0.33 + 0.56 + 0.11 > 1  # in floating point
    assert part("reference-1", REFERENCE, 0.11, holders) == ["GPU-a"]


def test_a_share_and_a_whole_gpu_exclude_each_other() -> None:
    parts = {"GPU-a@judge:0.3": "judge-1", "GPU-b@judge:0.3": "judge-2"}
    for shared in (True, False):
        for role in (TRAINER, ROLLOUT, REFERENCE):
            assert granted(f"{role}-1", role, 1, dict(parts), shared=shared) == ["GPU-c"]
            with pytest.raises(ResourceExhausted, match=r"judge-1 .* holds GPU-a, judge-2"):
                granted(f"{role}-1", role, 2, dict(parts), shared=shared)
    whole = {"GPU-a": "trainer", "GPU-b" + OWN: "reference-1", "GPU-c" + SHARED: "rollout-1"}
    with pytest.raises(ResourceExhausted, match="trainer holds GPU-a, reference-1 holds GPU-b, rollout-1 holds GPU-c"):
        part("judge-1", JUDGE, 0.3, whole)
    # Who had a part gets no whole one beside another's part, and keeps its GPU where it is alone.
    mixed = {"GPU-a@rollout:0.7": "rollout-1", "GPU-a@judge:0.3": "judge-1", "GPU-b@rollout:0.7": "rollout-1"}
    with pytest.raises(ResourceExhausted, match="sees 3, of which 2 are available: judge-1"):
        granted("rollout-1", ROLLOUT, 3, mixed, shared=False)
    assert granted("rollout-1", ROLLOUT, 1, mixed, shared=False) == ["GPU-b"]


def test_in_a_colocated_run_the_trainer_is_beside_an_engine_and_a_judge_whoever_comes_first() -> None:
    shares = {TRAINER: 1.0, ROLLOUT: 0.7, JUDGE: 0.3}
    for order in permutations(shares):
        holders = {"GPU-a" + OWN: "reference-1"}
        for role in order:
            assert granted(f"{role}-1", role, 1, holders, share=shares[role]) == ["GPU-b"], order
        for role in order:
            assert granted(f"{role}-2", role, 1, dict(holders), share=shares[role]) == ["GPU-c"], order
            assert granted(f"{role}-1", role, 1, holders, share=shares[role]) == ["GPU-b"]  # again
        with pytest.raises(ResourceExhausted, match="of which 1 are available"):
            granted("reference-2", REFERENCE, 2, holders)
        # A run that isn't colocated finds them all in the way.
        for role in order:
            assert granted(f"{role}-2", role, 1, dict(holders), shared=False, share=shares[role]) == ["GPU-c"]
    apart = {"GPU-a@judge:0.3": "judge-1"}  # of a run that isn't colocated
    assert granted("trainer-1", TRAINER, 1, apart) == ["GPU-b"]
