"""Checks of callers' requests, and their conversion to the engine's types."""

from relaxd.config import RolloutConfig
from relaxd.rpc.errors import Violations
from relaxd.v1 import rollout_pb2
from services.rollout.engines.types import MemoryPart, PauseMode, Sampling

PAUSE_MODES: dict[int, PauseMode] = {
    rollout_pb2.PAUSE_MODE_UNSPECIFIED: "in_place",
    rollout_pb2.PAUSE_MODE_IN_PLACE: "in_place",
    rollout_pb2.PAUSE_MODE_ABORT: "abort",
    rollout_pb2.PAUSE_MODE_DRAIN: "drain",
    rollout_pb2.PAUSE_MODE_RETRACT: "retract",
}

MEMORY_PARTS: dict[int, MemoryPart] = {
    rollout_pb2.MEMORY_PART_WEIGHTS: "weights",
    rollout_pb2.MEMORY_PART_KEY_VALUE_CACHE: "kv_cache",
}

TEMPERATURES = (1e-3, 1e3)
"""Least and greatest temperature. Logits divided by less are infinite and would fail every request in the batch."""
MAX_SAMPLES = 4096
"""Most samples of one request."""


def parse_generate(
    request: rollout_pb2.GenerateRequest, vocabulary: int, context: int
) -> tuple[tuple[int, ...], int, Sampling]:
    """Return prompt, number of samples and sampling of a request to a model with this vocabulary and context length.

    Raises InvalidArgument naming every wrong field.
    """
    violations = Violations()
    prompt, asked = tuple(request.prompt_tokens), request.sampling
    violations.check(prompt, "prompt_tokens", "is empty: give at least one token id")
    for place, token in enumerate(prompt):
        if not 0 <= token < vocabulary:
            violations.add(f"prompt_tokens[{place}]", f"is {token}: the model's token ids are 0 to {vocabulary - 1}")
            break  # a wrong tokenizer would give thousands
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
    violations.raise_if_any()
    sampling = Sampling(
        max_new_tokens=new,
        temperature=asked.temperature,
        top_p=asked.top_p or 1.0,
        top_k=asked.top_k,
        stop_token_ids=tuple(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
        seed=asked.seed,
    )
    return prompt, request.n, sampling


def run_sampling(config: RolloutConfig, seed: int) -> Sampling:
    """Return the sampling of a run's groups."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=seed,
    )
