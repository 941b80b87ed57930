"""One fault after the other: do it, wait until training goes on and everything is whole, audit the books."""

import random
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from relaxd.client.coordinator_client import ENDED
from relaxd.config import RunConfig
from relaxd.redis_client import key_prefix
from tests.chaos.books import Books
from tests.chaos.environment import BUSY, MOODS
from tests.chaos.faults import PASSING, Fault, MomentMissed
from tests.chaos.media import audit_media
from tests.chaos.models import audit_models
from tests.chaos.planes.payloads import Payloads
from tests.chaos.program import MOODS as PROGRAM_MOODS
from tests.chaos.stack import MAX_STALENESS, RUN, ChaosStack
from tests.chaos.teacher_engine import WRONG_ANSWERS

GROUPS_PER_STEP = 4
RECOVERY_SECONDS = 120.0
"""On a quiet machine. Deadline for training to go on, and for everything to be whole."""
TICK_SECONDS = 0.05
RECENT_STEPS = 100
"""More than are committed between two looks."""
MAX_VIOLATED = 3
"""So many faults in a row with a violation end the campaign: it would only go on failing."""


@dataclass
class Outcome:
    """What a fault did."""

    fault: str
    begun: float
    """Unix time."""
    recovery: float | None = None
    """Seconds until the first step was committed that began after the fault, and whose update was done."""
    whole: float | None = None
    """Seconds until every service worked again and every engine had weights."""
    stalled: float | None = None
    """Seconds without progress: the longest time between two committed steps, from the fault to the recovery."""
    recomputed: int = 0
    """Deliveries of groups beyond the first."""
    missed: bool = False
    """The moment that it was meant for did not come: nothing was done."""
    violations: list[str] = field(default_factory=list)


@dataclass
class Campaign:
    """Faults against one stack."""

    stack: ChaosStack
    rng: random.Random
    logs: Path
    """Where the logs go when something is violated."""
    pause_seconds: float = 0.0
    """Between a recovery and the next fault."""
    deadline_seconds: float = RECOVERY_SECONDS
    say: Callable[[str], None] = print
    total: str = ""
    """How many there will be, for people, such as " of 200"."""
    outcomes: list[Outcome] = field(default_factory=list)
    generated_tokens: int = 0
    """Tokens that the engines have generated in conversations, as far as they have told; set at the end."""

    def __post_init__(self) -> None:
        moods = (*MOODS.values(), BUSY)
        deliberate = {
            "teacher-engine": WRONG_ANSWERS,
            "agent": moods,
            "shown-media": moods,
            "program": tuple(PROGRAM_MOODS.values()),
        }.get(self.stack.algorithm, ())
        nodes = self.stack.data_nodes.clients if self.stack.data_nodes else ()
        self.payloads = None if self.stack.columns == "small" else Payloads(self.stack.redis, RUN, nodes=nodes)
        self.books = Books(self.stack.redis, RUN, self.stack.run_folder, MAX_STALENESS, GROUPS_PER_STEP, deliberate)
        self.books.replicas = 1 if self.stack.primaries else 0

    def begin(self) -> None:
        """Wait until the run trains. Raises TimeoutError."""
        began = time.time()
        if (problem := self._until_whole(began)) or not self._until_step_after(began):
            raise TimeoutError(f"the run did not begin to train: {problem or 'no step'}")
        self.books.audit()

    def run(self, faults: Iterator[Fault]) -> None:
        """Do them all."""
        for fault in faults:
            outcome = self._do(fault)
            self.outcomes.append(outcome)
            self._tell(outcome)
            if outcome.violations:
                self._keep_logs(outcome)
            if all(past.violations for past in self.outcomes[-MAX_VIOLATED:]) and len(self.outcomes) >= MAX_VIOLATED:
                self.say(f"{MAX_VIOLATED} violated faults in a row: giving up")
                return
            time.sleep(self.pause_seconds)

    def end(self) -> list[str]:
        """End the run; returns what is wrong then. A critic service dies while its last checkpoint is awaited."""
        self._missing(time.time())
        self.generated_tokens = self.stack.progress.total if "agent" in self.stack.replicas else 0
        critics = self.stack.names("critic")
        with self.stack.frozen([process for name in critics for process in self.stack.tree(name)]):
            self.stack.coordinator.stop_run(RUN, "the faults are over")
            self._until_critic_is_asked(critics)
            for name in critics:
                self.stack.process(name).kill()
        deadline = time.monotonic() + self.deadline_seconds
        while self.stack.coordinator.run(RUN).state not in ENDED:
            if time.monotonic() > deadline:
                return [f"the run did not end within {self.deadline_seconds:g} s"]
            time.sleep(TICK_SECONDS)
        wrong = self.books.audit(ended=True)
        if open_groups := self.stack.redis.scard(f"{key_prefix(RUN)}open"):
            wrong.append(f"{open_groups} groups are open after the run's end")
        folders = [self.stack.run_folder, *([self.stack.run_folder / "critic"] if critics else [])]
        for folder in folders:
            if not (path := folder / "checkpoints" / f"step-{len(self.books.steps):06d}").is_dir():
                wrong.append(f"the run has ended without {path}")
        if self.payloads:
            wrong += self.payloads.end()
        wrong += audit_models(self.stack.run_folder)
        config = RunConfig.model_validate_json((self.stack.run_folder / "config.json").read_text())
        if config.has_media:
            wrong += audit_media(self.stack.run_folder, Path(config.model.path), config.data)
        log = self.stack.state.log("trainer").read_text(errors="replace")
        wrong += [f"the trainer says: {line}" for line in re.findall(r"replayed step \d+: .*", log)]
        supervisor = self.stack.state.log("supervisor").read_text(errors="replace")
        if "not restarting it" in supervisor:
            wrong.append("the supervisor gave a service up")
        return wrong

    def _until_critic_is_asked(self, critics: list[str]) -> None:
        """Wait until the trainer has asked the critic for the checkpoint of the last step, or the run has ended."""
        deadline = time.monotonic() + self.deadline_seconds
        while critics and time.monotonic() < deadline and self.stack.coordinator.run(RUN).state not in ENDED:
            asked, last = self.stack.redis.hmget(f"{key_prefix(RUN)}state", "critic_checkpoint", "last_step")
            if asked == last:
                return
            time.sleep(TICK_SECONDS)

    def _do(self, fault: Fault) -> Outcome:
        outcome = Outcome(fault.name, time.time())
        before = self.books.recomputed
        self.say(f"fault {len(self.outcomes) + 1}{self.total}: {fault.name}")
        try:
            over = fault.act(self.stack, self.rng)
        except (MomentMissed, *PASSING) as error:
            outcome.missed = True
            self.say(f"    missed: {type(error).__name__}: {error}")
            over = time.time()
        if not self._until_step_after(over):
            outcome.violations.append(
                f"no step within {self.deadline_seconds:g} s; step {len(self.books.steps)}, {self._missing(over)}"
            )
        else:
            first = next(step for step in self.books.steps if step.updated_since(over))
            outcome.recovery = first.committed - over
            outcome.stalled = self._stalled(outcome.begun, first.number)
        if problem := self._until_whole(over):
            outcome.violations.append(f"not whole after {self.deadline_seconds:g} s: {problem}")
        else:
            outcome.whole = time.time() - over
        outcome.violations += self.books.audit()
        outcome.violations += self.stack.harm_of_tricks()
        if self.payloads:
            outcome.violations += self.payloads.audit()
        outcome.recomputed = self.books.recomputed - before
        return outcome

    def _stalled(self, begun: float, last: int) -> float:
        """Return the longest time between two steps, of which the second was committed after `begun`, up to `last`."""
        times = [step.committed for step in self.books.steps[:last]]
        pauses = [after - before for before, after in pairwise(times) if after > begun]
        return max(pauses, default=times[-1] - begun)

    def _until_step_after(self, begun: float) -> bool:
        """Wait for a committed step that began after a time, and whose update was done."""
        deadline = time.monotonic() + self.deadline_seconds
        while time.monotonic() < deadline:
            try:
                self.books.poll()
            except PASSING:
                time.sleep(TICK_SECONDS)
                continue
            if any(step.updated_since(begun) for step in self.books.steps[-RECENT_STEPS:]):
                return True
            time.sleep(TICK_SECONDS)
        return False

    def _until_whole(self, since: float) -> str:
        """Wait until everything is, as seen after a time; returns what is missing at the deadline."""
        deadline = time.monotonic() + self.deadline_seconds
        while problem := self._missing(since):
            if time.monotonic() > deadline:
                return problem
            time.sleep(2 * TICK_SECONDS)
        return ""

    def _missing(self, since: float) -> str:
        try:
            return self.stack.missing(since)
        except PASSING as error:
            return f"{type(error).__name__}: {error}"

    def _tell(self, outcome: Outcome) -> None:
        seconds = " ".join(
            f"{what} {value:.1f} s" if value is not None else f"{what} never"
            for what, value in (
                ("without progress for", outcome.stalled),
                ("trains after", outcome.recovery),
                ("whole after", outcome.whole),
            )
        )
        self.say(f"    {seconds}, recomputed {outcome.recomputed}, step {len(self.books.steps)}")
        for violation in outcome.violations:
            self.say(f"    VIOLATION: {violation}")

    def _keep_logs(self, outcome: Outcome) -> None:
        target = self.logs / f"{len(self.outcomes):04d}-{outcome.fault.replace(' ', '-').replace(':', '')}"
        shutil.copytree(self.stack.state.logs, target, dirs_exist_ok=True)
        (target / "violations.txt").write_text("\n".join(outcome.violations) + "\n")
        self.say(f"    logs: {target}")


def rows(outcomes: list[Outcome]) -> list[dict[str, object]]:
    """The table: a row for each kind of fault, in seconds."""
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_fault[outcome.fault].append(outcome)
    return [_row(name, found) for name, found in sorted(by_fault.items())] + [_row("all", outcomes)]


def _row(name: str, outcomes: list[Outcome]) -> dict[str, object]:
    row: dict[str, object] = {"fault": name, "count": sum(not outcome.missed for outcome in outcomes)}
    for what in ("stalled", "recovery", "whole"):
        seconds = [value for outcome in outcomes if (value := getattr(outcome, what)) is not None]
        row[f"{what} p50"] = median(seconds) if seconds else float("nan")
        row[f"{what} max"] = max(seconds, default=float("nan"))
    row["recomputed"] = sum(outcome.recomputed for outcome in outcomes)
    row["violations"] = sum(len(outcome.violations) for outcome in outcomes)
    return row
