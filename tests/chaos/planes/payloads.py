"""An auditor of payloads in Redis: whatever is there is pointed to, expires, or is freed in time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import redis

from relaxd.board.attempts import all_places
from relaxd.redis_client import key_prefix

SWEEP_SECONDS = 20.0
"""Limit until a sweep, of which there are several in a second, has freed what is garbage or overdue."""
TICK_SECONDS = 0.1
GONE = -2
"""The time to live of a key that isn't there."""

# KEYS: prefix. Everything at one moment; nothing is written.
SNAPSHOT = """
local P, call = KEYS[1], redis.call
local pointers, payloads = {}, {}
local function add(pointer) pointers[#pointers + 1] = pointer end
for _, id in ipairs(call('SMEMBERS', P .. 'open')) do
  local fields = call('HGETALL', P .. 'group:' .. id)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 1) == '@' then add(fields[i + 1]) end
    if string.sub(fields[i], 1, 6) == 'saved:' then
      for pointer in string.gmatch(fields[i + 1], '%S+') do add(pointer) end
    end
  end
end
for _, waiting in ipairs({ 'retries', 'unscored' }) do
  for _, retry in ipairs(call('HVALS', P .. waiting)) do add(string.match(retry, '|([^|]*)')) end
end
for _, entry in ipairs(call('XRANGE', P .. 'samples', '-', '+')) do
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'pointer' then add(entry[2][i + 1]) end
  end
end
for _, key in ipairs(call('KEYS', P .. 'columns:*')) do payloads[#payloads + 1] = { key, call('PTTL', key) } end
local now = call('TIME')
return { pointers, payloads, call('SMEMBERS', P .. 'garbage'), call('ZRANGE', P .. 'pending', 0, -1, 'WITHSCORES'),
  now[1] * 1000 + math.floor(now[2] / 1000) }
"""


Key = tuple[int | None, str]
"""The data node of a payload, None for the board's Redis, and its key there."""


@dataclass
class Seen:
    """Payloads and pointers at one moment on the board's Redis, and a little later on data nodes."""

    wanted: set[Key]
    """Payloads that something points to."""
    known: set[Key]
    """These, and those that are garbage or being written."""
    expiry: dict[Key, int]
    """Payloads that are there: milliseconds that they have left, negative for those that last."""
    garbage: set[str]
    pending: dict[str, float]
    """Pointer -> when it is given up, in milliseconds of Unix time."""
    now: float


@dataclass
class Payloads:
    """The payloads of a run."""

    client: redis.Redis
    """Of the board's Redis."""
    run_id: str
    seconds: float = SWEEP_SECONDS
    nodes: Sequence[redis.Redis] = ()
    """The run's data nodes."""
    looks: int = 0
    """Audits so far."""
    most: dict[str, int] = field(default_factory=lambda: {"payloads": 0, "on nodes": 0, "pending": 0, "garbage": 0})
    """The most that an audit has found of each, to see that there was something to find."""

    def audit(self) -> list[str]:
        """Say what is lost or leaks. Waits until what is garbage or overdue now has been freed."""
        prefix = key_prefix(self.run_id)
        deadline = time.monotonic() + self.seconds
        wrong, garbage, overdue = self._look()
        left = garbage | overdue
        while left and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)  # brief: a sweep
            left &= {
                member.decode()
                for members in (
                    self.client.smembers(f"{prefix}garbage"),
                    self.client.zrange(f"{prefix}pending", 0, -1),
                )
                for member in members
            }
        if left:
            sort = "garbage" if left & garbage else "overdue"
            wrong.append(f"{len(left)} attempts are still {sort} after {self.seconds:g} s: {sorted(left)[:3]}")
        return wrong

    def end(self) -> list[str]:
        """Say what is wrong once the run is over: then nothing may be pending or garbage, either."""
        wrong = self.audit()
        for what in ("pending", "garbage"):
            if self.client.exists(f"{key_prefix(self.run_id)}{what}"):
                wrong.append(f"the run is over, and there is {what}")
        return wrong

    def _look(self) -> tuple[list[str], set[str], set[str]]:
        """Return what is wrong at this moment, what is garbage, and what is overdue."""
        found = self._see()
        self.looks += 1
        counts = {"payloads": len(found.expiry), "pending": len(found.pending), "garbage": len(found.garbage)}
        counts["on nodes"] = sum(node is not None for node, _ in found.expiry)
        self.most = {name: max(most, counts[name]) for name, most in self.most.items()}
        wrong = list(_lost(found))
        if leaked := sorted((k for k, left in found.expiry.items() if left < 0 and k not in found.known), key=str):
            wrong.append(f"{len(leaked)} payloads leak, which nothing points to: {leaked[:3]}")
        return wrong, found.garbage, {pointer for pointer, due in found.pending.items() if due < found.now}

    def _see(self) -> Seen:
        """Look at everything.

        Data nodes are looked at a moment after the board's Redis. What is pointed to before and after it must have been
        there, and what was written or freed meanwhile is known before or after it.
        """
        found = self._board()
        if not self.nodes:
            return found
        on_nodes = {
            (node, key): milliseconds
            for node, client in enumerate(self.nodes)
            for key, milliseconds in self._on(client)
        }
        after = self._board()
        wanted = found.wanted & after.wanted
        known = found.known | after.known
        for node, key in [one for one in on_nodes if one not in known]:
            if not self.nodes[node].exists(key):  # written and freed between the two looks
                del on_nodes[node, key]
        return Seen(wanted, known, after.expiry | on_nodes, after.garbage, after.pending, after.now)

    def _on(self, client: redis.Redis) -> Iterator[tuple[str, int]]:
        """Yield the payloads of a data node, and the milliseconds that each has left."""
        keys = list(client.scan_iter(f"{key_prefix(self.run_id)}columns:*", count=1000))
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.pttl(key)
        for key, milliseconds in zip(keys, pipe.execute(), strict=True):
            if milliseconds != GONE:
                yield key.decode(), milliseconds

    def _board(self) -> Seen:
        """Look at the board's Redis."""
        prefix = key_prefix(self.run_id)
        pointers, payloads, garbage, pending, now = self.client.eval(SNAPSHOT, 1, prefix)
        due = {pointer.decode(): float(when) for pointer, when in zip(pending[::2], pending[1::2], strict=True)}
        wanted = set(_keys(prefix, pointers))
        # Payloads on data nodes last before they are pointed to; those on the board's Redis expire until then.
        written = {key for key in _keys(prefix, pending[::2]) if key[0] is not None}
        return Seen(
            wanted=wanted,
            known=wanted | set(_keys(prefix, garbage)) | written,
            expiry={(None, key.decode()): milliseconds for key, milliseconds in payloads},
            garbage={pointer.decode() for pointer in garbage},
            pending=due,
            now=float(now),
        )


def _keys(prefix: str, pointers: list[bytes]) -> Iterator[Key]:
    for pointer in pointers:
        for place in all_places(prefix, pointer.decode()):
            yield from ((place.node, key) for key in place.keys)


def _lost(found: Seen) -> Iterator[str]:
    """Say which payloads that something points to are gone or will be."""
    if gone := sorted(found.wanted - found.expiry.keys(), key=str):
        yield f"{len(gone)} payloads are gone, which something points to: {gone[:3]}"
    if going := sorted((key for key in found.wanted & found.expiry.keys() if found.expiry[key] >= 0), key=str):
        yield f"{len(going)} payloads expire, which something points to: {going[:3]}"
