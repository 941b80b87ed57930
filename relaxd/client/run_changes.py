"""Partial messages of WatchRun: the coordinator sends the changes of a run, and the client merges them.

Both sides are in one module, because `merge(before, changes(before, after)) == after` must hold.
"""

from collections.abc import Iterable

from google.protobuf.message import Message

from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.health_pb2 import Health

BY_KEY = ("metrics", "health")
"""Names of a run's fields of which a partial message has only the changed entries."""


def changes(before: pb.Run, after: pb.Run) -> pb.WatchRunResponse:
    """Return the partial message with which a client that knows the run as `before` learns that it is `after`."""
    response = pb.WatchRunResponse(partial=True)
    known, now = dict(before.ListFields()), dict(after.ListFields())
    for field, value in now.items():
        if field.name not in BY_KEY and known.get(field) != value:
            _set(response.run, after, field.name)
    response.cleared.extend(field.name for field in known if field not in now and field.name not in BY_KEY)
    response.run.metrics.update(
        {name: value for name, value in after.metrics.items() if before.metrics.get(name) != value}
    )
    response.removed_metrics.extend(before.metrics.keys() - after.metrics.keys())
    if before.health != after.health:
        old, new = _by_key(before.health), _by_key(after.health)
        response.run.health.extend(entry for key, entry in new.items() if old.get(key) != entry)
        response.removed_health.extend(
            Health(role=role, instance=name) for role, name in old if (role, name) not in new
        )
    return response


def merge(known: pb.Run, response: pb.WatchRunResponse) -> pb.Run:
    """Return the run with the changes of a message. `known`: the complete run before the message, left unchanged."""
    if not response.partial:
        run = pb.Run()
        run.CopyFrom(response.run)
        for name in response.unchanged:
            _set(run, known, name)
        return run
    run = pb.Run()
    run.CopyFrom(known)
    for name in response.cleared:
        run.ClearField(name)  # type: ignore[arg-type]
    for field, _ in response.run.ListFields():
        if field.name not in BY_KEY:
            run.ClearField(field.name)  # type: ignore[arg-type]
            _set(run, response.run, field.name)
    for name in response.removed_metrics:
        run.metrics.pop(name, None)
    run.metrics.update(response.run.metrics)
    if response.run.health or response.removed_health:
        entries = {**_by_key(run.health), **_by_key(response.run.health)}
        for key in _by_key(response.removed_health):
            entries.pop(key, None)
        in_order = [entries[key] for key in sorted(entries)]
        del run.health[:]
        run.health.extend(in_order)
    return run


def _by_key(entries: Iterable[Health]) -> dict[tuple[str, str], Health]:
    return {(entry.role, entry.instance): entry for entry in entries}


def _set(run: pb.Run, source: pb.Run, name: str) -> None:
    """Copy the field `name` from `source` to a run in which it is not set."""
    value = getattr(source, name)
    field = pb.Run.DESCRIPTOR.fields_by_name[name]
    if field.message_type is None:
        setattr(run, name, value)
        return
    getattr(run, name).MergeFrom(value)
    if isinstance(value, Message):
        getattr(run, name).SetInParent()  # it may be empty and there
