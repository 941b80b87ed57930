"""An auditor of payloads in Redis: whatever is there is pointed to, expires, or is freed in time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import redis

from relaxd.board.payloads.attempt import payload_keys
from relaxd.redis_client import key_prefix

SWEEP_SECONDS = 20.0
"""Limit until a sweep, of which there are several in a second, has freed what is garbage or overdue."""
TICK_SECONDS = 0.1

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


@dataclass
class Payloads:
    """The payloads of a run on the board's Redis."""

    client: redis.Redis
    run_id: str
    seconds: float = SWEEP_SECONDS
    looks: int = 0
    """Audits so far."""
    most: dict[str, int] = field(default_factory=lambda: {"payloads": 0, "pending": 0, "garbage": 0})
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
        prefix = key_prefix(self.run_id)
        pointers, payloads, garbage, pending, now = self.client.eval(SNAPSHOT, 1, prefix)
        times = dict(zip(pending[::2], pending[1::2], strict=True))
        self.looks += 1
        for name, found in (("payloads", payloads), ("pending", times), ("garbage", garbage)):
            self.most[name] = max(self.most[name], len(found))
        expiry = {key.decode(): milliseconds for key, milliseconds in payloads}
        wrong = list(_lost(set(_keys(prefix, pointers)), expiry))
        known = {*_keys(prefix, pointers), *_keys(prefix, garbage)}
        lasting = {key for key, milliseconds in expiry.items() if milliseconds < 0}
        if leaked := sorted(lasting - known):
            wrong.append(f"{len(leaked)} payloads leak, which nothing points to: {leaked[:3]}")
        late = {pointer.decode() for pointer, due in times.items() if float(due) < now}
        return wrong, {pointer.decode() for pointer in garbage}, late


def _keys(prefix: str, pointers: list[bytes]) -> Iterator[str]:
    for pointer in pointers:
        yield from payload_keys(prefix, pointer.decode())


def _lost(wanted: set[str], expiry: dict[str, int]) -> Iterator[str]:
    """Say which payloads that something points to are gone or will be."""
    if gone := sorted(wanted - expiry.keys()):
        yield f"{len(gone)} payloads are gone, which something points to: {gone[:3]}"
    if going := sorted(key for key in wanted & expiry.keys() if expiry[key] >= 0):
        yield f"{len(going)} payloads expire, which something points to: {going[:3]}"
