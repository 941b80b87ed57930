"""Spans of work on the board, by OpenTelemetry's conventions for messaging.

A group is a message, and a stage the destination that it is sent to. Publishing, taking and settling groups are
operations on batches, which link to the spans that created their groups. A batch without a traced group has no span.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind
from opentelemetry.util.types import Attributes, AttributeValue

from relaxd.telemetry.carriers import link_from
from relaxd.telemetry.setup import enabled, tracer

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


@contextmanager
def send_span(stage: str, carriers: Iterable[Mapping[str, str]], attributes: Attributes = None) -> Iterator[Span]:
    """Open the span in which a batch of groups is published to a stage, in a trace of its own."""
    with _batch_span("publish", "send", stage, carriers, attributes, Context()) as span:
        yield span


@contextmanager
def settle_span(
    name: str, stage: str, carriers: Iterable[Mapping[str, str]], attributes: Attributes = None
) -> Iterator[Span]:
    """Open the span of a call (`name`: commit, nack, drop ...) that settles groups which a stage holds."""
    with _batch_span(name, "settle", stage, carriers, attributes, None) as span:
        yield span


def record_receive(
    stage: str, carriers: Iterable[Mapping[str, str]], started_at: int, attributes: Attributes = None
) -> None:
    """Record that a consumer took groups. Called afterwards, as most calls find no group.

    `started_at` is when it asked for them, in nanoseconds of Unix time.
    """
    if not enabled() or not (links := _links(carriers)):
        return
    values = operation_attributes("receive", "receive", stage, more=_with_count(attributes, links))
    tracer().start_span(f"receive {stage}", None, SpanKind.CLIENT, values, links, start_time=started_at).end()


@contextmanager
def _batch_span(
    name: str,
    kind: OperationType,
    stage: str,
    carriers: Iterable[Mapping[str, str]],
    attributes: Attributes,
    parent: Context | None,
) -> Iterator[Span]:
    if not enabled() or not (links := _links(carriers)):
        yield INVALID_SPAN
        return
    values = operation_attributes(name, kind, stage, more=_with_count(attributes, links))
    with tracer().start_as_current_span(f"{name} {stage}", parent, SpanKind.CLIENT, values, links) as span:
        yield span


def _links(carriers: Iterable[Mapping[str, str]]) -> list[Link]:
    return [link for link in map(link_from, carriers) if link is not None]


def _with_count(attributes: Attributes, links: list[Link]) -> dict[str, AttributeValue]:
    return {**(attributes or {}), "messaging.batch.message_count": len(links)}
