"""Asks the judge for rewards: limits questions, repeats those that don't reach it, waits while it is away."""

import asyncio
import time
from typing import Protocol

from relaxd import telemetry
from relaxd.config import JudgeConfig
from relaxd.rewards.judge.asking import JudgeError
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.waiting import waiting
from services.reward.judge.pace import Pace
from services.reward.remote.errors import MismatchError, UnreachableError
from services.reward.remote.patience import PatientCaller

LOOK_SECONDS = 5.0
"""Interval at which a question that waits for its turn looks again. Shorter than any health limit: each look counts as
progress of the replica."""


class Judges(Protocol):
    """Where the judge is."""

    who: str
    """The judge, for people."""
    on: str
    """Its address, or the role of its replicas."""

    async def probe(self) -> None:
        """Ask whether it is there. Raises UnreachableError, MismatchError."""

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        """Ask it within `seconds`. Raises JudgeError, UnreachableError."""

    async def close(self) -> None:
        """Close its connections."""


class JudgeClient:
    """Asks the run's judge. Lives in one event loop."""

    def __init__(self, config: JudgeConfig, judges: Judges) -> None:
        self._config = config
        self._judges = judges
        self._caller = PatientCaller(
            judges.who,
            judges.on,
            judges.probe,
            max_in_flight=config.max_in_flight,
            timeout_seconds=config.timeout_seconds,
            outage_seconds=config.outage_seconds,
        )
        self._pace = Pace(config.questions_per_second)
        self._turn = asyncio.Lock()
        """Of the question that begins next."""
        self._replies = self._looks = 0

    @property
    def pieces(self) -> int:
        """A counter of replies, probes and looks, which shows that the replica isn't stuck."""
        return self._replies + self._caller.probes + self._looks

    @property
    def detail(self) -> str:
        """What takes long, in one sentence; empty if nothing does."""
        return self._caller.detail

    async def start(self) -> None:
        """Begin with a judge that may be away for now. Raises MismatchError: it can't be asked."""
        await self._caller.start()

    def forgive(self) -> None:
        """Count roles.judge.outage_seconds of a judge that is away from now on."""
        self._caller.forgive()

    async def ask(self, question: AskRequest) -> AskResponse:
        """Return the judge's reply. Raises JudgeError. Cancelling this ends the call."""
        outcome = "failed"
        begun = time.monotonic()
        try:
            reply = await self._caller.call(lambda: self._ask_in_turn(question))
            outcome = "answered"
            return reply
        except (UnreachableError, MismatchError) as error:
            raise JudgeError(str(error)) from error
        finally:
            self._replies += 1
            telemetry.record("judge.replies", 1, {"relaxd.outcome": outcome})
            telemetry.record("judge.seconds", time.monotonic() - begun)

    async def close(self) -> None:
        """End its calls."""
        self._caller.close()
        await self._judges.close()

    async def _ask_in_turn(self, question: AskRequest) -> AskResponse:
        """Ask, not before roles.judge.questions_per_second and the judge's Retry-After allow it."""
        if self._turn.locked() or self._pace.pause():
            with waiting("a question's turn (roles.judge.questions_per_second)") as wait:
                async with self._turn:
                    while pause := self._pace.pause():
                        if self._pace.held:
                            wait.reason, wait.on = f"{self._judges.who}, which answered Retry-After", self._judges.on
                        await asyncio.sleep(min(pause, LOOK_SECONDS))
                        self._looks += 1
                    self._pace.begin()
        else:
            self._pace.begin()
        try:
            return await self._judges.ask(question, self._config.timeout_seconds)
        except UnreachableError as error:
            self._pace.hold(min(error.retry_after, self._config.outage_seconds))
            raise
