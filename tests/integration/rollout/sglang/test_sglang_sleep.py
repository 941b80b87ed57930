"""An SGLang engine that sleeps and wakes: on a CPU nothing is freed, but all else is as on a GPU."""

from pathlib import Path

import pytest

from relaxd.rpc.errors import FailedPrecondition
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.conftest import Start
from tests.integration.rollout.sglang.syncs import check_logprobs, join, sync, transfer

PROMPT = list(range(5, 25))


def test_an_engine_sleeps_between_two_versions(start: Start, source: Source, model: Path) -> None:
    runner = start()
    # Before it has any weights, as at a run's begin.
    runner.run(runner.engine.sleep(30.0))
    runner.run(runner.engine.wake(["weights"], 30.0))
    sync(runner, source, 1)
    assert runner.engine.weights is not None
    assert not runner.engine.serving  # there is no memory for keys and values yet
    waiting = runner.ask(PROMPT, max_new_tokens=8)
    runner.run(runner.engine.wake(["kv_cache"], 30.0))
    (answer,) = runner.wait(waiting)
    assert answer.versions == [1] * len(answer.tokens)
    check_logprobs(model, PROMPT, answer)

    # What has begun ends first; asking again does nothing; nothing is received that no memory is there for.
    begun = runner.ask(PROMPT, 4, stream=True, max_new_tokens=200, ignore_eos=True)
    runner.wait_begun(begun)
    change = runner.run(runner.engine.sleep(60.0))
    assert [len(each.tokens) for each in runner.wait(begun)] == [200] * 4
    assert change.before_bytes > 0
    runner.run(runner.engine.sleep(30.0))
    assert runner.engine.weights is None
    later = runner.ask(PROMPT, 2, max_new_tokens=8)
    runner.run(runner.engine.wake(["weights"], 30.0))
    runner.run(runner.engine.wake(["weights"], 30.0))
    runner.pause()
    transfer(runner, source, join(runner, source), 2)
    runner.resume()
    assert not later.begun.is_set()
    runner.run(runner.engine.wake(["weights", "kv_cache"], 30.0))
    for each in runner.wait(later):
        assert each.versions == [2] * len(each.tokens)
        check_logprobs(model, PROMPT, each)

    # One that would take too long leaves the engine as it was.
    long = runner.ask(PROMPT, 1, stream=True, max_new_tokens=400, ignore_eos=True)
    runner.wait_begun(long)
    with pytest.raises(FailedPrecondition, match="did not pause"):
        runner.run(runner.engine.sleep(0.2))
    assert runner.engine.serving
    assert len(runner.wait(long)[0].tokens) == 400
