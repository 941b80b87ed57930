"""Who may hold a GPU beside whom in a colocated run."""

import pytest

from relaxd.rpc.errors import ResourceExhausted
from relaxd.v1.replica_pb2 import ROLE_ROLLOUT, ROLE_TRAINER, Role
from services.coordinator.fleet.gpu_choice import SHARED, choose, seen_by

SEEN = ("GPU-a", "GPU-b", "GPU-c")


def granted(who: str, role: "Role.ValueType", count: int, holders: dict[str, str], *, shared: bool = True) -> list[str]:
    """What a replica gets, which then holds it."""
    others, rather = seen_by(role, holders, shared=shared)
    chosen = choose(who, SEEN, count, others, rather)
    suffix = SHARED if shared and role == ROLE_ROLLOUT else ""
    holders |= dict.fromkeys((uuid + suffix for uuid in chosen), who)
    return chosen


def test_the_trainer_and_each_engine_share_a_gpu_whoever_comes_first() -> None:
    for order in (("trainer", "engine-1", "engine-2"), ("engine-1", "trainer", "engine-2")):
        holders: dict[str, str] = {}
        found = {
            who: granted(who, ROLE_TRAINER if who == "trainer" else ROLE_ROLLOUT, 2 if who == "trainer" else 1, holders)
            for who in order
        }
        assert found == {"trainer": ["GPU-a", "GPU-b"], "engine-1": ["GPU-a"], "engine-2": ["GPU-b"]}
        assert granted("engine-1", ROLE_ROLLOUT, 1, holders) == ["GPU-a"]  # again


def test_a_gpu_that_the_partner_has_is_taken_rather_than_a_free_one() -> None:
    assert granted("trainer", ROLE_TRAINER, 1, {"GPU-c" + SHARED: "engine-1"}) == ["GPU-c"]
    assert granted("engine-1", ROLE_ROLLOUT, 1, {"GPU-b": "trainer"}) == ["GPU-b"]


def test_two_engines_or_two_trainers_share_none() -> None:
    holders = dict.fromkeys((uuid + SHARED for uuid in SEEN), "engine-1")
    with pytest.raises(ResourceExhausted, match="engine-1 holds GPU-a"):
        granted("engine-2", ROLE_ROLLOUT, 1, holders)
    with pytest.raises(ResourceExhausted, match="trainer-1 holds GPU-b"):
        granted("trainer-2", ROLE_TRAINER, 1, dict.fromkeys(SEEN, "trainer-1"))


def test_without_colocation_nothing_is_shared() -> None:
    holders = {"GPU-a" + SHARED: "engine-1", "GPU-b": "trainer"}
    assert granted("engine-2", ROLE_ROLLOUT, 1, holders, shared=False) == ["GPU-c"]
    with pytest.raises(ResourceExhausted):
        granted("trainer-2", ROLE_TRAINER, 1, holders, shared=False)
