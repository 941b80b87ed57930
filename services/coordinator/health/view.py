"""Health records as protobuf."""

from collections.abc import Sequence

from relaxd.config import HealthConfig
from relaxd.steady_clock import steady_time
from relaxd.v1 import health_pb2
from services.coordinator.health.health_update import recent
from services.coordinator.state.health_records import Event, HealthRecord


def health_messages(record: HealthRecord, config: HealthConfig) -> list[health_pb2.Health]:
    """Convert a health record: every role, each followed by its replicas."""
    messages = []
    for role in record.roles.values():
        state = health_pb2.HealthState.Value(f"HEALTH_STATE_{role.state}")
        messages.append(health_pb2.Health(role=role.role, state=state, reason=role.reason, restarts=role.rebuilds))
    for one in record.replicas.values():
        messages.append(
            health_pb2.Health(
                role=one.role,
                instance=one.instance,
                replica_id=one.replica_id,
                state=health_pb2.HealthState.Value(f"HEALTH_STATE_{one.state}"),
                reason=one.reason,
                restarts=len(recent(one.restarts, config, steady_time())),
            )
        )
    return sorted(messages, key=lambda message: (message.role, message.instance))


def event_messages(events: Sequence[Event], after: int) -> list[health_pb2.RunEvent]:
    """Convert the events with a higher number than `after`."""
    messages = []
    for event in events:
        if event.number > after:
            state = health_pb2.HealthState.Value(f"HEALTH_STATE_{event.state}")
            message = health_pb2.RunEvent(
                number=event.number, role=event.role, instance=event.instance, state=state, text=event.text
            )
            message.create_time.FromDatetime(event.time)
            messages.append(message)
    return messages
