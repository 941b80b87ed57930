"""The largest micro-batch that fits on a GPU, with chunked logits and with all logits at once."""

import gc
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_models import make_batch
from services.trainer.learner import forward
from services.trainer.learner.learner import Learner
from services.trainer.learner.logprobs import TokenLogprobs

SEQUENCE = 2048
"""Tokens of each sequence."""
SMALL, MIDDLE = 8 * SEQUENCE, 12 * SEQUENCE
"""Sizes whose memory use predicts the largest one."""
STEP = 2 * SEQUENCE
"""Precision of the largest size, in tokens."""


def whole_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor, *_: Any) -> TokenLogprobs:
    """Reference for `token_logprobs`: log_softmax of all tokens' float32 logits."""
    logprobs = torch.log_softmax((hidden @ weight.t()).float() / temperature.unsqueeze(-1), -1)
    entropies = torch.zeros_like(temperature)  # unused by the loss; computing it would take another copy of the logits
    of_tokens = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return TokenLogprobs(of_tokens, entropies, of_tokens.new_zeros(len(tokens), 0))


def largest(learner: Learner, vocabulary: int, *, chunked: bool) -> dict[str, float]:
    """Find the largest number of tokens whose forward and backward pass fit.

    Memory grows linearly with tokens: two small sizes predict the largest one, and a few trials near it confirm it.
    """
    original = forward.token_logprobs
    if not chunked:
        forward.token_logprobs = whole_logprobs  # type: ignore[assignment]
    try:
        small, middle = _peak(learner, vocabulary, SMALL), _peak(learner, vocabulary, MIDDLE)
        assert small is not None
        room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        fits, slope = SMALL, (0.0 if middle is None else middle - small) / (MIDDLE - SMALL)
        if middle is not None:
            fits = MIDDLE
        tokens = int((SMALL + (room - small) / slope) * 0.94) // STEP * STEP if slope else MIDDLE - STEP
        began, fails = time.perf_counter(), None
        seconds = float("nan")
        while fails is None or fits + STEP < fails:
            begin = time.perf_counter()
            if _peak(learner, vocabulary, tokens) is None:
                fails = tokens
            else:
                fits, seconds = tokens, time.perf_counter() - begin
            if time.perf_counter() - began > 35:
                break
            stride = max(STEP, fits // 32 // STEP * STEP)
            tokens = fits + stride if fails is None else (fits + fails) // 2 // STEP * STEP
            if fails is not None and (tokens <= fits or fails - fits <= stride):
                break
        return {"tokens": fits, "fails_at": fails or 0, "kb_per_token": slope / 1e3, "seconds": seconds}
    finally:
        forward.token_logprobs = original


def _peak(learner: Learner, vocabulary: int, tokens: int) -> int | None:
    """Return the peak memory in bytes of forward and backward, None if they don't fit."""
    batch = make_batch(vocabulary, tokens, tokens // SEQUENCE)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        learner.accumulate([batch])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    except torch.OutOfMemoryError:
        return None
    finally:
        learner.discard()
