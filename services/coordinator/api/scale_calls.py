"""The scaling calls of the Coordinator: requests are checked here, and answers written."""

import re
from collections.abc import Sequence
from typing import Any

from relaxd.rpc.errors import Violations
from relaxd.v1 import scaling_pb2 as pb
from relaxd.v1.replica_pb2 import ROLE_ADVANTAGE, ROLE_REWARD, ROLE_ROLLOUT, ROLE_UNSPECIFIED, Role
from services.coordinator.scaling.scaler import REMEMBERED, Scaler
from services.coordinator.state.scale_records import Direction, ScaleRecord, Wish

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ADDRESS = re.compile(r"[A-Za-z0-9.\[\]:_-]{1,200}:[0-9]{1,5}")
GPU_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/_-]{1,120}")
SCALABLE = (ROLE_ROLLOUT, ROLE_REWARD, ROLE_ADVANTAGE)
MAX_REPLICAS = 256
TIMEOUT_SECONDS = 600.0
MAX_TIMEOUT_SECONDS = 7200.0
DRAIN_SECONDS = 30.0
MAX_DRAIN_SECONDS = 3600.0


class ScalingCalls:
    """The part of the Coordinator's servicer that is about scaling."""

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler

    async def ScaleOut(self, request: pb.ScaleOutRequest, context: Any) -> pb.ScaleOutResponse:
        """Begin to have more replicas."""
        violations = Violations()
        _check_common(request.request_id, request.role, request.replicas, violations)
        _check_either("replicas", request.replicas, "addresses", request.addresses, violations)
        _check_list("addresses", request.addresses, ADDRESS, "must be host:port", violations)
        _check_list("gpu_uuids", request.gpu_uuids, GPU_UUID, "must be GPU-... or MIG-...", violations)
        violations.check(
            not (request.addresses and request.gpu_uuids),
            "gpu_uuids",
            "must be empty with addresses: those services run already",
        )
        _check_seconds("timeout_seconds", request.timeout_seconds, MAX_TIMEOUT_SECONDS, violations)
        violations.raise_if_any()
        wish = Wish(
            direction=Direction.OUT,
            role=_role_name(request.role),
            replicas=request.replicas,
            addresses=tuple(request.addresses),
            gpu_uuids=tuple(request.gpu_uuids),
            seconds=request.timeout_seconds or TIMEOUT_SECONDS,
        )
        return pb.ScaleOutResponse(request=scale_message(await self._scaler.accept(request.request_id, wish)))

    async def ScaleIn(self, request: pb.ScaleInRequest, context: Any) -> pb.ScaleInResponse:
        """Begin to have fewer replicas."""
        violations = Violations()
        _check_common(request.request_id, request.role, request.replicas, violations)
        _check_either("replicas", request.replicas, "replica_ids", request.replica_ids, violations)
        _check_list("replica_ids", request.replica_ids, re.compile(r".{1,128}"), "must be a replica's id", violations)
        _check_seconds("drain_seconds", request.drain_seconds, MAX_DRAIN_SECONDS, violations)
        violations.raise_if_any()
        wish = Wish(
            direction=Direction.IN,
            role=_role_name(request.role),
            replicas=request.replicas,
            replica_ids=tuple(request.replica_ids),
            seconds=request.drain_seconds if request.HasField("drain_seconds") else DRAIN_SECONDS,
        )
        return pb.ScaleInResponse(request=scale_message(await self._scaler.accept(request.request_id, wish)))

    async def GetScaleRequest(self, request: pb.GetScaleRequestRequest, context: Any) -> pb.GetScaleRequestResponse:
        """Say how far a request is."""
        return pb.GetScaleRequestResponse(request=scale_message(self._scaler.get(request.request_id)))

    async def ListScaleRequests(
        self, request: pb.ListScaleRequestsRequest, context: Any
    ) -> pb.ListScaleRequestsResponse:
        """List the requests."""
        violations = Violations()
        violations.check(0 <= request.limit <= REMEMBERED, "limit", f"must be 0 to {REMEMBERED}; 0 means 20")
        violations.raise_if_any()
        records = self._scaler.all()[: request.limit or 20]
        return pb.ListScaleRequestsResponse(requests=[scale_message(record) for record in records])

    async def CancelScaleRequest(
        self, request: pb.CancelScaleRequestRequest, context: Any
    ) -> pb.CancelScaleRequestResponse:
        """Roll a request back."""
        return pb.CancelScaleRequestResponse(request=scale_message(await self._scaler.cancel(request.request_id)))


def scale_message(record: ScaleRecord) -> pb.ScaleRequest:
    """A request as callers see it."""
    message = pb.ScaleRequest(
        request_id=record.request_id,
        direction=pb.ScaleDirection.Value(f"SCALE_DIRECTION_{record.wish.direction.value}"),
        role=Role.Value(f"ROLE_{record.wish.role}"),
        replicas=record.wish.replicas,
        state=pb.ScaleState.Value(f"SCALE_STATE_{record.state.value}"),
        reason=record.reason or "; ".join(f"{r.launch_id}: {r.detail}" for r in record.scaled if r.detail),
        cancelled=record.cancelled,
        scaled=[
            pb.ScaledReplica(
                launch_id=replica.launch_id,
                replica_id=replica.replica_id,
                address=replica.address,
                state=pb.ScaleState.Value(f"SCALE_STATE_{replica.state.value}"),
                detail=replica.detail,
                gpu_uuids=replica.gpu_uuids,
            )
            for replica in record.scaled
        ],
    )
    message.create_time.FromDatetime(record.create_time)
    message.update_time.FromDatetime(record.update_time)
    message.deadline.FromDatetime(record.deadline)
    return message


def _check_common(request_id: str, role: "Role.ValueType", replicas: int, violations: Violations) -> None:
    violations.check(
        not request_id or REQUEST_ID.fullmatch(request_id),
        "request_id",
        "must be 1 to 64 letters, digits, dots, dashes and underscores, the first one a letter or digit",
    )
    known = role in (ROLE_UNSPECIFIED, *SCALABLE)
    violations.check(known, "role", "must be ROLE_ROLLOUT, ROLE_REWARD or ROLE_ADVANTAGE: no other can be scaled")
    violations.check(0 <= replicas <= MAX_REPLICAS, "replicas", f"is {replicas}: it must be 1 to {MAX_REPLICAS}")


def _check_either(name: str, count: int, other: str, values: Sequence[str], violations: Violations) -> None:
    violations.check(count or values, name, f"must be at least 1, or {other} must be given")
    violations.check(not (count and values), other, f"must be empty when {name} is given")


def _check_list(
    name: str, values: Sequence[str], pattern: re.Pattern[str], description: str, violations: Violations
) -> None:
    for index, value in enumerate(values[:MAX_REPLICAS]):
        violations.check(pattern.fullmatch(value), f"{name}[{index}]", f"is {value!r}: it {description}")
    violations.check(len(set(values)) == len(values), name, "names one twice")
    violations.check(len(values) <= MAX_REPLICAS, name, f"has {len(values)}: at most {MAX_REPLICAS}")


def _check_seconds(name: str, seconds: float, most: float, violations: Violations) -> None:
    violations.check(0 <= seconds <= most, name, f"is {seconds:g}: it must be 0 to {most:g}")


def _role_name(role: "Role.ValueType") -> str:
    return Role.Name(role or ROLE_ROLLOUT).removeprefix("ROLE_")
