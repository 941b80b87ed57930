"""Spans of work on the board, by OpenTelemetry's conventions for messaging.

A group is a message, and a stage the destination that it is sent to. Publishing, taking and settling groups are
operations on batches, which link to the spans that created their groups. A batch without a traced group has no span.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Literal

from opentelemetry import trace
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import Attributes, AttributeValue

from relaxd.telemetry.carriers import link_from
from relaxd.telemetry.setup import enabled, open_quick_span

SYSTEM = "redis"

OperationType = Literal["create", "send", "receive", "process", "settle"]


def operation_attributes(
    name: str, kind: OperationType, stage: str, message: str = "", more: Attributes = None
) -> dict[str, AttributeValue]:
    """Return the attributes of an operation on a stage's groups; `message` is the group's id, if it is on one."""
    found: dict[str, AttributeValue] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": stage,
        **(more or {}),
    }
    return found | {"messaging.message.id": message, "relaxd.group_id": message} if message else found


class BatchSpan:
    """Records its block as an operation on a batch of groups, if one of them is traced.

    The span is a child of the current recorded span, or else begins a new trace.
    """

    def __init__(
        self,
        name: str,
        kind: OperationType,
        stage: str,
        carriers: Iterable[Mapping[str, str]],
        attributes: Attributes = None,
    ) -> None:
        """`name`: publish, commit, nack ...; `carriers`: those of the groups."""
        self._name, self._kind, self._stage = name, kind, stage
        self._carriers, self._attributes = carriers, attributes

    def __enter__(self) -> None:
        self._started_at = time.time_ns()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        record_batch(
            self._name, self._kind, self._stage, self._carriers, self._started_at, self._attributes, error=error
        )


def record_batch(
    name: str,
    kind: OperationType,
    stage: str,
    carriers: Iterable[Mapping[str, str]],
    started_at: int,
    attributes: Attributes = None,
    *,
    error: BaseException | None = None,
) -> None:
    """Record an operation that has ended; see BatchSpan. `started_at` is in nanoseconds of Unix time."""
    if not enabled() or not (links := [link for link in map(link_from, carriers) if link is not None]):
        return
    current = trace.get_current_span()
    parent = current.get_span_context() if current.is_recording() else None
    count = {"messaging.batch.message_count": len(links)}
    values = operation_attributes(name, kind, stage, more={**(attributes or {}), **count})
    span = open_quick_span(f"{name} {stage}", parent, SpanKind.CLIENT, values, links, started_at)
    if span is None:
        return
    if error is not None:
        span.record_exception(error)
        span.set_status(trace.StatusCode.ERROR, str(error))
        span.set_attribute("error.type", type(error).__qualname__)
    span.end()
