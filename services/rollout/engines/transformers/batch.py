"""Batches of samples that a model decodes together, the choice of their tokens from logits, and their growing cache of
keys, values and states.

Rows can be added and removed at any step.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from relaxd.data.towers import TowerOutputs
from services.rollout.engines.request_types import EngineError, FinishReason, Request, Sampling
from services.rollout.engines.seen_prompts import SeenPrompt
from services.rollout.engines.transformers.vision import embed

_Choose = Callable[[torch.Tensor, list[Sampling], torch.Tensor], torch.Tensor]
"""Type of sampling functions, which return token ids [rows]. Arguments: log-probs [rows, vocabulary], the sampling
parameters of each row, and uniform random numbers, float64 [rows]."""


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
    """Return one token id per row, chosen after top-k and then top-p.

    Top-p keeps the smallest set of likeliest tokens whose probabilities sum to top_p.
    """
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
    """Return for each row the first index at which cumulative probability exceeds `uniform` times the row's sum."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = uniform[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    return found.clamp(max=probabilities.shape[-1] - 1)


_MIN_GROWTH = 64
"""Minimum number of tokens by which a layer's key and value buffers grow."""


class GrowingLayer(DynamicLayer):
    """One layer's keys and values [rows, heads, length, dim], as views into buffers with room for more tokens.

    transformers' own dynamic layer copies the whole cache for every token.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens. Returns the layer's keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._grow(start, end + max(_MIN_GROWTH, end // 4), key_states, value_states)
        assert self._buffers is not None
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def take_rows(self, rows: torch.Tensor, cut: int) -> None:
        """Keep only the cache rows `rows`, without their first `cut` positions."""
        self._buffers = None
        self.keys, self.values = (x[:, :, cut:].index_select(0, rows) for x in (self.keys, self.values))

    def append_rows(self, other: "GrowingLayer", length: int) -> None:
        """Append another layer's cache rows, after padding the rows of both on the left to `length` positions."""
        self._buffers = None
        self.keys, self.values = (
            _stack(above, below, length) for above, below in ((self.keys, other.keys), (self.values, other.values))
        )

    def _grow(self, length: int, capacity: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads = key_states.shape[:2]
        keys = key_states.new_empty((rows, heads, capacity, key_states.shape[-1]))
        values = value_states.new_empty((rows, heads, capacity, value_states.shape[-1]))
        if length:
            keys[:, :, :length] = self.keys
            values[:, :, :length] = self.values
        self._buffers = (keys, values)


class StateLayer(LinearAttentionLayer):
    """One layer's states of a gated delta net and of its convolution, [rows, ...] each.

    A state has no positions that could be cut: it summarizes all tokens of a sample. Left padding doesn't change it:
    transformers feeds zeros there, which keep a zero state.
    """

    def take_rows(self, rows: torch.Tensor, cut: int) -> None:
        """Keep only the cache rows `rows`. `cut` has no effect, because states have no positions."""
        self.reorder_cache(rows)

    def append_rows(self, other: "StateLayer", length: int) -> None:
        """Append another layer's cache rows. `length` has no effect, because states have no positions."""
        for above, below in ((self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states)):
            above[0] = torch.cat((above[0], below[0]))


def empty_cache(config: PreTrainedConfig) -> Cache:
    """Return an empty cache for a model."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    return Cache(layers=[StateLayer() if kind == "linear_attention" else GrowingLayer() for kind in types])


def take_rows(cache: Cache, rows: Sequence[int], cut: int = 0) -> None:
    """Keep only the cache rows `rows`, in this order, without their first `cut` positions. A row may be repeated."""
    index = torch.tensor(rows, dtype=torch.long, device=cache.layers[0].device)
    for layer in cache.layers:
        layer.take_rows(index, cut)


def append_rows(cache: Cache, other: Cache) -> None:
    """Append the rows of cache `other`. Pads the shorter cache on the left with zeros, which callers must mask."""
    length = max(cache.get_seq_length(), other.get_seq_length())
    for layer, added in zip(cache.layers, other.layers, strict=True):
        layer.append_rows(added, length)


def _stack(above: torch.Tensor, below: torch.Tensor, length: int) -> torch.Tensor:
    heads, dim = above.shape[1], above.shape[3]
    stacked = above.new_zeros((above.shape[0] + below.shape[0], heads, length, dim))
    stacked[: above.shape[0], :, length - above.shape[2] :] = above
    stacked[above.shape[0] :, :, length - below.shape[2] :] = below
    return stacked


@dataclass(eq=False, kw_only=True)
class RunningSample:
    """State of a sample that is running or waits to start."""

    request: Request
    index: int
    generator: torch.Generator
    stop_ids: frozenset[int]
    begun: int
    """Number of tokens that the sample had before the request."""
    tokens: list[int]
    """Token ids of the whole sample, including tokens from before the request."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the tokens that this request generated."""
    versions: list[int] = field(default_factory=list)
    """Weight version of each token that this request generated."""
    likeliest: list[list[int]] = field(default_factory=list)
    """Ids of the likeliest tokens at each new token's position, if requested."""
    finish_reason: FinishReason | None = None
    at_stop_string: bool = False
    """True if the sample ended at a stop string, not at an end token."""
    spans_weight_update: bool = False
    reported: int = 0
    """Number of new tokens that were reported to the caller."""
    seen: SeenPrompt | None = None
    """The prompt with its decoded media, set before the sample starts; None without media."""

    @classmethod
    def of(cls, request: Request, index: int, end_ids: frozenset[int]) -> "RunningSample":
        """Create sample `index` of a request; `end_ids`: the model's end tokens."""
        sampling, tokens = request.sampling, list(request.tokens_of(index))
        stop_ids = frozenset(sampling.stop_token_ids) or end_ids
        generator = sample_generator(sampling.seed, index, len(tokens))
        return cls(
            request=request,
            index=index,
            generator=generator,
            stop_ids=frozenset() if sampling.ignore_eos else stop_ids,
            begun=len(tokens),
            tokens=tokens,
        )

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens to prefill: the prompt, and the sample's tokens from before the request."""
        return (*self.request.prompt_tokens, *self.tokens[: self.begun])

    @property
    def offset(self) -> int:
        """Position minus index of each token after the prompt; media make the two differ."""
        return self.seen.offset if self.seen is not None else 0

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that the next token must not have: end tokens until the sample has min_new_tokens, then none."""
        return self.stop_ids if len(self.tokens) < self.request.sampling.min_new_tokens else frozenset()

    def append(self, token: int, logprob: float, likeliest: list[int], version: int) -> None:
        """Append a generated token, and set finish_reason if the token ends the sample."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.request.likeliest:
            self.likeliest.append(likeliest)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.request.sampling.max_new_tokens:
            self.finish_reason = "length"


class Batch:
    """Samples as rows of one key-value cache, each padded on the left to the longest.

    The last token of each sample is not in the cache yet: the next step feeds it.
    """

    def __init__(self, samples: list[RunningSample], cache: Cache, paddings: list[int]) -> None:
        self.samples = samples
        self._cache = cache
        self._paddings = paddings

    @classmethod
    def prefill(
        cls, model: PreTrainedModel, towers: TowerOutputs, groups: Sequence[Sequence[RunningSample]]
    ) -> tuple["Batch", torch.Tensor]:  # fmt: skip
        """Run each group's prefix once; its samples share the result.

        Returns the batch and the logits [samples, vocabulary] from which each sample's first token is chosen.
        """
        prompts = [group[0].prefix for group in groups]
        longest = max(map(len, prompts))
        paddings = [longest - len(prompt) for prompt in prompts]
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, paddings[row] :] = torch.tensor(prompt)
        cache = empty_cache(model.config)
        seen = [group[0].seen for group in groups]
        logits = _forward(model, ids, cache, paddings, [group[0].offset for group in groups], seen=seen, towers=towers)
        rows = [row for row, group in enumerate(groups) for _ in group]
        take_rows(cache, rows)
        samples = [sample for group in groups for sample in group]
        return cls(samples, cache, [paddings[row] for row in rows]), logits[rows]

    def step(self, model: PreTrainedModel) -> torch.Tensor:
        """Run the model on each sample's last token. Returns the next token's logits [samples, vocabulary]."""
        ids = torch.tensor([[sample.tokens[-1]] for sample in self.samples], dtype=torch.long)
        return _forward(model, ids, self._cache, self._paddings, [sample.offset for sample in self.samples])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the samples in `rows` (at least one), and cut left padding that no row needs."""
        if len(rows) == len(self.samples):
            return
        cut = min(self._paddings[row] for row in rows)
        take_rows(self._cache, rows, cut)
        self._paddings = [self._paddings[row] - cut for row in rows]
        self.samples = [self.samples[row] for row in rows]

    def extend(self, other: "Batch") -> None:
        """Append another batch's samples and their cache rows."""
        length, added = self._cache.get_seq_length(), other._cache.get_seq_length()
        longest = max(length, added)
        append_rows(self._cache, other._cache)
        self._paddings = [padding + longest - length for padding in self._paddings]
        self._paddings += [padding + longest - added for padding in other._paddings]
        self.samples += other.samples


def _forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Cache,
    paddings: list[int],
    offsets: list[int],
    *,
    seen: Sequence[SeenPrompt | None] = (),
    towers: TowerOutputs | None = None,
) -> torch.Tensor:
    """Append `ids` [rows, new] to the cache and return the logits [rows, vocabulary] after the last one.

    `offsets`: for each row, the number added to its tokens' positions. `seen`: in a prefill, each row's prompt if it
    has media, else None. Such a prompt brings its own positions (`layout`), and `towers` embeds its media.
    """
    start = cache.get_seq_length()
    columns = torch.arange(start + ids.shape[1])
    padding = torch.tensor(paddings)[:, None]
    positions = (columns[None, start:] - padding + torch.tensor(offsets)[:, None]).clamp(min=0)
    mask = (columns[None, :] >= padding).long() if any(paddings) else None
    with_media = any(prompt is not None for prompt in seen)
    if with_media or any(offsets):
        positions = positions.repeat(3, 1, 1)  # by time, row and column
    for row, prompt in enumerate(seen):
        if prompt is not None:
            begin, end = paddings[row], paddings[row] + len(prompt.layout.tokens)
            positions[:, row, begin:end] = torch.from_numpy(prompt.layout.positions).long()
    device = model.device
    arguments: dict[str, Any] = {
        "attention_mask": None if mask is None else mask.to(device),
        "position_ids": positions.to(device),
        "past_key_values": cache,
        "use_cache": True,
    }
    with torch.inference_mode():
        language_model: Any = getattr(model.model, "language_model", None)
        if language_model is None:
            logits: torch.Tensor = model(input_ids=ids.to(device), logits_to_keep=1, **arguments).logits[:, -1]
        else:
            inputs: dict[str, Any] = {"input_ids": ids.to(device)}
            if with_media and towers is not None:
                inputs = embed(model, towers, ids, seen, paddings)
            logits = model.lm_head(language_model(**inputs, **arguments).last_hidden_state[:, -1])
    return logits
