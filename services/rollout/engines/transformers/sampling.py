"""Sampling of tokens from logits."""

import hashlib
from collections.abc import Callable, Collection, Sequence

import torch

from services.rollout.engines.request_types import EngineError, Sampling

_Choose = Callable[[torch.Tensor, list[Sampling], torch.Tensor], torch.Tensor]
"""Sampling method: (log-probs [rows, vocabulary], sampling of each row, uniform float64 [rows]) -> token ids [rows]."""


def sample_generator(seed: int, sample: int, tokens: int = 0) -> torch.Generator:
    """Return the random generator of one sample; generators of different (seed, sample) are independent.

    Its state is that after choosing `tokens` tokens, so a continued sample gets the same random numbers as without the
    interruption.
    """
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    torch.rand(tokens, generator=generator, dtype=torch.float64)
    return generator


def choose_tokens(
    logits: torch.Tensor,
    sampling: Sequence[Sampling],
    generators: Sequence[torch.Generator],
    forbidden: Sequence[Collection[int]] = (),
) -> tuple[list[int], list[float]]:
    """Choose one token per row of logits [rows, vocabulary]. Returns the tokens and their log-probabilities.

    Each row inverts its cumulative distribution at one uniform number from its own generator, so its token does not
    depend on the other rows. The log-probability is at the row's temperature (1 for greedy), before top-k and top-p.
    `forbidden`: token ids that each row may not choose; the returned log-probabilities still count their probability.
    Raises EngineError if a row has no finite distribution.
    """
    logits = logits.float()
    temperatures = [each.temperature for each in sampling]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors = torch.tensor([temperature or 1.0 for temperature in temperatures], device=logits.device)
        logits = logits / divisors[:, None]
    logprobs = logits.log_softmax(-1)
    allowed = logprobs
    if any(forbidden):
        allowed = logprobs.clone()
        for row, ids in enumerate(forbidden):
            allowed[row, list(ids)] = -torch.inf
    tokens = torch.empty(len(sampling), dtype=torch.long, device=logits.device)
    for rows, choose in _by_method(sampling):
        uniform = [float(torch.rand((), generator=generators[row], dtype=torch.float64)) for row in rows]
        # Usually one method applies to all rows; this avoids a copy then.
        of_rows = allowed if len(rows) == len(sampling) else allowed[rows]
        numbers = torch.tensor(uniform, dtype=torch.float64, device=logits.device)
        tokens[rows] = choose(of_rows, [sampling[row] for row in rows], numbers)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    if not bool(torch.isfinite(chosen).all()):
        raise EngineError("the model's logits are not finite: its weights or its input are broken")
    return tokens.tolist(), chosen.tolist()


def likeliest_tokens(logits: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
    """Return the ids of the `counts[row]` likeliest tokens of each row of logits [rows, vocabulary], likeliest first.

    They don't depend on the temperature, and include tokens that a row may not choose.
    """
    most = max(counts, default=0)
    if not most:
        return [[] for _ in counts]
    found = logits.float().topk(most).indices.tolist()
    return [ids[:count] for ids, count in zip(found, counts, strict=True)]


def _by_method(sampling: Sequence[Sampling]) -> list[tuple[list[int], _Choose]]:
    greedy, plain, filtered = [], [], []
    for row, each in enumerate(sampling):
        if each.temperature == 0:
            greedy.append(row)
        elif each.top_k == 0 and each.top_p >= 1:
            plain.append(row)
        else:
            filtered.append(row)
    methods: list[tuple[list[int], _Choose]] = [(greedy, _greedy), (plain, _plain), (filtered, _filtered)]
    return [(rows, choose) for rows, choose in methods if rows]


def _greedy(logprobs: torch.Tensor, sampling: list[Sampling], uniform: torch.Tensor) -> torch.Tensor:
    return logprobs.argmax(-1)


def _plain(logprobs: torch.Tensor, sampling: list[Sampling], uniform: torch.Tensor) -> torch.Tensor:
    return _invert(logprobs.exp(), uniform)


def _filtered(logprobs: torch.Tensor, sampling: list[Sampling], uniform: torch.Tensor) -> torch.Tensor:
    """Apply top-k, then top-p to the remaining tokens: keep the smallest set of likeliest tokens that reaches top_p."""
    probabilities, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    vocabulary = logprobs.shape[-1]
    top_k = torch.tensor([each.top_k or vocabulary for each in sampling], device=logprobs.device)
    ranks = torch.arange(vocabulary, device=logprobs.device)
    probabilities = probabilities.masked_fill(ranks[None, :] >= top_k[:, None], 0.0)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    top_p = torch.tensor([each.top_p for each in sampling], device=logprobs.device, dtype=torch.float64)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p[:, None], 0.0)
    return order.gather(-1, _invert(probabilities, uniform)[:, None]).squeeze(-1)


def _invert(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index at which the cumulative sum exceeds uniform times the total."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = uniform[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    return found.clamp(max=probabilities.shape[-1] - 1)
