"""Publishing prompts as fast as the admission gate allows."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from relaxd import telemetry
from relaxd.board import Board, BoardUnavailable, GateClosed, NewGroup, Retry, worst_bytes
from relaxd.config import RunConfig
from relaxd.data.dataset import Cursor, Place, RunData
from services.coordinator.fleet.changes import Signal

logger = logging.getLogger(__name__)

BATCH = 16
"""Most groups in one publish."""
IDLE_SECONDS = 0.1
RELIEVE_SECONDS = 2.0
"""How long Redis may be full before surplus groups are dropped, and again between two times."""


def group_id_at(place: Place) -> str:
    """The id of the group at a place of the sequence of prompts; a retry has "~" and its number behind it."""
    epoch, position = place
    return f"{epoch}-{position:06d}"


def place_of(group_id: str) -> Place:
    """The place of a group or of a retry of it."""
    epoch, _, position = group_id.partition("~")[0].partition("-")
    return int(epoch), int(position)


class Publisher:
    """Publishes the prompts of one run."""

    def __init__(
        self,
        board: Board,
        run_id: str,
        term: int,
        config: RunConfig,
        data: RunData,
        *,
        oldest_version: Callable[[], int | None],
        wanted: Callable[[], bool],
        changed: Signal,
    ) -> None:
        """`oldest_version`: on any engine that takes prompts. `wanted`: whether the run takes groups now."""
        self._board = board
        self._run_id = run_id
        self._term = term
        self._config = config
        self._prompts = data.train
        self._expert_bytes = data.expert_bytes
        self._oldest_version = oldest_version
        self._wanted = wanted
        self._changed = changed
        self._full_since: float | None = None
        self.waiting_for = ""
        """What holds the gate shut, as a sentence; empty while it is open or the run has all its groups."""

    async def run_forever(self) -> None:
        """Keep the gate current and publish whatever it lets through."""
        reachable = True
        while True:
            published = 0
            try:
                published = await asyncio.to_thread(self._publish, self._oldest_version(), self._wanted())
                reachable = True
            except BoardUnavailable as error:
                if reachable:
                    logger.warning("can't publish, trying again: %s", error)
                reachable = False
                self.waiting_for = f"publishing waits: {error}"
            if not published:
                await self._changed.wait(IDLE_SECONDS if reachable else 1.0)

    def _publish(self, oldest_version: int | None, wanted: bool) -> int:
        """Set the gate and publish one batch through it; returns how many groups that were."""
        self._board.set_gate(term=self._term, oldest_version=oldest_version, open=wanted)
        if not wanted or oldest_version is None:
            self.waiting_for = ""
            return 0
        admission = self._board.admission(self._worst_bytes(self._config.data.max_prompt_tokens))
        self._tell(admission.room, admission.limit, admission.detail)
        room = min(BATCH, admission.room)
        if room <= 0:
            return 0
        retries = self._board.retries()[:room]
        cursor = Cursor.from_json(self._board.cursor())
        with ExitStack() as spans:
            groups = [self._retry(spans, retry) for retry in retries]
            for _ in range(room - len(retries)):
                groups.append(self._group(spans, cursor))
                cursor = self._prompts.after(cursor)
            try:
                self._board.publish(term=self._term, groups=groups, cursor=cursor.to_json())
            except GateClosed as error:  # something was published or used memory since then
                self._tell(0, error.limit, error.detail)
                return 0
        return len(groups)

    def _tell(self, room: int, limit: str, detail: str) -> None:
        """Say what holds the gate shut, and make room in a Redis that stays full."""
        shut = room <= 0 and limit not in ("closed", "complete")
        waiting_for = f"publishing waits: {detail}" if shut else ""
        if waiting_for and limit in ("memory", "full") and not self.waiting_for:
            logger.info("run %s: %s", self._run_id, waiting_for)
        self.waiting_for = waiting_for
        if limit != "full":
            self._full_since = None
            return
        now = time.monotonic()
        self._full_since = now if self._full_since is None else self._full_since
        if now - self._full_since > RELIEVE_SECONDS:
            self._full_since = now
            if dropped := self._board.relieve(term=self._term):
                logger.warning("Redis is full: %d surplus groups are dropped, to be tried again later", dropped)

    def _group(self, spans: ExitStack, cursor: Cursor) -> NewGroup:
        """The prompt at a cursor, as a group."""
        prompt = self._prompts.at(cursor)
        group_id = group_id_at(cursor.place)
        return NewGroup(
            group_id=group_id,
            columns={"prompt_tokens": prompt.tokens, "prompt": prompt.to_json()},
            trace=self._trace(spans, group_id),
            worst_bytes=self._worst_bytes(len(prompt.tokens)),
        )

    def _retry(self, spans: ExitStack, retry: Retry) -> NewGroup:
        """Another try of a prompt that is on the board."""
        group_id = f"{retry.group_id.partition('~')[0]}~{retry.retries + 1}"
        return NewGroup(
            group_id=group_id,
            trace=self._trace(spans, group_id),
            worst_bytes=self._worst_bytes(self._config.data.max_prompt_tokens),
            retry_of=retry.group_id,
        )

    def _trace(self, spans: ExitStack, group_id: str) -> dict[str, str]:
        ratio = self._config.telemetry.sample_ratio
        return spans.enter_context(telemetry.publish_span(group_id, ratio, {"relaxd.run_id": self._run_id}))

    def _worst_bytes(self, prompt_tokens: int) -> int:
        return worst_bytes(self._config, prompt_tokens, expert_bytes=self._expert_bytes)
