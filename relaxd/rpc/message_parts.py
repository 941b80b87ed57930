"""Functions for parts that many messages have: pages of lists, durations of watches, enums, GPU UUIDs, URLs, JSON."""

import base64
import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from relaxd.rpc.errors import Violations

MAX_PAGE_BYTES = 1 << 20
"""Maximum size, in bytes, of a page of a list response, unless one item alone is larger. gRPC clients refuse messages
above 4 MiB by default."""
Item = TypeVar("Item", bound=Message)


class ListRequest(Protocol):
    """Fields of a request that asks for one page of a list."""

    page_size: int
    page_token: str


class Page(Generic[Item]):
    """One page of a list whose items have unique keys; the next page starts after the last key."""

    def __init__(
        self,
        request: ListRequest,
        listed: str,
        *,
        default: int,
        maximum: int,
        violations: Violations | None = None,
    ) -> None:
        """Start the page that a request asks for.

        Args:
            request: the request, whose page_size and page_token are checked.
            listed: name of the list, with its filters: a token of another list is invalid.
            default: the size of a page where page_size is 0.
            maximum: the largest page_size.
            violations: collects invalid fields; None: the constructor raises InvalidArgument for them.
        """
        self.items: list[Item] = []
        self.next_page_token = ""
        """Token with which the caller requests the next page; "" on the last page."""
        self.after = ""
        """Key of the last item of the page before, after which this page starts; "" for the first page."""
        self._listed = listed
        self._size = request.page_size or default
        self._bytes = 0
        self._last = ""
        found = violations or Violations()
        in_range = 0 <= request.page_size <= maximum
        found.check(in_range, "page_size", f"is {request.page_size}: it must be 1 to {maximum}; 0 means {default}")
        if request.page_token:
            name, _, self.after = _decoded(request.page_token).partition("\n")
            found.check(name == listed and self.after, "page_token", "must be next_page_token of the page before")
        if violations is None:
            found.raise_if_any()

    def add(self, key: str, item: Item) -> bool:
        """Add an item to the page. Returns False, without adding it, if the page is full."""
        size = item.ByteSize()
        if len(self.items) == self._size or (self.items and self._bytes + size > MAX_PAGE_BYTES):
            self.next_page_token = base64.urlsafe_b64encode(f"{self._listed}\n{self._last}".encode()).decode()
            return False
        self.items.append(item)
        self._bytes += size
        self._last = key
        return True


def newest_first(seconds: float, name: str) -> str:
    """Return a sort key that puts the newest object first, from its creation time in Unix seconds and its name."""
    return f"{10**17 - int(seconds * 1e6):018d} {name}"


def _decoded(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except ValueError:  # also UnicodeError and binascii.Error
        return ""


MAX_WATCH_SECONDS = 300.0
DEFAULT_WATCH_SECONDS = 60.0


def watch_seconds(max_seconds: float, violations: Violations) -> float:
    """Return the duration of a watch call in seconds, given the request's max_seconds; 0 means the default.

    Adds a violation if max_seconds is out of range.
    """
    in_range = 0 <= max_seconds <= MAX_WATCH_SECONDS
    violations.check(in_range, "max_seconds", f"is {max_seconds:g}: it must be 0 to {MAX_WATCH_SECONDS:.0f}")
    return max_seconds or DEFAULT_WATCH_SECONDS


@cache
def words(enum: Any) -> dict[int, str]:
    """Return the words of a protobuf enum's values by number, such as {0: "", 1: "stop"}; the word of 0 is "".

    A word is the value's name in lower case, without the enum's name. `enum` is the enum, or its descriptor.
    """
    descriptor = getattr(enum, "DESCRIPTOR", enum)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", descriptor.name).upper() + "_"
    return {one.number: one.name.removeprefix(prefix).lower() if one.number else "" for one in descriptor.values}


@cache
def numbers(enum: Any) -> dict[str, Any]:
    """Return the numbers of a protobuf enum's values by word, the inverse of `words`."""
    return {word: value for value, word in words(enum).items()}


GPU_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/_-]{1,120}")
GPU_UUID_RULE = "must be GPU-... or MIG-..."
SGLANG_URL = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]{1,80}:[0-9]{1,5}")
SGLANG_URL_RULE = "must be http://host:port"
MAX_GPUS = 1024
"""Maximum number of GPU UUIDs in a field of a request."""


def check_gpu_uuids(field: str, uuids: Sequence[str], violations: Violations) -> None:
    """Add a violation for too many GPU UUIDs in a request's field, and for each malformed one."""
    violations.check(len(uuids) <= MAX_GPUS, field, f"must be at most {MAX_GPUS}")
    for index, uuid in enumerate(uuids[:MAX_GPUS]):
        violations.check(GPU_UUID.fullmatch(uuid), f"{field}[{index}]", f"is {uuid!r}: it {GPU_UUID_RULE}")


def plain(message: Message, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Convert a protobuf message to a dict of JSON values by field name.

    Enums become words, times Unix seconds, and numbers that aren't finite None. Fields in `without` and absent optional
    fields are left out.
    """
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if field.name not in without and (not field.has_presence or message.HasField(field.name))
    }


def _field(message: Message, field: Any) -> Any:
    """Return the JSON value of a message's field; `field` is the field's descriptor."""
    value = getattr(message, field.name)
    if not field.is_repeated:
        return _value(value, field)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        return {key: _value(value[key], of_values) for key in sorted(value)}
    return [_value(one, field) for one in value]


def _value(value: Any, field: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return words(field.enum_type)[value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
