"""Log-probs of given tokens: the real SGLang prefills them, piece by piece, with and without a prompt in its cache."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from relaxd.rpc.errors import FailedPrecondition
from services.rollout.engines.request_types import RequestFailed
from tests.integration.rollout.sglang.conftest import Start
from tests.kit.engines import EngineRunner

TEMPERATURE = 0.7
TOP_K = 5
CONTEXT = 512
"""Of the tiny model."""
PROMPT = np.random.default_rng(1).integers(3, 200, 70)
ANSWER = np.random.default_rng(2).integers(3, 200, 150)


@pytest.fixture(scope="module")
def engine(start: Start) -> EngineRunner:
    """It prefills 32 tokens at a time, and computes the logits of seven."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_LOGITS_PROCESSER_CHUNK_SIZE", "7")
        return start(for_logprobs=True, temperature=TEMPERATURE, sglang={"chunked_prefill_size": 32})


@pytest.fixture(scope="module")
def exact(model: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)


def of_vocabulary(exact: transformers.PreTrainedModel, tokens: Sequence[int], start: int) -> torch.Tensor:
    """[n, vocabulary]: log-probs in the places of the tokens from `start` on."""
    with torch.inference_mode():
        logits = exact(torch.tensor([list(tokens)])).logits[0, start - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


@pytest.mark.parametrize("length", [1, 2, 30, 150])
def test_log_probs_and_likeliest_tokens_are_those_of_transformers(
    engine: EngineRunner, exact: transformers.PreTrainedModel, length: int
) -> None:
    """The second time the prompt is in the cache, and with it a part of the answer: nothing may be missing."""
    tokens = [*map(int, PROMPT), *map(int, ANSWER[:length])]
    expected = of_vocabulary(exact, tokens, len(PROMPT))
    for _ in range(2):
        logprobs, ids, values = engine.logprobs(tokens, len(PROMPT), TOP_K)
        own = expected.gather(-1, torch.tensor(tokens[len(PROMPT) :])[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, own, atol=1e-5)
        largest = expected.topk(TOP_K)
        assert (ids == largest.indices.numpy()).all()
        np.testing.assert_allclose(values, largest.values, atol=1e-5)


def test_many_sequences_at_once(engine: EngineRunner, exact: transformers.PreTrainedModel) -> None:
    """Of different prompts and lengths, some with likeliest tokens, in the same steps."""
    generator = np.random.default_rng(3)
    asked = []
    for number in range(24):
        start = int(generator.integers(1, 60))
        tokens = generator.integers(3, 200, start + int(generator.integers(1, 90)))
        work = engine.engine.compute_logprobs(tokens, start, TOP_K * (number % 2), 60.0)
        asked.append((tokens, start, engine.begin(work)))
    for number, (tokens, start, task) in enumerate(asked):
        logprobs, ids, values = engine.finish(task)
        expected = of_vocabulary(exact, tokens.tolist(), start)
        own = expected.gather(-1, torch.tensor(tokens[start:])[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, own, atol=1e-5)
        assert ids.shape == values.shape == (len(tokens) - start, TOP_K * (number % 2))
        if number % 2:
            np.testing.assert_allclose(values, expected.topk(TOP_K).values, atol=1e-5)


def test_a_sequence_may_fill_the_context_and_not_exceed_it(
    engine: EngineRunner, exact: transformers.PreTrainedModel
) -> None:
    assert engine.engine.context == CONTEXT
    tokens = np.random.default_rng(4).integers(3, 200, CONTEXT + 1).tolist()
    logprobs, _, _ = engine.logprobs(tokens[:CONTEXT], 10)
    expected = of_vocabulary(exact, tokens[:CONTEXT], 10).gather(-1, torch.tensor(tokens[10:CONTEXT])[:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    with pytest.raises(RequestFailed, match=f"{CONTEXT + 1} tokens"):
        engine.logprobs(tokens, 10)
    with pytest.raises(FailedPrecondition, match="start is 0"):
        engine.logprobs(tokens[:20], 0)
    with pytest.raises(FailedPrecondition, match="start is 20"):
        engine.logprobs(tokens[:20], 20)


def test_what_is_read_is_counted(engine: EngineRunner) -> None:
    def next_report() -> int:
        for _ in range(2):  # one may be from before
            last = engine.engine.gauges
            engine.wait_until(lambda last=last: engine.engine.gauges is not last)
        return engine.engine.prefilled_tokens

    before = next_report()
    engine.logprobs(np.random.default_rng(5).integers(3, 200, 100).tolist(), 50)
    assert next_report() == before + 100


def test_an_engine_that_generates_gives_none(start: Start) -> None:
    runner = start()
    with pytest.raises(FailedPrecondition, match="the model was loaded to generate"):
        runner.logprobs([5, 9, 17], 1)
