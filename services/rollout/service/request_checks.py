"""Checks of callers' requests, and their conversion to the engine's types."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relaxd.config import RolloutConfig
from relaxd.rpc.errors import Violations
from relaxd.v1 import rollout_pb2
from services.rollout.engines.request_types import Sampling

TEMPERATURES = (1e-3, 1e3)
"""Minimum and maximum temperature. Logits divided by less are infinite and would fail every request in the batch."""
MAX_SAMPLES = 4096
"""Maximum samples of one request."""


def parse_generate(
    request: rollout_pb2.GenerateRequest, vocabulary: int, context: int
) -> tuple[tuple[int, ...], int, Sampling]:
    """Return prompt, number of samples and sampling of a request to a model with this vocabulary and context length.

    Raises InvalidArgument naming every wrong field.
    """
    violations = Violations()
    prompt, asked = tuple(request.prompt_tokens), request.sampling
    violations.check(prompt, "prompt_tokens", "is empty: give at least one token id")
    for field, tokens in (("prompt_tokens", prompt), ("begun_tokens", request.begun_tokens)):
        for place, token in enumerate(tokens):
            if not 0 <= token < vocabulary:
                violations.add(f"{field}[{place}]", f"is {token}: the model's token ids are 0 to {vocabulary - 1}")
                break  # a wrong tokenizer would give thousands
    every = request.report_every
    violations.check(every >= 0, "report_every", f"is {every}: it must be 0 (for each token) or positive")
    violations.check(1 <= request.n <= MAX_SAMPLES, "n", f"is {request.n}: it must be 1 to {MAX_SAMPLES}")
    new = asked.max_new_tokens
    if violations.check(new >= 1, "sampling.max_new_tokens", f"is {new}: it must be at least 1") and context:
        violations.check(
            len(prompt) + new <= context,
            "sampling.max_new_tokens",
            f"is {new}: with the prompt's {len(prompt)} tokens that is more than the model's context of {context}",
        )
    low, high = TEMPERATURES
    violations.check(
        asked.temperature == 0 or low <= asked.temperature <= high,
        "sampling.temperature",
        f"is {asked.temperature:g}: it must be 0 (greedy), or {low:g} to {high:g}",
    )
    violations.check(
        0 <= asked.top_p <= 1, "sampling.top_p", f"is {asked.top_p:g}: it must be 0 to 1 (0 and 1 are off)"
    )
    violations.check(asked.top_k >= 0, "sampling.top_k", f"is {asked.top_k}: it must be 0 (off) or positive")
    for place, token in enumerate(asked.stop_token_ids):
        violations.check(
            0 <= token < vocabulary,
            f"sampling.stop_token_ids[{place}]",
            f"is {token}: the model's token ids are 0 to {vocabulary - 1}",
        )
    for place, text in enumerate(asked.stop):
        violations.check(text, f"sampling.stop[{place}]", "is empty: it must have at least one character")
    violations.check(
        0 <= asked.min_new_tokens <= max(new, 0),
        "sampling.min_new_tokens",
        f"is {asked.min_new_tokens}: it must be 0 (off) to max_new_tokens ({new})",
    )
    if begun := request.begun_tokens:
        violations.check(request.n == 1, "begun_tokens", f"are given, but n is {request.n}: it must be 1 with them")
        violations.check(
            len(begun) < max(new, 1),
            "begun_tokens",
            f"are {len(begun)}: they must be fewer than sampling.max_new_tokens ({new})",
        )
    violations.raise_if_any()
    return prompt, request.n, Sampling.from_proto(asked)


def run_sampling(config: RolloutConfig, seed: int, own: Mapping[str, Any] | None = None) -> Sampling:
    """Return the sampling of a run's groups; `own`: parameters of a group's source, by name, as JSON values."""
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        min_new_tokens=config.min_new_tokens,
        seed=seed,
    )
    changes: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in (own or {}).items()}
    return replace(sampling, **changes)
