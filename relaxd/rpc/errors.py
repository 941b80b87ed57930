"""Errors that cross the wire: raised by handlers as exceptions, answered as gRPC statuses, explained to people.

A handler says what is wrong with the caller's request by raising an RpcError. Anything else that leaves a handler is a
bug of ours and is answered with INTERNAL (see relaxd.rpc.interceptor).
"""

from collections.abc import Sequence
from typing import ClassVar

import grpc
import pydantic
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key in which gRPC carries a serialized google.rpc.Status."""
MAX_SECONDS = 86400.0
"""Longest time that a caller may give anything."""
MAX_VIOLATIONS = 16
"""Violations that are named one by one; of more, the number is told."""
MAX_DESCRIPTION, MAX_FIELD = 400, 100
MAX_MESSAGE, MAX_DETAILS = 2500, 2500
"""Of an error on the wire, in bytes (of the message: as gRPC escapes it). It travels in HTTP/2 trailers, and gRPC's
clients refuse trailers above 8 KiB."""


class ServerError(Exception):
    """A server cannot be started; the message is for the person who started it."""


class RpcError(Exception):
    """A status to answer a call with.

    `message` is one sentence for people; `details` are protobuf messages that go into google.rpc.Status.details.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, details: Sequence[Message] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)

    @property
    def short_message(self) -> str:
        """The message, shortened if it is too long for the wire."""
        return shortened(self.message, MAX_MESSAGE)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The google.rpc.Status of this error as trailing metadata; empty when there are no details, or too many."""
        if not self.details:
            return ()
        status = status_pb2.Status(code=self.code.value[0], message=shortened(self.message, MAX_DETAILS // 5))
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            if status.ByteSize() + packed.ByteSize() <= MAX_DETAILS:
                status.details.append(packed)
        return ((STATUS_DETAILS_KEY, status.SerializeToString()),) if status.details else ()


class InvalidArgument(RpcError):
    """The request is wrong whatever the state of the service; `violations` are (field, description) pairs."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, violations: Sequence[tuple[str, str]] = ()) -> None:
        self.violations = tuple(violations)
        bad = error_details_pb2.BadRequest()
        for field, description in violations:
            named = error_details_pb2.BadRequest.FieldViolation(
                field=shortened(field, MAX_FIELD), description=shortened(description, MAX_DESCRIPTION)
            )
            if bad.ByteSize() + named.ByteSize() <= MAX_DETAILS * 3 // 4:
                bad.field_violations.append(named)
        super().__init__(message, [bad] if violations else [])

    @classmethod
    def from_validation(cls, error: pydantic.ValidationError, prefix: str = "") -> "InvalidArgument":
        """The same mistakes that pydantic found, each field named with `prefix` before it."""
        violations = Violations()
        for mistake in error.errors(include_url=False):
            place = ".".join(str(part) for part in mistake["loc"])
            violations.add(".".join(part for part in (prefix, place) if part), mistake["msg"])
        return violations.error()


class NotFound(RpcError):
    """What the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RpcError):
    """What the request wants to create exists."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(RpcError):
    """The service is not in a state in which the call makes sense; repeating it unchanged does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(RpcError):
    """The work was begun and given up because of something that happened meanwhile."""

    code = grpc.StatusCode.ABORTED


class Unavailable(RpcError):
    """The service cannot do this just now; the caller may try again."""

    code = grpc.StatusCode.UNAVAILABLE


class ResourceExhausted(RpcError):
    """Too large, or too many at once."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(RpcError):
    """The work took longer than it was allowed to."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(RpcError):
    """The caller's token is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(RpcError):
    """The caller is known, but may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(RpcError):
    """The service does not offer this."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Violations:
    """Collects what is wrong with a request, so that the caller learns of every mistake at once."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        """The first MAX_VIOLATIONS of them: a list of a million wrong things is not answered in full."""
        self._count = 0

    def add(self, field: str, description: str) -> None:
        """Note that `field` is wrong; the description says what it is and what would be right."""
        self._count += 1
        if self._count <= MAX_VIOLATIONS:
            self.found.append((field, description))

    def check(self, condition: object, field: str, description: str) -> bool:
        """Note the violation unless the condition holds. Returns whether it holds."""
        if not condition:
            self.add(field, description)
        return bool(condition)

    def check_seconds(self, seconds: float, field: str) -> bool:
        """Note the violation unless `seconds` is a time that something may be given: positive, at most MAX_SECONDS."""
        return self.check(
            0 < seconds <= MAX_SECONDS, field, f"is {seconds:g}: it must be positive, and at most {MAX_SECONDS:g}"
        )

    def error(self) -> InvalidArgument:
        """What was found so far, as an error."""
        told = [f"{field}: {shortened(text, MAX_DESCRIPTION)}" for field, text in self.found]
        if self._count > MAX_VIOLATIONS:
            told.append(f"and {self._count - MAX_VIOLATIONS} more")
        return InvalidArgument("; ".join(told), self.found)

    def raise_if_any(self) -> None:
        """Raise InvalidArgument when anything was found."""
        if self.found:
            raise self.error()


def shortened(text: str, max_bytes: int) -> str:
    """The beginning of a text that may have come from anybody, with a word about what is left out.

    Bytes are counted as gRPC escapes them: three for each that is no printable ASCII.
    """
    count = 0
    for place, character in enumerate(text[: max_bytes + 1]):
        count += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode(errors="replace"))
        if count > max_bytes:
            return f"{text[:place]}... ({len(text)} characters)"
    return text


def field_violations(error: grpc.RpcError) -> list[tuple[str, str]]:
    """The (field, description) pairs that a server sent with an error; empty when it sent none."""
    for key, value in getattr(error, "trailing_metadata", lambda: None)() or ():
        if key == STATUS_DETAILS_KEY:
            return _violations_in(value)
    return []


def _violations_in(serialized: str | bytes) -> list[tuple[str, str]]:
    status = status_pb2.Status()
    bad_request = error_details_pb2.BadRequest()
    try:
        status.ParseFromString(serialized if isinstance(serialized, bytes) else serialized.encode("latin-1"))
        for detail in status.details:
            if detail.Unpack(bad_request):
                return [(violation.field, violation.description) for violation in bad_request.field_violations]
    except DecodeError:
        # Not a google.rpc.Status: the plain message still says what happened.
        pass
    return []


def explain(error: grpc.RpcError) -> str:
    """One readable sentence about a failed call: the status, the server's message, its field violations."""
    code = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    message = getattr(error, "details", lambda: str(error))() or "no details"
    told = "; ".join(f"{field}: {text}" for field, text in field_violations(error) if text not in message)
    return f"{code.name}: {message}" + (f" ({told})" if told else "")
