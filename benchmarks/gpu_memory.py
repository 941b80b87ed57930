"""The largest micro-batch that fits a GPU, with logits in chunks and with all of them at once."""

import gc
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_models import make_batch
from services.trainer.learner.learner import Learner
from services.trainer.learner.learner import learner as learner_module

SEQUENCE = 2048
"""Tokens of each sequence."""
SMALL, MIDDLE = 8 * SEQUENCE, 12 * SEQUENCE
"""Sizes from whose memory the largest is foretold."""
STEP = 2 * SEQUENCE
"""How exactly the largest is found."""


def whole_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` returns, as it is first written down: log_softmax of all tokens' float32 logits."""
    logprobs = torch.log_softmax((hidden @ weight.t()).float() / temperature.unsqueeze(-1), -1)
    entropies = torch.zeros_like(temperature)  # the loss doesn't need it: it would take another copy of the logits
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropies


def largest(learner: Learner, vocabulary: int, *, chunked: bool) -> dict[str, float]:
    """Find the most tokens whose forward and backward pass fit.

    Memory grows in proportion to tokens: two small sizes foretell the largest, and a few trials round it settle it.
    """
    original = learner_module.token_logprobs
    if not chunked:
        learner_module.token_logprobs = whole_logprobs  # type: ignore[assignment]
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
        learner_module.token_logprobs = original


def _peak(learner: Learner, vocabulary: int, tokens: int) -> int | None:
    """Bytes that forward and backward of so many tokens take at most; None: they don't fit."""
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
