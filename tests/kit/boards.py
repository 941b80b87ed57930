"""Boards for tests: a small dataflow with two stages that run side by side, and what must always hold on any board."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.board import Board, Column, Delivery, LedgerEntry, NewGroup, Stage
from relaxd.board.attempts import all_places
from relaxd.board.committed_steps import CommittedSteps
from relaxd.config import BoardConfig

STAGES = (
    Stage("rollout", needs=("prompt_tokens",), writes=("tokens", "versions")),
    Stage("reward", needs=("tokens", "prompt"), writes=("reward",)),
    Stage("critic", needs=("tokens",), writes=("values",)),
    Stage("advantage", needs=("reward", "values"), writes=("advantages",)),
    Stage("train", needs=("prompt", "tokens", "advantages"), writes=()),
)
LARGE = 20_000
"""Tokens of a sample whose columns are too large to share a payload."""


def make_board(
    url: str,
    *,
    run_id: str = "run",
    stages: Sequence[Stage] = STAGES,
    groups_per_step: int = 4,
    steps: int = 100,
    **settings: Any,
) -> Board:
    """A board that was created by term 1, its gate open for version 0."""
    timing = {name: settings.pop(name) for name in ("timeout_seconds", "retry_seconds") if name in settings}
    board = Board(url, run_id, stages, BoardConfig(**settings), **timing)
    board.create(term=1, groups_per_step=groups_per_step, steps=steps)
    board.set_gate(term=1, oldest_version=0, open=True)
    return board


def group(group_id: str, **fields: Any) -> NewGroup:
    """A prompt."""
    columns = {"prompt_tokens": np.arange(4, dtype=np.int32), "prompt": {"text": f"prompt of {group_id}"}}
    return NewGroup(group_id, columns, {"traceparent": f"trace-of-{group_id}"}, worst_bytes=1000, **fields)


def output(stage: str, *, version: int = 0, tokens: int = 3) -> dict[str, Column]:
    """What a stage writes."""
    return {
        "rollout": {
            "tokens": np.arange(tokens, dtype=np.int32),
            "versions": np.full(tokens, version, dtype=np.int64),
        },
        "reward": {"reward": np.ones(1)},
        "critic": {"values": np.zeros(tokens, dtype=np.float32)},
        "advantage": {"advantages": np.zeros(tokens, dtype=np.float32)},
    }[stage]


def commands_of(board: Board, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list to which each command is added that the board sends to change something."""
    sent: list[tuple[Any, ...]] = []
    write = board._connection.write

    def watched(commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        sent.extend(commands)
        return write(commands)

    monkeypatch.setattr(board._connection, "write", watched)
    return sent


def take(board: Board, stage: str, consumer: str = "worker", count: int = 100) -> list[Delivery]:
    """What waits, and what any holder let go, now."""
    board._next_claim.clear()
    board._connection.client.delete(f"{board.prefix}claims")
    return board.take(stage, consumer, count=count, block_seconds=0)


def end_leases(board: Board, stage: str, consumer: str | None = None) -> None:
    """Make all leases (or a consumer's) run out, as time would."""
    client: Any = board._connection.client
    stream = f"{board.prefix}stage:{stage}"
    for entry, owner, *_ in client.execute_command("XPENDING", stream, "workers", "-", "+", 1000):
        if consumer is None or owner.decode() == consumer:
            client.xclaim(stream, "workers", owner, 0, [entry], idle=10**9, justid=True)


def make_overdue(board: Board) -> None:
    """Make every registered attempt overdue, as time would."""
    client: Any = board._connection.client
    for pointer in client.zrange(f"{board.prefix}pending", 0, -1):
        client.zadd(f"{board.prefix}pending", {pointer: 1})


def advance(board: Board, stages: Sequence[str], **settings: Any) -> None:
    """Commit what waits at each of these stages."""
    for stage in stages:
        assert all(board.commit([(delivery, output(stage, **settings)) for delivery in take(board, stage)]))


def all_steps(board: Board, folder: str) -> list[LedgerEntry]:
    """All committed steps of a run with this folder, in order: the board trims its ledger."""
    return [entry for page in CommittedSteps(board.ledger, Path(folder)).pages(0) for entry in page]


def kept_samples(board: Board, step: int | None = None, limit: int = 100) -> list[dict[str, Any]]:
    """The newest samples of a step, or of all steps, in order."""
    return [sample for _, sample in reversed(board.sample_page(step, limit=limit))]


def audit(board: Board) -> None:
    """What must hold after every operation, read from Redis itself."""
    client, prefix = board._connection.client, board.prefix
    counts = board.counts()
    counts.check()
    stages = [stage.name for stage in board.stages]
    open_groups = set(board.open_groups())
    with client.pipeline() as pipe:
        for stage in stages:
            pipe.xrange(f"{prefix}stage:{stage}")
            pipe.execute_command("XPENDING", f"{prefix}stage:{stage}", "workers", "-", "+", 10_000)
        for id in open_groups:
            pipe.hgetall(f"{prefix}group:{id}")
        replies = pipe.execute()
    entries, holds, hashes = (
        replies[: 2 * len(stages) : 2],
        replies[1 : 2 * len(stages) : 2],
        replies[2 * len(stages) :],
    )
    streams = {stage: dict(found) for stage, found in zip(stages, entries, strict=True)}
    held = dict(zip(stages, holds, strict=True))
    groups = dict(zip(open_groups, hashes, strict=True))

    # Every open group is somewhere: at each stage it was offered and that has not committed, as exactly one entry.
    expected_entries: dict[str, dict[bytes, bytes]] = {stage: {} for stage in stages}
    for id, fields in groups.items():
        assert fields, f"open group {id} has no hash"
        at = [s for s in stages if f"entry:{s}".encode() in fields and f"@{s}".encode() not in fields]
        assert at, f"open group {id} is at no stage: {fields}"
        for stage in at:
            expected_entries[stage][fields[f"entry:{stage}".encode()]] = id.encode()
    for stage in stages:
        assert {entry: f[b"group"] for entry, f in streams[stage].items()} == expected_entries[stage]
        assert {entry for entry, *_ in held[stage]} <= set(streams[stage]), "a hold on nothing"

    # No group in two steps, none both trained and open.
    trained = Counter(id for entry in board.ledger() for id in entry.plan["groups"])
    assert all(times == 1 for times in trained.values()), "a group was trained twice"
    assert counts.trained == trained.total()
    assert not open_groups & set(trained)
    assert counts.dropped == sum(counts.dropped_by_reason.values())
    assert [entry.step for entry in board.ledger()] == list(range(1, counts.last_step + 1))

    # Every payload that is pointed to is there for good; every other one is garbage, or expires. On data nodes what is
    # registered may last, too.
    pointers = [value for fields in groups.values() for name, value in fields.items() if name.startswith(b"@")]
    pointers += [pointer for fields in groups.values() for pointer in _saved(fields)]
    shown = [fields for _, fields in client.xrange(f"{prefix}samples")]
    pointers += [fields[b"pointer"] for fields in shown]
    for waiting in ("retries", "unscored"):
        pointers += [value.split(b"|")[1] for value in client.hgetall(prefix + waiting).values()]
    wanted = {key for pointer in pointers for key in payload_keys(prefix, pointer.decode())}
    thrown_away = client.smembers(f"{prefix}garbage")
    garbage = {key for pointer in thrown_away for key in payload_keys(prefix, pointer.decode())}
    assert not wanted & garbage, f"to be freed, but pointed to: {wanted & garbage}"

    keys = [key.decode() for key in client.keys(f"{prefix}*")]
    lasting = set()
    for server in (connection.client for connection in board._nodes.every):
        columns = [key.decode() for key in server.keys(f"{prefix}columns:*")]
        with server.pipeline() as pipe:
            for key in columns:
                pipe.ttl(key)
            lasting |= {key for key, seconds in zip(columns, pipe.execute(), strict=True) if seconds == -1}
    assert wanted <= lasting, f"lost {wanted - lasting}"
    registered = {
        key
        for pointer in client.zrange(f"{prefix}pending", 0, -1)
        for place in all_places(prefix, pointer.decode())
        if place.node is not None
        for key in place.keys
    }
    accounted = wanted | garbage | registered
    assert lasting <= accounted, f"leaked {lasting - accounted}"

    assert set(board.open_versions()) <= open_groups
    state = client.hgetall(f"{prefix}state")
    assert int(state[b"reserved_bytes"]) == sum(int(fields[b"room"]) for fields in groups.values())
    stored = {id: int(fields[b"stored"]) for id, fields in groups.items()}
    assert stored == {id: _bytes_of(board, fields) for id, fields in groups.items()}
    assert int(state[b"stored_bytes"]) == sum(stored.values())
    assert int(state.get(b"samples", 0)) == sum(int(fields[b"count"]) for fields in shown)
    assert int(state.get(b"sample_bytes", 0)) == sum(bytes_of(fields[b"pointer"]) for fields in shown)
    assert int(state[b"garbage_bytes"]) == sum(bytes_of(pointer) for pointer in thrown_away)
    found_hashes = {key.removeprefix(f"{prefix}group:") for key in keys if key.startswith(f"{prefix}group:")}
    assert found_hashes == open_groups, "a closed group left its hash behind"


def payload_keys(prefix: str, pointer: str) -> list[str]:
    """Return all keys of a pointer. Raises ValueError: the pointer is damaged."""
    return [key for place in all_places(prefix, pointer) for key in place.keys]


def bytes_of(pointer: bytes) -> int:
    """The bytes that a pointer says that its payloads have."""
    name, *large = pointer.decode().split(",")
    return int(name.rpartition(":")[2]) + sum(int(part.split(":")[1]) for part in large)


def _saved(fields: dict[bytes, bytes]) -> list[bytes]:
    """The pointers to the saved parts of a group's unfinished work."""
    return [pointer for name, value in fields.items() if name.startswith(b"saved:") for pointer in value.split()]


def _bytes_of(board: Board, fields: dict[bytes, bytes]) -> int:
    """The bytes of what a group's pointers point to."""
    pointers = [*(value for name, value in fields.items() if name.startswith(b"@")), *_saved(fields)]
    places = [place for pointer in pointers for place in all_places(board.prefix, pointer.decode())]
    return sum(board._nodes.at(place.node).client.strlen(key) for place in places for key in place.keys)
