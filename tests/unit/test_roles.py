"""Roles on the wire: names, of which an unknown one is refused with the nearest."""

import pytest

from relaxd import PROTOCOL_VERSION
from relaxd.rpc.errors import InvalidArgument
from relaxd.v1.coordinator_pb2 import RegisterRequest
from relaxd.v1.scaling_pb2 import ScaleOutRequest
from services.coordinator.api.validation import check_registration, scale_out_spec


def registration(role: str) -> RegisterRequest:
    return RegisterRequest(replica_id="r-1", role=role, address="host:1", protocol_version=PROTOCOL_VERSION)


def test_an_unknown_role_is_refused_with_the_nearest() -> None:
    check_registration(registration("rollout"))
    for wrong in ("rolout", "ROLE_ROLLOUT"):
        with pytest.raises(InvalidArgument, match="did you mean 'rollout'") as refused:
            check_registration(registration(wrong))
        assert [field for field, _ in refused.value.violations] == ["role"]
    with pytest.raises(InvalidArgument, match="must be one of advantage, re"):
        check_registration(registration("coordinator"))


def test_a_role_without_replicas_to_add_is_not_scaled() -> None:
    assert scale_out_spec(ScaleOutRequest(replicas=2)).role == "rollout"
    with pytest.raises(InvalidArgument, match="did you mean 'reward'"):
        scale_out_spec(ScaleOutRequest(role="rewards", replicas=2))
    with pytest.raises(InvalidArgument, match="is 'trainer': it must be one of advantage, re"):
        scale_out_spec(ScaleOutRequest(role="trainer", replicas=2))
