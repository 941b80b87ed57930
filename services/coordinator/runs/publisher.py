"""The publisher of prompts, limited by the admission gate."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from opentelemetry.util.types import AttributeValue

from relaxd import telemetry
from relaxd.board import (
    MEDIA_CONTENTS,
    PROMPT_MEDIA,
    TEACHER_PROMPT_TOKENS,
    BoardUnavailable,
    Column,
    Fenced,
    GateClosed,
    NewGroup,
    PromptRetry,
    RunMissing,
    worst_bytes,
)
from relaxd.board.sizes import media_bytes
from relaxd.board.types import JSON, TooLate
from relaxd.data.curriculum.own_sampler import SETTING as SAMPLER
from relaxd.data.curriculum.run_curriculum import Visited, Visits
from relaxd.data.dataset import Cursor, Place, RunData
from relaxd.media.prompt_media import MediaRecord, names_of
from relaxd.models import DataError
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.state.retries import MediaHostRetry

logger = logging.getLogger(__name__)

BATCH = 16
"""Maximum number of groups that are published at once."""
IDLE_SECONDS = 0.1
SOURCE_LETTERS = 100
RELIEVE_SECONDS = 2.0
"""Seconds for which Redis must be full before surplus groups are dropped; also the minimum between two such drops."""


def group_id_at(place: Place) -> str:
    """Return the id of the group at a place in the prompt sequence; a retry appends "~" and its number."""
    epoch, position = place
    return f"{epoch}-{position:06d}"


def place_of(group_id: str) -> Place:
    """Return the place in the prompt sequence of a group id; a retry has its first attempt's place."""
    epoch, _, position = group_id.partition("~")[0].partition("-")
    return int(epoch), int(position)


def _facts(visit: Visited) -> dict[str, JSON]:
    """Return a prompt's index, number of tokens, visit's reason and source, for the record of its group's outcome."""
    source = visit.prompt.metadata.get("data_source")
    facts: dict[str, JSON] = {"index": visit.prompt.index, "prompt_tokens": len(visit.prompt.tokens)}
    if visit.why:
        facts["visit"] = visit.why
    return facts if source is None else facts | {"source": str(source)[:SOURCE_LETTERS]}


class PromptsFailed(Exception):
    """The next prompts can never be published; the message has the reason."""


class Publisher:
    """Publishes the prompts of one run."""

    def __init__(
        self,
        context: RunContext,
        data: RunData,
        visits: Visits,
        *,
        oldest_version: Callable[[], int | None],
        wanted: Callable[[], bool],
    ) -> None:
        """`visits` chooses the prompts. `oldest_version` returns the oldest version among the engines that take
        prompts. `wanted` returns True while the run takes groups."""
        self._context = context
        self._prompts = data.train
        self._visits = visits
        self._expert_bytes = data.expert_bytes
        self._oldest_version = oldest_version
        self._wanted = wanted
        self._full_since: float | None = None
        self._media_hosts = MediaHostRetry(f"run {context.run_id}", context.config.data)
        self._largest_media: int | None = None
        """Bytes of the largest media of any prompt so far; None before the first prompt."""
        self.gate = ("", "")
        """Why the admission gate is shut: a word (Admission.limit or "sampler") and a sentence. Both are empty while
        the gate is open or the run has all its groups."""
        self.redis = ""
        """Reason why Redis doesn't answer; empty while it does."""
        self.failure: PromptsFailed | None = None
        """Reason why the run can't continue; None while it can."""

    async def run_forever(self) -> None:
        """Publish groups whenever the admission gate is open. Runs until cancelled."""
        reachable = True
        while True:
            published = 0
            try:
                published = await self._publish(self._oldest_version(), self._wanted())
                reachable, self.redis = True, ""
            except (BoardUnavailable, TooLate) as error:
                if reachable:
                    logger.warning("can't publish, retrying: %s", error)
                reachable = False
                self.redis = str(error)
            except DataError as error:  # of the user's sampler
                if reachable:
                    logger.error("can't publish: %s", error)
                reachable = False
                self.gate = ("sampler", str(error))
            except PromptsFailed as error:
                self.failure = error
                self._context.registry.changed.fire()
                await asyncio.Event().wait()  # idle: the run fails with `failure`
            if not published:
                pause = IDLE_SECONDS if reachable else 1.0
                await self._context.registry.changed.wait(pause)  # idle: `gate` and `redis` say why

    async def _publish(self, oldest_version: int | None, wanted: bool) -> int:
        """Tell the board the gate's state and publish at most BATCH groups; returns the number of groups."""
        board = self._context.board
        await board.set_gate(term=self._context.term, oldest_version=oldest_version, open=wanted)
        if not wanted or oldest_version is None:
            self.gate = ("", "")
            return 0
        most = self._most_bytes()
        admission = await board.admission(most)
        await self._report_gate(admission.room, admission.limit, admission.detail)
        room = min(BATCH, admission.room)
        if room <= 0:
            return 0
        start: Cursor | None = None
        with ExitStack() as spans:
            try:
                retries = (await board.retries())[:room]
                start = Cursor.from_json(await board.cursor())
                groups = [self._retry_group(spans, retry) for retry in retries]
                # In a thread: prompts may be on the disk, and are tokenised.
                visits = await self._media_hosts.in_thread(self._next_visits, start, room - len(retries))
                if not self._wanted():
                    return 0
                groups += [self._new_group(spans, visit) for visit in visits]
                if self._most_bytes() > most:  # media larger than all before: the gate is asked again
                    return 0
                cursor = self._prompts.after(visits[-1].cursor) if visits else start
                await board.publish(term=self._context.term, groups=groups, cursor=cursor.to_json())
            except GateClosed as error:  # another writer used the room since `admission`
                await self._report_gate(0, error.limit, error.detail)
                return 0
            except (BoardUnavailable, TooLate, Fenced, RunMissing):
                raise
            except DataError as error:
                if error.field == SAMPLER:  # the sampler's file is read again once it is repaired
                    raise
                raise PromptsFailed(str(error)) from error  # rows of large files aren't all checked before
            except Exception as error:  # an unforeseen error ends this run, not the coordinator
                where = "" if start is None else f" from place {start.place} on"
                logger.exception("the prompts%s can't be published", where)
                problem = f"{type(error).__name__}: {error}"
                raise PromptsFailed(f"the prompts{where} can't be published: {problem}") from error
        return len(groups)

    def _next_visits(self, cursor: Cursor, number: int) -> list[Visited]:
        """Return the next `number` prompts from the cursor on; none if the run takes no groups now."""
        if not self._wanted():  # a pause, or the run's end, while media are awaited
            return []
        visits = []
        self._prompts.look_ahead(cursor, number + BATCH)
        for _ in range(number):
            visits.append(self._visits.next(cursor))
            cursor = self._prompts.after(visits[-1].cursor)
        return visits

    async def _report_gate(self, room: int, limit: str, detail: str) -> None:
        """Record in `gate` why publishing waits. If Redis stays full for RELIEVE_SECONDS, drop surplus groups."""
        closed = room <= 0 and limit not in ("closed", "complete")
        if closed and limit in ("memory", "full") and limit != self.gate[0]:
            logger.info("run %s: publishing waits: %s", self._context.run_id, detail)
        self.gate = (limit, detail) if closed else ("", "")
        if limit != "full":
            self._full_since = None
            return
        now = time.monotonic()
        self._full_since = now if self._full_since is None else self._full_since
        if now - self._full_since > RELIEVE_SECONDS:
            self._full_since = now
            if dropped := await self._context.board.relieve(term=self._context.term):
                logger.warning("Redis is full: dropped %d surplus groups, which are retried later", dropped)

    def _new_group(self, spans: ExitStack, visit: Visited) -> NewGroup:
        """Return a new group for a chosen prompt."""
        prompt, group_id = visit.prompt, group_id_at(visit.cursor.place)
        columns: dict[str, Column] = {"prompt_tokens": prompt.tokens, "prompt": prompt.to_json()}
        tokens, media = len(prompt.tokens), len(prompt.media.contents)
        self._largest_media = max(self._largest_media or 0, media)
        if prompt.teacher_tokens is not None:
            columns[TEACHER_PROMPT_TOKENS] = prompt.teacher_tokens
            tokens += len(prompt.teacher_tokens)
        if self._context.config.has_media:
            columns[PROMPT_MEDIA] = list(prompt.media.records)
            columns[MEDIA_CONTENTS] = prompt.media.array
        return NewGroup(
            group_id=group_id,
            columns=columns,
            trace=self._trace(spans, group_id, prompt.media.records),
            worst_bytes=self._worst_bytes(tokens) + media,
            facts=_facts(visit),
        )

    def _retry_group(self, spans: ExitStack, retry: PromptRetry) -> NewGroup:
        """Return a group that retries a prompt already on the board."""
        group_id = f"{retry.group_id.partition('~')[0]}~{retry.retries + 1}"
        return NewGroup(
            group_id=group_id,
            trace=self._trace(spans, group_id),
            worst_bytes=self._most_bytes(),
            retry_of=retry.group_id,
        )

    def _trace(self, spans: ExitStack, group_id: str, media: Sequence[MediaRecord] = ()) -> dict[str, str]:
        ratio = self._context.config.telemetry.sample_ratio
        attributes: dict[str, AttributeValue] = {"relaxd.run_id": self._context.run_id}
        if media:
            attributes["relaxd.media"] = names_of(media)
        return spans.enter_context(
            telemetry.create_span(group_id, self._context.board.stages[0].name, ratio, attributes)
        )

    def _most_bytes(self) -> int:
        """Return the maximum bytes that a group may need. Its media count with the largest size so far; at first, with
        the maximum that the prompt token limit allows.

        The board could refuse a larger group although `admission` allowed it.
        """
        config, media = self._context.config, self._largest_media
        if media is None:
            media = media_bytes(config, config.data.max_prompt_tokens)
        return self._worst_bytes(config.published_prompt_tokens) + media

    def _worst_bytes(self, prompt_tokens: int) -> int:
        return worst_bytes(self._context.config, prompt_tokens, expert_bytes=self._expert_bytes)
