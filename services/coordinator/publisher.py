"""Publishing prompts as fast as the admission gate allows."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack

from relaxd import telemetry
from relaxd.board import Board, BoardUnavailable, GateClosed, NewGroup, Retry
from relaxd.config import RunConfig
from relaxd.data.dataset import Cursor, Place, PromptDataset
from services.coordinator.changes import Signal

logger = logging.getLogger(__name__)

BATCH = 16
"""Most groups in one publish."""
IDLE_SECONDS = 0.1
TOKEN_BYTES = 32
"""A token's share of all columns (tokens, loss_mask, rollout_logprobs, versions, advantages), and of its text."""
GROUP_BYTES = 4096
"""What a group needs besides its tokens."""


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
        epoch: int,
        config: RunConfig,
        prompts: PromptDataset,
        *,
        oldest_version: Callable[[], int | None],
        wanted: Callable[[], bool],
        changed: Signal,
    ) -> None:
        """`oldest_version`: on any engine that takes prompts. `wanted`: whether the run takes groups now."""
        self._board = board
        self._run_id = run_id
        self._epoch = epoch
        self._config = config
        self._prompts = prompts
        self._oldest_version = oldest_version
        self._wanted = wanted
        self._changed = changed

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
            if not published:
                await self._changed.wait(IDLE_SECONDS if reachable else 1.0)

    def _publish(self, oldest_version: int | None, wanted: bool) -> int:
        """Set the gate and publish one batch through it; returns how many groups that were."""
        self._board.set_gate(epoch=self._epoch, oldest_version=oldest_version, open=wanted)
        if not wanted or oldest_version is None:
            return 0
        room = min(BATCH, self._board.room())
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
                self._board.publish(epoch=self._epoch, groups=groups, cursor=cursor.to_json())
            except GateClosed as error:  # something was published or used memory since `room` was asked for
                logger.debug("%s", error)
                return 0
        return len(groups)

    def _group(self, spans: ExitStack, cursor: Cursor) -> NewGroup:
        """The prompt at a cursor, as a group."""
        prompt = self._prompts.at(cursor)
        group_id = group_id_at(cursor.place)
        return NewGroup(
            group_id=group_id,
            columns={"prompt_tokens": prompt.tokens, "prompt": prompt.to_json()},
            trace=self._trace(spans, group_id),
            expected_bytes=self._expected_bytes(len(prompt.tokens)),
        )

    def _retry(self, spans: ExitStack, retry: Retry) -> NewGroup:
        """Another try of a prompt that is on the board."""
        group_id = f"{retry.group_id.partition('~')[0]}~{retry.retries + 1}"
        return NewGroup(
            group_id=group_id,
            trace=self._trace(spans, group_id),
            expected_bytes=self._expected_bytes(self._config.data.max_prompt_tokens),
            retry_of=retry.group_id,
        )

    def _trace(self, spans: ExitStack, group_id: str) -> dict[str, str]:
        ratio = self._config.telemetry.sample_ratio
        return spans.enter_context(telemetry.publish_span(group_id, ratio, {"relaxd.run_id": self._run_id}))

    def _expected_bytes(self, prompt_tokens: int) -> int:
        rollout = self._config.rollout
        return GROUP_BYTES + TOKEN_BYTES * (prompt_tokens + rollout.samples_per_prompt * rollout.max_new_tokens)
