"""Who may hold a GPU beside whom in a colocated run."""

import pytest

from relaxd.roles import REFERENCE, ROLLOUT, TRAINER
from relaxd.rpc.errors import ResourceExhausted
from services.coordinator.fleet.gpu_choice import OWN, SHARED, choose, seen_by, suffix_for

SEEN = ("GPU-a", "GPU-b", "GPU-c")


def granted(who: str, role: str, count: int, holders: dict[str, str], *, shared: bool = True) -> list[str]:
    """What a replica gets, which then holds it."""
    others, rather = seen_by(role, holders, shared=shared)
    chosen = choose(who, SEEN, count, others, rather)
    suffix = suffix_for(role, shared=shared)
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
