"""Keeps unfinished answers on the board, for the replica that takes their group after this one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from relaxd import telemetry
from relaxd.board import Board, BoardError, Delivery
from relaxd.config import RunConfig
from relaxd.process.child import ChildError
from services.rollout.service.answers import Answers

logger = logging.getLogger(__name__)


class KeptAnswers:
    """The answers of one delivery of a group, and what the board has of them.

    Without rollout.partial.enabled nothing is kept, and answers that are cut off begin anew.
    """

    def __init__(
        self, config: RunConfig, board: Board, delivery: Delivery, hold: Callable[[str], Delivery | None]
    ) -> None:
        """`hold` returns the newest hold of a group."""
        self.answers = Answers(config.rollout.samples_per_prompt)
        partial = config.rollout.partial
        self._partial = partial
        self._max_staleness = config.board.max_staleness if partial.max_staleness is None else partial.max_staleness
        self._board = board
        self._delivery = delivery
        self._hold = hold
        self._pointers: str | None = ""
        """Of the parts on the board; None once somebody else changed them."""
        self._saved_tokens = 0
        """Tokens that this delivery has saved."""
        self._lock = asyncio.Lock()

    async def load(self) -> None:
        """Take over the answers that earlier holders of the group have kept."""
        if not self._partial.enabled:
            return
        saved = await asyncio.to_thread(self._board.saved, self._delivery)
        self._pointers = saved.pointers
        if saved.pointers and not saved.parts:
            await self._forget()
        self.answers.take_saved(saved.parts)
        self._count(self.answers.tokens, "continued")

    async def go_on(self, version: int) -> int:
        """Prepare the answers for an engine that continues them under this version.

        Forgets them if they may not be continued. Returns the oldest version that tokens of the group will have.
        """
        self.answers.go_on(version, mask_off_policy=self._partial.mask_off_policy)
        oldest = self.answers.oldest_version()
        if oldest is not None and not self._partial.enabled:
            self.answers, oldest = Answers(len(self.answers)), None
        elif oldest is not None and version - oldest > self._max_staleness:
            logger.info(
                "group %s is generated again: its %d tokens are up to %d versions old, and at most %d may be continued",
                *(self._delivery.group_id, self.answers.tokens, version - oldest, self._max_staleness),
            )
            self._count(self.answers.tokens, "discarded")
            await self._forget()
            oldest = None
        return version if oldest is None else min(oldest, version)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Save the answers regularly inside the block, and once more if it ends because they are cut off."""
        if not self._partial.enabled:
            yield
            return
        regularly = asyncio.create_task(self._save_regularly(), name="save unfinished answers")
        try:
            yield
        except (asyncio.CancelledError, ChildError):  # the group is handed back, or the engine is gone
            await asyncio.shield(self._save())
            raise
        finally:
            regularly.cancel()

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._partial.save_seconds)  # idle: saves the answers again
            if self.answers.unsaved_tokens >= self._partial.save_tokens:
                await asyncio.shield(self._save())

    async def _save(self) -> None:
        """Save what isn't on the board, unless this delivery doesn't hold the group any more."""
        async with self._lock:
            hold = self._hold(self._delivery.group_id)
            if hold is None or self._pointers is None:
                return
            answers = self.answers  # meanwhile they may be begun anew
            columns, tokens, mark = answers.unsaved()
            if not columns["finish"]:
                return
            forgiven = self._saved_tokens + tokens >= self._partial.save_tokens
            try:
                self._pointers = await asyncio.to_thread(
                    self._board.save, hold, columns, after=self._pointers, forgiven=forgiven
                )
            except BoardError as error:
                logger.warning("%d tokens of group %s could not be kept: %s", tokens, hold.group_id, error)
                return
            if self._pointers is not None:
                answers.mark_saved(mark)
                self._saved_tokens += tokens
                self._count(tokens, "saved")

    async def _forget(self) -> None:
        """Begin the answers anew."""
        async with self._lock:
            self.answers = Answers(len(self.answers))
            hold = self._hold(self._delivery.group_id)
            if self._pointers and hold is not None:
                forgotten = await asyncio.to_thread(self._board.forget_saved, hold, self._pointers)
                self._pointers = "" if forgotten else None

    def _count(self, tokens: int, outcome: str) -> None:
        if tokens:
            labels = {"relaxd.run_id": self._board.run_id, "relaxd.outcome": outcome}
            telemetry.record("partial.tokens", tokens, labels)
