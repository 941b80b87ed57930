"""Errors of gRPC calls: exceptions that handlers raise, and their conversion to and from gRPC statuses.

A handler rejects a request by raising an RpcError. Any other exception is a bug and becomes INTERNAL (see
relaxd.rpc.interceptor).
"""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import grpc
import pydantic
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

Detail = TypeVar("Detail", bound=Message)
ERROR_DOMAIN = "relaxd"
"""Value of `domain` in the google.rpc.ErrorInfo of relaxd's errors."""
STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key in which gRPC carries a serialized google.rpc.Status."""
MAX_SECONDS = 86400.0
"""Maximum value of durations that requests contain, such as timeouts, in seconds."""
MAX_VIOLATIONS = 16
"""Maximum number of invalid fields that an InvalidArgument error lists; further ones are only counted."""
MAX_DESCRIPTION, MAX_FIELD = 400, 100
MAX_MESSAGE, MAX_DETAILS = 2500, 2500
"""Maximum bytes of an error's message, as gRPC escapes it, and of its details. Errors are sent in HTTP/2 trailers,
which gRPC clients reject above 8 KiB."""
_TOO_LARGE = re.compile(r"(message|frame)\b.*\b(larger than|exceeds|too large)", re.IGNORECASE)
"""Pattern of gRPC's error text for a message above the size limit. The status RESOURCE_EXHAUSTED alone may mean that
the server is busy."""


class ServerError(Exception):
    """A server cannot start; the message says why."""


class RpcError(Exception):
    """Base class of the errors with which a gRPC handler rejects a call; each subclass has its status code.

    `message` is a sentence for people. `reason` is for programs, such as "RUN_ACTIVE"; by default it is the name of the
    status code. `details` are protobuf messages for google.rpc.Status.details, in addition to a google.rpc.ErrorInfo
    with the reason.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, details: Sequence[Message] = (), *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code.name
        self.details = (error_details_pb2.ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN), *details)

    @property
    def short_message(self) -> str:
        """The error's message, cut at MAX_MESSAGE bytes for the HTTP/2 trailers."""
        return shortened(self.message, MAX_MESSAGE)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return this error's google.rpc.Status as trailing metadata, without details that don't fit."""
        status = status_pb2.Status(code=self.code.value[0], message=shortened(self.message, MAX_DETAILS // 5))
        for detail in self.details:
            packed = detail if isinstance(detail, any_pb2.Any) else any_pb2.Any()
            if packed is not detail:
                packed.Pack(detail)
            if status.ByteSize() + packed.ByteSize() <= MAX_DETAILS:
                status.details.append(packed)
        return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


class InvalidArgument(RpcError):
    """The request is invalid in any state of the service; `violations` are (field, description) pairs."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, violations: Sequence[tuple[str, str]] = ()) -> None:
        self.violations = tuple(violations)
        bad = error_details_pb2.BadRequest()
        for field, description in violations:
            named = error_details_pb2.BadRequest.FieldViolation(
                field=shortened(field, MAX_FIELD), description=shortened(description, MAX_DESCRIPTION)
            )
            if bad.ByteSize() + named.ByteSize() <= MAX_DETAILS * 2 // 3:
                bad.field_violations.append(named)
        super().__init__(message, [bad] if violations else [])

    @classmethod
    def from_validation(cls, error: pydantic.ValidationError, prefix: str = "") -> "InvalidArgument":
        """Convert pydantic's errors to violations of one InvalidArgument; `prefix` and a dot precede field names."""
        violations = Violations()
        for mistake in error.errors(include_url=False):
            place = ".".join(str(part) for part in mistake["loc"])
            violations.add(".".join(part for part in (prefix, place) if part), mistake["msg"])
        return violations.error()


class NotFound(RpcError):
    """The object that the request names, such as a run, does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RpcError):
    """The object that the caller wants to create, such as a run, exists already."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(RpcError):
    """The service's state does not allow the call; retrying it unchanged does not help.

    `subject` names the object in the wrong state, such as "run my-run".
    """

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, *, reason: str = "", subject: str = "") -> None:
        violation = error_details_pb2.PreconditionFailure.Violation(
            type=reason or self.code.name,
            subject=shortened(subject, MAX_FIELD),
            description=shortened(message, MAX_DESCRIPTION),
        )
        super().__init__(message, [error_details_pb2.PreconditionFailure(violations=[violation])], reason=reason)


class Aborted(RpcError):
    """The service started the call's work, but abandoned it because of another event."""

    code = grpc.StatusCode.ABORTED


class Unavailable(RpcError):
    """The service is temporarily unable to execute the call; the caller may retry after `retry_seconds`."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, *, retry_seconds: float = 1.0) -> None:
        super().__init__(message, [_retry_info(retry_seconds)])


class ResourceExhausted(RpcError):
    """The call exceeds a limit on a size or number. If `retry_seconds` is set, the caller may retry after that time."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(message, [] if retry_seconds is None else [_retry_info(retry_seconds)])


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromTimedelta(timedelta(seconds=seconds))
    return error_details_pb2.RetryInfo(retry_delay=delay)


class DeadlineExceeded(RpcError):
    """The service could not finish the call's work before the deadline."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(RpcError):
    """The caller's token is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RpcError):
    """The caller's role does not allow the call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Violations:
    """Collects the invalid fields of a request, so that one error reports all of them."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        """The first MAX_VIOLATIONS violations, as (field, description) pairs."""
        self._count = 0

    def add(self, field: str, description: str) -> None:
        """Record that a field is invalid. The description says the wrong value and what is valid."""
        self._count += 1
        if self._count <= MAX_VIOLATIONS:
            self.found.append((field, description))

    def check(self, condition: object, field: str, description: str) -> bool:
        """Record that a field is invalid unless `condition` is true. Returns the condition as a bool."""
        if not condition:
            self.add(field, description)
        return bool(condition)

    def check_seconds(self, seconds: float, field: str) -> bool:
        """Record that a field is invalid unless `seconds` is positive and at most MAX_SECONDS. Returns True if
        valid."""
        return self.check(
            0 < seconds <= MAX_SECONDS, field, f"is {seconds:g}: it must be positive, and at most {MAX_SECONDS:g}"
        )

    def error(self) -> InvalidArgument:
        """Return an InvalidArgument error that lists the recorded violations."""
        told = [f"{field}: {shortened(text, MAX_DESCRIPTION)}" for field, text in self.found]
        if self._count > MAX_VIOLATIONS:
            told.append(f"and {self._count - MAX_VIOLATIONS} more")
        return InvalidArgument("; ".join(told), self.found)

    def raise_if_any(self) -> None:
        """Raise InvalidArgument if any field was recorded as invalid."""
        if self.found:
            raise self.error()


def shortened(text: str, max_bytes: int) -> str:
    """Return a text unchanged, or cut at `max_bytes` and followed by its full length in characters.

    Bytes are counted as gRPC escapes them: three for each byte that isn't printable ASCII.
    """
    count = 0
    for place, character in enumerate(text[: max_bytes + 1]):
        count += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode(errors="replace"))
        if count > max_bytes:
            return f"{text[:place]}... ({len(text)} characters)"
    return text


def field_violations(error: grpc.RpcError) -> list[tuple[str, str]]:
    """Return the invalid fields that a failed call's error lists, as (field, description) pairs."""
    bad_request = _detail(error, error_details_pb2.BadRequest())
    return [(violation.field, violation.description) for violation in bad_request.field_violations]


def failed_precondition(error: grpc.RpcError, reason: str) -> str:
    """Return the object that made a call fail with FAILED_PRECONDITION and this reason, such as "run my-run".

    Returns "" if the call failed for another reason.
    """
    violations = _detail(error, error_details_pb2.PreconditionFailure()).violations
    return violations[0].subject if violations and violations[0].type == reason else ""


def retry_seconds(error: grpc.RpcError) -> float | None:
    """Return the seconds after which a failed call may be retried, by its google.rpc.RetryInfo; None if it has none."""
    info = _detail(error, error_details_pb2.RetryInfo())
    return info.retry_delay.ToTimedelta().total_seconds() if info.HasField("retry_delay") else None


def is_too_large(error: grpc.RpcError) -> bool:
    """Return True if a call failed because a message is above the limit of its sender or its receiver."""
    return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and bool(_TOO_LARGE.search(error.details() or ""))


def has_status(error: grpc.RpcError) -> bool:
    """Return True if a handler of relaxd raised a failed call's error, False if gRPC did."""
    return _status_bytes(error) is not None


def from_call(error: grpc.RpcError) -> RpcError:
    """Convert a failed call's gRPC error to the RpcError that the server's handler raised, with its details."""
    code, message = getattr(error, "code", lambda: RpcError.code)(), getattr(error, "details", lambda: str(error))()
    info = error_details_pb2.ErrorInfo()
    rest = [detail for detail in _status(error).details if not detail.Unpack(info)]
    kinds = {kind.code: kind for kind in RpcError.__subclasses__()}
    raised = RpcError.__new__(kinds.get(code, RpcError))
    raised.code = code
    RpcError.__init__(raised, message or "", rest, reason=info.reason)
    return raised


def _status_bytes(error: grpc.RpcError) -> bytes | None:
    metadata = getattr(error, "trailing_metadata", lambda: None)() or ()
    return next((value for key, value in metadata if key == STATUS_DETAILS_KEY), None)


def _status(error: grpc.RpcError) -> status_pb2.Status:
    """Return the google.rpc.Status that a failed call's trailing metadata contain; an empty message if they lack it."""
    try:
        return status_pb2.Status.FromString(_status_bytes(error) or b"")
    except DecodeError:
        return status_pb2.Status()


def _detail(error: grpc.RpcError, kind: Detail) -> Detail:
    """Fill the message `kind` from the detail of the same type in a failed call's status, and return it.

    Without such a detail, `kind` is returned empty.
    """
    any(detail.Unpack(kind) for detail in _status(error).details)
    return kind


def explain(error: grpc.RpcError) -> str:
    """Format a failed call's error for people: status code, message, invalid fields."""
    code = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    message = getattr(error, "details", lambda: str(error))() or "no details"
    told = "; ".join(f"{field}: {text}" for field, text in field_violations(error) if text not in message)
    return f"{code.name}: {message}" + (f" ({told})" if told else "")
