"""The gate of an engine's generating thread. It covers pauses with a lease, weight updates, quarantine and sleep."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.rollout.engines.request_types import EngineError, PauseMode, Version, check_named

LEASE_OVER = {
    False: "the lease of the pause has ended: generation continues without a resume",
    True: "the lease of the pause has ended, and no resume named the received weights: they serve nothing",
}
"""Warnings about an expired pause lease. The key is True if the committed weights are still unconfirmed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdatePause:
    """Parameters of a pause for a weight update."""

    mode: PauseMode
    lease_seconds: float
    deadline: float
    """Monotonic time by which the generating thread must have stopped."""


class GenerationGate:
    """Decides when an engine may generate. The generating thread shares it with threads that pause and update the
    engine.

    The gate is closed before the first commit; during a pause, an update and sleep; and in quarantine: from a failed
    update that touched the model until an update succeeds. While it is closed, the generating thread rests between two
    tokens. The engine doesn't generate with committed weights until `confirm`; if the lease of their pause ends first,
    they are quarantined.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Lock that guards all state of the gate."""
        self.changed = threading.Condition(self.lock)
        """Condition on `lock`, notified at every change of the gate."""
        self.mode: PauseMode | None = None
        """Mode of the current pause; None if there is no pause."""
        self.weights: Version | None = None
        """Version of the weights that were committed last; None before the first commit and after `sleep`."""
        self.quarantined = False
        """True if a failed update left the model between two versions, or if nobody confirmed new weights in time."""
        self.unconfirmed = False
        """True from a commit of weights until `confirm`."""
        self.asleep = False
        """True if the engine has freed memory; the gate is closed until `wake`."""
        self._abort_asked = False
        self.pauses = 0
        """Number of pauses so far; also the number of the last pause."""
        self._lease_end = 0.0
        self.at_rest = False
        """True while the generating thread has stopped for the current pause."""
        self._updating = False
        self._touched = False

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> None:
        """Begin a pause, and wait until the generating thread has stopped. The pause ends by itself after
        `lease_seconds`.

        Raises EngineError if the thread has not stopped after `timeout` seconds; the pause is then over.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            number = self._begin_pause(mode, lease_seconds)
            while not self.at_rest:
                if time.monotonic() >= deadline:
                    self._end_pause(number)
                    raise EngineError(f"the engine did not pause within {timeout:g} s (mode {mode})")
                self.changed.wait(deadline - time.monotonic())  # brief: the pause's deadline

    def resume(self, pause: int | None = None) -> None:
        """End the current pause; if `pause` is given, only if the current pause has this number. A quarantine
        continues.

        Raises EngineError: an update is under way, or the weights are unconfirmed.
        """
        with self.changed:
            if pause is not None and pause != self.pauses:
                return
            if self._updating:
                raise EngineError("weights are being received: the pause cannot end now")
            check_named(None, self)
            self.mode = None
            self.changed.notify_all()

    def confirm(self, weights: Version) -> None:
        """Let the engine generate with the committed weights. Raises EngineError if they aren't `weights`, or in
        quarantine."""
        with self.changed:
            check_named(weights, self)
            self.unconfirmed = False
            self.changed.notify_all()

    @contextmanager
    def update(self, weights: Version) -> Iterator[None]:
        """Keep the gate closed inside the context. At its end commit `weights`, unless the block raised.

        Raises EngineError unless the engine rests in a pause or is quarantined.
        """
        with self.changed:
            self._refuse_second_update()
            if not self.quarantined and not (self.mode and self.at_rest):
                raise EngineError("the engine is not paused, or the lease of its pause has ended")
            self._updating, self._touched = True, False
        with self._commit(weights):
            yield

    @contextmanager
    def pause_and_update(self, pause: UpdatePause, weights: Version) -> Iterator[None]:
        """Begin a pause and an update at once, and enter the block before the generating thread has stopped.

        The gate stays closed until the end of the block, even if the lease expires. If the block raises before the
        thread has stopped, the pause ends, too.
        """
        with self.changed:
            self._refuse_second_update()
            self._updating, self._touched = True, False  # before the thread can notice the pause
            number = self._begin_pause(pause.mode, pause.lease_seconds)
        try:
            with self._commit(weights):
                yield
        except BaseException:
            with self.changed:
                if not self.at_rest:
                    self._end_pause(number)
            raise

    @contextmanager
    def _commit(self, weights: Version) -> Iterator[None]:
        committed = False
        try:
            yield
            committed = True
        finally:
            with self.changed:
                self._updating = False
                if committed:
                    self.weights, self.quarantined, self.unconfirmed = weights, False, True
                elif self._touched:
                    self.quarantined = True
                self.changed.notify_all()

    def wait_no_update(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the end of the current update."""
        with self.changed:
            self.changed.wait_for(lambda: not self._updating, timeout)

    def _begin_pause(self, mode: PauseMode, lease_seconds: float) -> int:
        """Begin a pause, which replaces any current pause. Returns the new pause's number."""
        self.pauses += 1
        self.mode = mode
        self._abort_asked = mode == "abort"
        self._lease_end = time.monotonic() + lease_seconds
        self.at_rest = False  # the thread must notice this pause even if it rests already
        self.changed.notify_all()
        return self.pauses

    def _end_pause(self, number: int) -> None:
        """End the pause with this number, unless a newer pause has begun."""
        if self.pauses == number:
            self.mode = None
            self.changed.notify_all()

    def _refuse_second_update(self) -> None:
        if self._updating:
            raise EngineError("another update is under way")

    def serve_loaded(self) -> None:
        """Open the gate for loaded weights that are never updated, as version 0 of term 0."""
        with self.changed:
            self.weights = Version(0, 0)
            self.changed.notify_all()

    def touch(self) -> None:
        """Record that the update has begun to change the model, so that a failure from now on means quarantine. Call it
        inside `update`."""
        self._touched = True

    def quarantine(self) -> None:
        """Put the engine in quarantine: close the gate until weights are committed again."""
        with self.changed:
            self.quarantined = True
            self.changed.notify_all()

    def sleep(self) -> None:
        """End the current pause, and close the gate until `wake`. The gate forgets the weights' version, because their
        memory will be freed.

        Raises EngineError unless the engine rests in a pause.
        """
        with self.changed:
            if self._updating or not (self.mode and self.at_rest):
                raise EngineError("the engine is not paused, or the lease of its pause has ended")
            self.asleep, self.weights, self.unconfirmed, self.mode = True, None, False, None
            self.changed.notify_all()

    def wake(self) -> None:
        """End the engine's sleep. The gate then opens if weights were committed since `sleep`.

        Call it once all memory is allocated again.
        """
        with self.changed:
            self.asleep = False
            self.changed.notify_all()

    def may_run(self) -> bool:
        """Return True if running samples may generate more tokens."""
        return self._serves() and self.mode in (None, "drain")

    def may_admit(self) -> bool:
        """Return True if new samples may start."""
        return self._serves() and self.mode is None

    def take_abort(self) -> bool:
        """Return True if all requests must end because of the current pause. True only once per pause, because later
        requests wait for the pause's end."""
        asked, self._abort_asked = self._abort_asked, False
        return asked

    def rest(self) -> None:
        """Report that the generating thread has stopped, then wait as `wait` does. The caller must hold `changed`."""
        self.at_rest = True
        self.changed.notify_all()
        self.wait()

    def wait(self) -> None:
        """Wait until the gate changes or the pause's lease ends. The caller must hold `changed`."""
        leased = self.mode is not None and not self._updating
        self.changed.wait(max(self._lease_end - time.monotonic(), 0.0) if leased else None)

    def leave_rest(self) -> None:
        """Report that the generating thread continues. The caller must hold `changed`."""
        self.at_rest = False

    def end_lease(self) -> None:
        """End the pause if its lease has expired and no update is under way. The caller must hold `changed`.

        An update has its own deadline.
        """
        if self.mode is not None and not self._updating and time.monotonic() >= self._lease_end:
            self.mode = None
            if self.unconfirmed:
                self.quarantined = True
            logger.warning("%s", LEASE_OVER[self.unconfirmed])

    def _serves(self) -> bool:
        closed = self.quarantined or self.unconfirmed or self._updating or self.asleep
        return self.weights is not None and not closed
