"""Pauses for an update: when they end, and what may not begin meanwhile."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from services.rollout.engines.generation_gate import GenerationGate, UpdatePause
from services.rollout.engines.request_types import EngineError, Version
from tests.kit.waiting import wait_until

NEW = Version(1, 1)


@pytest.fixture
def gate() -> GenerationGate:
    gate = GenerationGate()
    gate.serve_loaded()
    assert gate.may_admit()
    return gate


def in_place(lease_seconds: float = 600.0) -> UpdatePause:
    return UpdatePause("in_place", lease_seconds, time.monotonic() + 600)


@contextmanager
def failing_update(gate: GenerationGate) -> Iterator[None]:
    """An update that fails at the end of the block."""
    with suppress(RuntimeError), gate.pause_and_update(in_place(), NEW):
        yield
        raise RuntimeError


def rest(gate: GenerationGate) -> None:
    """As the generating thread does, but without waiting for the end of the pause."""
    with gate.changed:
        gate.at_rest = True
        gate.changed.notify_all()


@pytest.mark.parametrize("rests", [True, False])
def test_an_update_that_fails_ends_its_pause_unless_the_engine_rests(gate: GenerationGate, rests: bool) -> None:
    with failing_update(gate):
        assert not gate.may_run()
        if rests:
            rest(gate)
    assert gate.may_run() == (not rests)
    assert (gate.weights, gate.quarantined) == (Version(0, 0), False)
    gate.resume()
    assert gate.may_run()


def test_an_update_commits_and_stays_paused(gate: GenerationGate) -> None:
    with gate.pause_and_update(in_place(lease_seconds=0), NEW):
        rest(gate)
        gate.touch()
        with gate.changed:
            gate.end_lease()  # an update has a deadline of its own
        assert gate.mode == "in_place"
        with pytest.raises(EngineError, match="another update"), gate.pause_and_update(in_place(), NEW):
            pass
        with pytest.raises(EngineError, match="being received"):
            gate.resume()
    assert (gate.weights, gate.mode, gate.quarantined) == (NEW, "in_place", False)
    gate.confirm(NEW)
    with gate.changed:
        gate.end_lease()
    assert gate.may_admit()


def test_weights_that_nobody_confirmed_are_quarantined_at_the_end_of_the_lease(gate: GenerationGate) -> None:
    with gate.pause_and_update(in_place(lease_seconds=0), NEW):
        rest(gate)
    with pytest.raises(EngineError, match=r"received version 1 of term 1, which the resume doesn't name"):
        gate.resume()
    with pytest.raises(EngineError, match=r"names version 2 of term 1, but the engine has version 1 of term 1"):
        gate.confirm(Version(1, 2))
    assert (gate.mode, gate.quarantined, gate.may_run()) == ("in_place", False, False)
    with gate.changed:
        gate.end_lease()
    assert (gate.mode, gate.quarantined, gate.may_run()) == (None, True, False)
    with pytest.raises(EngineError, match="the engine is quarantined"):  # it is too late
        gate.confirm(NEW)
    with gate.update(NEW):
        pass
    assert not gate.may_run()  # as there was no pause
    gate.confirm(NEW)
    assert gate.may_run()


def test_a_touched_model_whose_update_fails_is_quarantined_without_a_rest_too(gate: GenerationGate) -> None:
    with failing_update(gate):
        gate.touch()
    assert gate.quarantined
    assert not gate.may_run()
    with gate.pause_and_update(in_place(), NEW):
        rest(gate)
    gate.confirm(NEW)
    gate.resume()
    assert gate.may_run()


def test_a_failed_update_does_not_end_the_pause_of_another(gate: GenerationGate) -> None:
    other = threading.Thread(target=gate.pause, args=("retract", 600.0, 600.0), daemon=True)
    with failing_update(gate):
        other.start()
        wait_until(lambda: gate.mode == "retract", "the other pause begins")
    assert gate.mode == "retract"
    rest(gate)
    other.join()


def test_who_waits_for_the_end_of_an_update_hears_of_it(gate: GenerationGate) -> None:
    gate.wait_no_update(600)  # none is under way
    waiting = threading.Thread(target=gate.wait_no_update, args=(600.0,), daemon=True)
    with gate.pause_and_update(in_place(), NEW):
        rest(gate)
        waiting.start()
        gate.wait_no_update(0)  # does not wait for long
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_resume_of_a_pause_ends_no_later_one(gate: GenerationGate) -> None:
    with gate.pause_and_update(in_place(), NEW):
        rest(gate)
    pause = gate.pauses
    with gate.pause_and_update(in_place(), Version(1, 2)):
        rest(gate)
        gate.resume(pause)  # late, and doesn't fail
    gate.confirm(Version(1, 2))
    assert not gate.may_run()
    gate.resume(gate.pauses)
    assert gate.may_run()
