"""Updates of the real SGLang that pause by themselves: one message to the schedulers is for both."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relaxd.engines import ENGINES
from relaxd.rpc.errors import Aborted, FailedPrecondition
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import check_logprobs, join, pausing_request, sync, sync_at_once, transfer
from tests.kit.engines import Asked, EngineRunner
from tests.kit.waiting import PATIENCE, wait_until

PROMPT = list(range(3, 103))
LONG = 400
"""Tokens that take the engine some seconds."""


class Held:
    """An engine whose schedulers' loops can be held up."""

    def __init__(self, runner: EngineRunner, folder: Path) -> None:
        self.runner = runner
        self._hold, self._updates = folder / "hold", folder / "updates"

    @property
    def updates(self) -> list[int]:
        """The pauses that the messages for updates began; 0: none."""
        return [int(line) for line in self._updates.read_text().split()]

    @property
    def version(self) -> int:
        assert self.runner.engine.weights is not None
        return self.runner.engine.weights.version

    def hold(self) -> None:
        self._hold.touch()

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    def ask(self) -> Asked:
        """A request that generates for some seconds, if nobody holds it up."""
        asked = self.runner.ask(PROMPT, 2, stream=True, max_new_tokens=LONG, ignore_eos=True)
        self.runner.wait_begun(asked)
        return asked


@pytest.fixture(scope="module")
def held_engine(start: Callable[..., EngineRunner], source: Source, tmp_path_factory: pytest.TempPathFactory) -> Held:
    folder = tmp_path_factory.mktemp("held")
    with pytest.MonkeyPatch.context() as patch:
        held = replace(ENGINES["sglang"], process="tests.integration.rollout.sglang.held_engine")
        patch.setitem(ENGINES, "sglang", held)
        patch.setenv("RELAXD_TEST_HELD", str(folder))
        runner = start()
    sync(runner, source, 0)
    return Held(runner, folder)


@pytest.fixture
def held(held_engine: Held) -> Iterator[Held]:
    yield held_engine
    held_engine.release()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_leaves_with_its_pause(held: Held, model: Path, source: Source, mode: str) -> None:
    name, old = join(held.runner, source), held.version
    asked = held.ask()
    sync_at_once(held.runner, source, name, old + 1, mode)
    assert held.updates[-1] > 0
    for answer in held.runner.wait(asked):
        assert set(answer.versions) == {old, old + 1}
        assert answer.versions == sorted(answer.versions)
        assert answer.spans_weight_update == (mode == "in_place")
        if mode == "retract":
            check_logprobs(model, PROMPT, answer)
    (after,) = held.runner.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert after.versions == [old + 1] * 8
    check_logprobs(model, PROMPT, after)


def test_an_update_of_an_engine_that_is_paused_or_ends_requests_comes_after_the_pause(
    held: Held, model: Path, source: Source
) -> None:
    old = held.version
    name = join(held.runner, source)
    held.runner.pause()
    sync_at_once(held.runner, source, name, old + 1)
    assert held.updates[-1] == 0
    name = join(held.runner, source)
    asked = held.ask()
    sync_at_once(held.runner, source, name, old + 2, "abort")
    assert held.updates[-1] == 0
    for answer in held.runner.wait(asked):
        assert (answer.finish, set(answer.versions)) == ("abort", {old + 1})
    name = join(held.runner, source)
    asked = held.runner.ask(PROMPT, 2, stream=True, max_new_tokens=30, ignore_eos=True)
    held.runner.wait_begun(asked)
    sync_at_once(held.runner, source, name, old + 3, "drain")
    assert held.updates[-1] == 0
    for answer in held.runner.wait(asked):
        assert answer.versions == [old + 2] * 30
    (after,) = held.runner.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert after.versions == [old + 3] * 8
    check_logprobs(model, PROMPT, after)


def test_after_a_pause_that_is_late_nothing_is_received(held: Held, model: Path, source: Source) -> None:
    runner, old, before = held.runner, held.version, len(held.updates)
    name = join(runner, source)
    asked = held.ask()
    held.hold()
    with pytest.raises(FailedPrecondition, match="did not pause"):
        runner.run(runner.engine.receive(pausing_request(name, runner.next_version(), pause_timeout=PATIENCE)))
    assert len(held.updates) == before + 1
    assert held.updates[-1] > 0
    source.tell(do="broadcast", version=old + 1, buckets=None)
    assert "error" in source.answer()  # nobody is there, even if the loop pauses now
    # The engine still waits for that pause, so that for these updates it asks nobody, and does not later.
    other = join(runner, source)
    begun = runner.begin(runner.engine.receive(pausing_request(other, runner.next_version(), pause_timeout=100)))
    assert not runner.run(runner.engine.leave(other))
    with pytest.raises(FailedPrecondition, match=r"left|not in weight group"):
        runner.finish(begun)
    other = join(runner, source)
    with pytest.raises(FailedPrecondition, match="did not pause"):
        runner.run(runner.engine.receive(pausing_request(other, runner.next_version(), pause_timeout=PATIENCE)))
    assert len(held.updates) == before + 1
    held.release()
    assert not runner.run(runner.engine.leave(name))
    for answer in runner.wait(asked):  # without a resume
        assert answer.versions == [old] * LONG
        check_logprobs(model, PROMPT, answer)
    sync_at_once(runner, source, join(runner, source), old + 1)
    (after,) = runner.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert after.versions == [old + 1] * 8


def test_a_group_that_is_left_before_the_pause_ends_the_update_at_once(held: Held, model: Path, source: Source) -> None:
    runner, old, before = held.runner, held.version, len(held.updates)
    name = join(runner, source)
    asked = held.ask()
    held.hold()
    begun = runner.begin(runner.engine.receive(pausing_request(name, runner.next_version(), pause_timeout=100)))
    wait_until(lambda: len(held.updates) > before, "the schedulers are asked")
    assert held.updates[-1] > 0
    started = time.monotonic()
    assert not runner.run(runner.engine.leave(name))
    runner.resume()  # at once: the update has ended
    with pytest.raises((Aborted, FailedPrecondition), match=r"left|not in weight group"):
        runner.finish(begun)
    assert time.monotonic() - started < 50  # not only when it is late
    held.release()
    for answer in runner.wait(asked):
        assert answer.versions == [old] * LONG
        check_logprobs(model, PROMPT, answer)
    assert not runner.engine.quarantined
    runner.pause()
    transfer(runner, source, join(runner, source), old + 1)
    runner.resume()
    (after,) = runner.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert after.versions == [old + 1] * 8
