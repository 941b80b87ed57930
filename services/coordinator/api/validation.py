"""Validation of requests with several fields. Every check raises InvalidArgument, which names all bad fields."""

import re
from collections.abc import Sequence

from google.protobuf.message import Message

from relaxd.board.sides.side_base import RUN_ID, RUN_ID_RULE
from relaxd.client.metric_series import MAX_POINTS
from relaxd.roles import REPLICA_ROLES, ROLES, ROLLOUT, SCALABLE_ROLES, unknown_role
from relaxd.rpc.errors import InvalidArgument, Violations
from relaxd.rpc.message_parts import (
    GPU_UUID,
    GPU_UUID_RULE,
    MAX_GPUS,
    SGLANG_URL,
    SGLANG_URL_RULE,
    check_gpu_uuids,
    words,
)
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2
from services.coordinator.runs.starting import check_run_id
from services.coordinator.scaling.scale_log import ScaleFilter
from services.coordinator.state.records import DRAIN_SECONDS, TIMEOUT_SECONDS, Direction, ScaleSpec, ScaleState

REPLICA_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ADDRESS = re.compile(r"[A-Za-z0-9.\[\]:_-]{1,200}:[0-9]{1,5}")
ANY_ID = re.compile(r".{1,128}")
MAX_LAUNCH_ID = 300
MAX_NAME = 300
MAX_METRICS = 100
MAX_LOG_LINES = 2000
MAX_STATUS_BYTES = 1 << 18
MAX_RANKS = 4096
MAX_REPLICAS = 4096
MAX_TIMEOUT_SECONDS = 7200.0
MAX_DRAIN_SECONDS = 3600.0


def checked_run_id(run_id: str, *, optional: bool = True) -> str:
    """Return `run_id` after checking its form. With `optional` it may be empty."""
    violations = Violations()
    check_run_id(run_id, violations, optional=optional)
    violations.raise_if_any()
    return run_id


def check_metrics_request(request: pb.GetMetricsRequest) -> None:
    """Check a GetMetrics request."""
    violations = Violations()
    check_run_id(request.run_id, violations)
    violations.check(request.first_step >= 0, "first_step", f"is {request.first_step}: it must not be negative")
    last_right = request.last_step == 0 or request.last_step >= request.first_step
    violations.check(
        last_right, "last_step", f"is {request.last_step}: it must be 0 or at least first_step, {request.first_step}"
    )
    violations.check(
        0 <= request.max_points <= MAX_POINTS, "max_points", f"is {request.max_points}: it must be 0 to {MAX_POINTS}"
    )
    names = request.names
    violations.check(
        len(names) <= MAX_METRICS and all(0 < len(name) <= MAX_NAME for name in names),
        "names",
        f"must be at most {MAX_METRICS} names of 1 to {MAX_NAME} characters",
    )
    violations.raise_if_any()


def check_logs_request(request: pb.GetLogsRequest) -> None:
    """Check a GetLogs request."""
    violations = Violations()
    check_run_id(request.run_id, violations)
    for field in ("service", "text"):
        length = len(getattr(request, field))
        violations.check(length <= MAX_NAME, field, f"has {length} characters: it may have {MAX_NAME}")
    violations.check(
        0 <= request.max_lines <= MAX_LOG_LINES, "max_lines", f"is {request.max_lines}: it must be 0 to {MAX_LOG_LINES}"
    )
    violations.raise_if_any()


def check_role(role: str, known: Sequence[str], violations: Violations, field: str = "role") -> None:
    """Add a violation if a role is unknown."""
    violations.check(role in known, field, unknown_role(role, known))


def check_registration(registration: pb.Registration) -> None:
    """Check a Register request."""
    violations = Violations()

    def check(condition: object, field: str, description: str) -> None:
        violations.check(condition, f"registration.{field}", description)

    check(
        REPLICA_ID.fullmatch(registration.replica_id),
        "replica_id",
        "must be 1 to 128 letters, digits, dots, dashes and underscores, the first one a letter or digit",
    )
    check_role(registration.role, REPLICA_ROLES, violations, "registration.role")
    check(ADDRESS.fullmatch(registration.address), "address", "must be host:port")
    check(0 <= registration.engine_ranks <= MAX_RANKS, "engine_ranks", f"must be 0 to {MAX_RANKS}")
    check(len(registration.gpu_uuids) <= MAX_GPUS, "gpu_uuids", f"must be at most {MAX_GPUS}")
    longest = max(map(len, (*registration.gpu_uuids, registration.package_version)), default=0)
    check(longest <= MAX_NAME, "gpu_uuids", f"and package_version must be at most {MAX_NAME} characters long")
    check(len(registration.launch_id) <= MAX_LAUNCH_ID, "launch_id", f"must be at most {MAX_LAUNCH_ID} characters")
    violations.raise_if_any()


def check_status_size(request: pb.HeartbeatRequest) -> None:
    """Check that a heartbeat's status is small enough to store."""
    size = request.status.ByteSize()
    if size > MAX_STATUS_BYTES:
        problem = f"has {size} bytes: it must have at most {MAX_STATUS_BYTES}"
        raise InvalidArgument(f"status {problem}", [("status", problem)])


def check_gpu_request(request: pb.LeaseGpusRequest) -> None:
    """Check a LeaseGpus request."""
    candidates = request.candidate_uuids
    violations = Violations()
    violations.check(REPLICA_ID.fullmatch(request.replica_id), "replica_id", "must be the replica's id")
    violations.check(request.count >= 0, "count", f"is {request.count}: it must not be negative")
    violations.check(0 <= request.share <= 1, "share", f"is {request.share:g}: it must be above 0 and at most 1")
    check_gpu_uuids("candidate_uuids", candidates, violations)
    violations.check(len(set(candidates)) == len(candidates), "candidate_uuids", "names a GPU twice")
    violations.raise_if_any()


def check_announcement(request: pb.AnnounceVersionRequest) -> None:
    """Check an AnnounceVersion request."""
    violations = Violations()
    check_run_id(request.run_id, violations, optional=False)
    violations.check(REPLICA_ID.fullmatch(request.replica_id), "replica_id", "must be the trainer's id")
    violations.check(request.weights.term > 0, "weights.term", "must be the trainer's term, at least 1")
    violations.check(request.weights.version >= 0, "weights.version", "must not be negative")
    violations.raise_if_any()


def scale_out_spec(request: scaling_pb2.ScaleOutRequest) -> ScaleSpec:
    """Check a ScaleOut request and convert it to a ScaleSpec."""
    violations = Violations()
    _check_common(request.request_id, request.role, request.replicas, violations)
    _check_one_of(request, ("replicas", "addresses", "sglang_urls"), violations)
    _check_list("addresses", request.addresses, ADDRESS, "must be host:port", violations)
    _check_list("sglang_urls", request.sglang_urls, SGLANG_URL, SGLANG_URL_RULE, violations)
    for_rollout = not request.sglang_urls or request.role in ("", ROLLOUT)
    violations.check(for_rollout, "role", f"is {request.role!r}: only {ROLLOUT} replicas use sglang_urls")
    _check_list("gpu_uuids", request.gpu_uuids, GPU_UUID, GPU_UUID_RULE, violations)
    violations.check(
        not (request.gpu_uuids and (request.addresses or request.sglang_urls)),
        "gpu_uuids",
        "must be empty with addresses and sglang_urls: what needs GPUs there runs already",
    )
    _check_seconds("timeout_seconds", request.timeout_seconds, MAX_TIMEOUT_SECONDS, violations)
    violations.raise_if_any()
    return ScaleSpec(
        direction=Direction.OUT,
        role=request.role or ROLLOUT,
        replicas=request.replicas,
        addresses=tuple(request.addresses),
        sglang_urls=tuple(request.sglang_urls),
        gpu_uuids=tuple(request.gpu_uuids),
        seconds=request.timeout_seconds or TIMEOUT_SECONDS,
        rollback_all=request.rollback_all,
    )


def scale_filter(message: scaling_pb2.ScaleFilter) -> ScaleFilter:
    """Check a request's filter of scale requests and convert it to a ScaleFilter."""
    violations = Violations()
    if message.role:
        check_role(message.role, SCALABLE_ROLES, violations, "filter.role")
    ways, states = words(scaling_pb2.ScaleDirection), words(scaling_pb2.ScaleState)
    known = message.direction in ways
    violations.check(known, "filter.direction", f"is {message.direction}: it must be SCALE_DIRECTION_OUT or _IN")
    for index, state in enumerate(message.states):
        violations.check(states.get(state), f"filter.states[{index}]", f"is {state}: it must be a ScaleState, not 0")
    violations.raise_if_any()
    return ScaleFilter(
        role=message.role,
        direction=Direction(ways[message.direction].upper()) if message.direction else None,
        states=frozenset(ScaleState(states[state].upper()) for state in message.states),
    )


def autoscale_mode(request: scaling_pb2.SetAutoscalerRequest) -> str:
    """Check a SetAutoscaler request and return the mode's name."""
    violations = Violations()
    check_run_id(request.run_id, violations, optional=True)
    known = request.mode in scaling_pb2.AutoscaleMode.values() and request.mode
    violations.check(known, "mode", f"is {request.mode}: it must be AUTOSCALE_MODE_OFF, _DRY_RUN or _ON")
    violations.raise_if_any()
    return words(scaling_pb2.AutoscaleMode)[request.mode]


def scale_in_spec(request: scaling_pb2.ScaleInRequest) -> ScaleSpec:
    """Check a ScaleIn request and convert it to a ScaleSpec."""
    violations = Violations()
    _check_common(request.request_id, request.role, request.replicas, violations)
    _check_one_of(request, ("replicas", "replica_ids"), violations)
    _check_list("replica_ids", request.replica_ids, ANY_ID, "must be a replica's id", violations)
    _check_seconds("drain_seconds", request.drain_seconds, MAX_DRAIN_SECONDS, violations)
    violations.raise_if_any()
    return ScaleSpec(
        direction=Direction.IN,
        role=request.role or ROLLOUT,
        replicas=request.replicas,
        replica_ids=tuple(request.replica_ids),
        seconds=request.drain_seconds if request.HasField("drain_seconds") else DRAIN_SECONDS,
    )


def _check_common(request_id: str, role: str, replicas: int, violations: Violations) -> None:
    violations.check(not request_id or RUN_ID.fullmatch(request_id), "request_id", RUN_ID_RULE)
    check_role(role or ROLLOUT, SCALABLE_ROLES, violations)
    most = ROLES[role].most if role in ROLES else 0
    violations.check(not most or replicas <= most, "replicas", f"is {replicas}: a run has at most {most} {role}")
    violations.check(0 <= replicas <= MAX_REPLICAS, "replicas", f"is {replicas}: it must be 1 to {MAX_REPLICAS}")


def _check_one_of(request: Message, fields: Sequence[str], violations: Violations) -> None:
    """Check that exactly one of several fields is given. The first field is a number, the other fields are lists."""
    given = [name for name in fields if getattr(request, name)]
    violations.check(given, fields[0], f"must be at least 1, or {' or '.join(fields[1:])} must be given")
    for name in given[1:]:
        violations.check(False, name, f"must be empty when {given[0]} is given")


def _check_list(name: str, values: Sequence[str], pattern: re.Pattern[str], rule: str, violations: Violations) -> None:
    for index, value in enumerate(values[:MAX_REPLICAS]):
        violations.check(pattern.fullmatch(value), f"{name}[{index}]", f"is {value!r}: it {rule}")
    violations.check(len(set(values)) == len(values), name, "has a duplicate")
    violations.check(len(values) <= MAX_REPLICAS, name, f"has {len(values)}: at most {MAX_REPLICAS}")


def _check_seconds(name: str, seconds: float, maximum: float, violations: Violations) -> None:
    violations.check(0 <= seconds <= maximum, name, f"is {seconds:g}: it must be 0 to {maximum:g}")
