"""An SGLang engine of two tensor-parallel ranks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import check_logprobs, join, sync, sync_at_once
from tests.kit.engines import EngineRunner

PROMPT = list(range(3, 103))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_all_ranks_pause_receive_and_go_on_together(
    start: Callable[..., EngineRunner], model: Path, source: Source
) -> None:
    engine = start(tensor_parallel=2)
    sync(engine, source, 0, ranks=2)
    asked = engine.ask(PROMPT, 4, stream=True, max_new_tokens=100, ignore_eos=True)
    engine.wait_begun(asked)
    assert sync(engine, source, 1, "retract", ranks=2) == 4
    for answer in engine.wait(asked):
        assert set(answer.versions) == {0, 1}
        assert not answer.spans_weight_update
        check_logprobs(model, PROMPT, answer)
    asked = engine.ask(PROMPT, 4, stream=True, max_new_tokens=100, ignore_eos=True)
    engine.wait_begun(asked)
    assert sync(engine, source, 2, ranks=2) == 4
    for answer in engine.wait(asked):
        assert set(answer.versions) == {1, 2}
        assert answer.spans_weight_update
    for mode, version in (("in_place", 3), ("retract", 4)):  # the ranks are asked together with their pause
        name = join(engine, source, ranks=2)
        asked = engine.ask(PROMPT, 4, stream=True, max_new_tokens=100, ignore_eos=True)
        engine.wait_begun(asked)
        sync_at_once(engine, source, name, version, mode)
        for answer in engine.wait(asked):
            assert set(answer.versions) == {version - 1, version}
            assert answer.spans_weight_update == (mode == "in_place")
    asked = engine.ask(PROMPT, 4, stream=True, max_new_tokens=300, ignore_eos=True)
    engine.wait_begun(asked)
    assert engine.pause("abort") == 0
    assert {answer.finish for answer in engine.wait(asked)} == {"abort"}
    engine.resume()
    (answer,) = engine.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert answer.versions == [4] * 8
    check_logprobs(model, PROMPT, answer)
