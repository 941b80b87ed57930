"""Whether an engine may generate: pauses with a lease, weight updates, quarantine."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.rollout.engines.base import EngineError, PauseMode, Version

logger = logging.getLogger(__name__)


class Gate:
    """Shared by the thread that generates and the threads that pause it and change its weights.

    The generating thread comes to rest between two tokens. Closed before the first committed weights, during a pause
    and an update, and after an update that broke when it had touched the model (quarantine), until one succeeds.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held to read or change anything here; notified at every change."""
        self.mode: PauseMode | None = None
        """How the engine is paused; None while it is not."""
        self.weights: Version | None = None
        """What was committed last."""
        self.quarantined = False
        """Whether the model is neither the old nor the new version."""
        self.asleep = False
        """Whether the engine has given memory back: closed until `wake`."""
        self._abort_asked = False
        self._lease_end = 0.0
        self._at_rest = False
        self._updating = False
        self._touched = False

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> None:
        """Close the gate and wait until the generating thread rests. The pause ends by itself after `lease_seconds`.

        Raises EngineError, and opens the gate again, when that takes longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            self.mode = mode
            self._abort_asked = mode == "abort"
            self._lease_end = time.monotonic() + lease_seconds
            self._at_rest = False  # it has to see this pause, also when it rests already
            self.changed.notify_all()
            while not self._at_rest:
                if time.monotonic() >= deadline:
                    self.mode = None
                    self.changed.notify_all()
                    raise EngineError(f"the engine did not come to rest within {timeout:g} s (mode {mode})")
                self.changed.wait(deadline - time.monotonic())

    def resume(self) -> None:
        """End the pause. Raises EngineError during an update; a quarantined engine stays quarantined."""
        with self.changed:
            if self._updating:
                raise EngineError("weights are being received: the pause cannot end now")
            self.mode = None
            self.changed.notify_all()

    @contextmanager
    def update(self, weights: Version) -> Iterator[None]:
        """Hold the gate closed; leaving the block well commits `weights`, leaving it by an exception does not.

        Raises EngineError unless the engine rests in a pause or a quarantine.
        """
        with self.changed:
            if self._updating:
                raise EngineError("another update is under way")
            if not self.quarantined and not (self.mode and self._at_rest):
                raise EngineError("the engine is not paused, or the lease of its pause has ended")
            self._updating, self._touched = True, False
        committed = False
        try:
            yield
            committed = True
        finally:
            with self.changed:
                self._updating = False
                if committed:
                    self.weights, self.quarantined = weights, False
                elif self._touched:
                    self.quarantined = True
                self.changed.notify_all()

    def touch(self) -> None:
        """Inside `update`: the model is about to change, so a failure from here on means quarantine."""
        self._touched = True

    def quarantine(self) -> None:
        """What was committed last turned out not to be what it should: serve nothing until other weights come."""
        with self.changed:
            self.quarantined = True
            self.changed.notify_all()

    def sleep(self) -> None:
        """From a pause: close the gate until `wake`. What was committed is forgotten, as its memory is given back.

        Raises EngineError unless the engine rests in a pause.
        """
        with self.changed:
            if self._updating or not (self.mode and self._at_rest):
                raise EngineError("the engine is not paused, or the lease of its pause has ended")
            self.asleep, self.weights, self.mode = True, None, None
            self.changed.notify_all()

    def wake(self) -> None:
        """All memory is there again: open for what was committed since, if anything was."""
        with self.changed:
            self.asleep = False
            self.changed.notify_all()

    def may_run(self) -> bool:
        """Whether samples that run may go on."""
        return self._serves() and self.mode in (None, "drain")

    def may_admit(self) -> bool:
        """Whether new samples may begin."""
        return self._serves() and self.mode is None

    def take_abort(self) -> bool:
        """Whether to end all requests now; true once for a pause, as requests that come later wait for its end."""
        asked, self._abort_asked = self._abort_asked, False
        return asked

    def rest(self) -> None:
        """The generating thread waits here for a change, `changed` held, or for the end of the lease."""
        self._at_rest = True
        self.changed.notify_all()
        self.wait()

    def wait(self) -> None:
        """As `rest`, without coming to rest: there is nothing to do although samples may run."""
        leased = self.mode is not None and not self._updating
        self.changed.wait(max(self._lease_end - time.monotonic(), 0.0) if leased else None)

    def leave_rest(self) -> None:
        """The generating thread goes on, `changed` held."""
        self._at_rest = False

    def end_lease(self) -> None:
        """End a pause whose lease has ended, `changed` held. An update under way is waited for: it has a deadline."""
        if self.mode is not None and not self._updating and time.monotonic() >= self._lease_end:
            logger.warning("the lease of the pause has ended: generation goes on without a resume")
            self.mode = None

    def _serves(self) -> bool:
        return self.weights is not None and not self.quarantined and not self._updating and not self.asleep
