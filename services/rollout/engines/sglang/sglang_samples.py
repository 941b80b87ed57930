"""Requests and samples of an SGLang engine, their media, and the conversion to and from SGLang's messages.

SGLang's model is patched to accept the media. Each time step of a video is a separate image, as in the tower. Items of
images contain patches of uint8 pixels, which are normalised on the device: float32 values of all frames would be eight
times as large, in every message of a group's samples and in the scheduler's memory. Items of sounds contain audio
samples; the scheduler's process computes the spectrogram.
"""

import copy
import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.managers import mm_utils
from sglang.srt.managers.io_struct import BatchTokenIDOutput, TokenizedGenerateReqInput, wrap_as_pickle
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.sampling.sampling_params import SamplingParams

from relaxd.data.towers import normalised, spectrogram
from relaxd.data.vision import VisionModel
from relaxd.models.shape import expert_dtype
from services.rollout.engines.request_types import FinishReason, Output, Request, Sampling, cut_at_stop, end_across
from services.rollout.engines.seen_prompts import HeardSound, SeenFrame, SeenPrompt
from services.rollout.engines.sglang.schedulers import prefix_key

SHARED_PREFIX_TOKENS = 64
"""Minimum prompt length for prefilling the prompt once before a request's samples start, in tokens."""
PREFIX = "prefix"
"""Suffix of the id of a message that prefills a prompt. Ids of samples' messages end with the sample's index."""


@dataclass(eq=False, kw_only=True)
class SGLangSample:
    """State of a sample that is running or waits to start."""

    index: int
    begun: int = 0
    """Number of tokens that the sample had before the request."""
    tokens: list[int] = field(default_factory=list)
    """Token ids of the whole sample, including tokens from before the request."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the tokens that this request generated."""
    likeliest: list[list[int]] = field(default_factory=list)
    """Ids of the likeliest tokens at each new token's position, if requested."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (number of tokens, version), ascending: the version generated the tokens after this number."""
    spans_weight_update: bool = False
    finish_reason: FinishReason | None = None
    stopped_at: str = ""
    """Stop string that ended the sample; empty if none did."""
    routed_experts: "np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]] | None" = None
    reported: int = 0
    """Number of tokens reported to the caller, including tokens from before the request."""

    @classmethod
    def of(cls, request: Request, index: int) -> "SGLangSample":
        """Create sample `index` of a request."""
        tokens = list(request.tokens_of(index))
        return cls(index=index, begun=len(tokens), tokens=tokens, reported=len(tokens))

    def text(self, decode: Callable[[list[int]], str]) -> str:
        """Return the text of the whole sample, without the end token or stop string."""
        if self.stopped_at:
            return cut_at_stop(decode(self.tokens), [self.stopped_at])
        return decode(self.tokens[:-1] if self.finish_reason == "stop" else self.tokens)

    def versions(self, start: int) -> list[int]:
        """Return the weight version of each token from index `start` on; this request must have generated them."""
        versions: list[int] = []
        ends = [first for first, _ in self.marks[1:]] + [len(self.tokens)]
        for (first, version), end in zip(self.marks, ends, strict=True):
            versions += [version] * (min(end, len(self.tokens)) - max(first, start))
        return versions


@dataclass(eq=False)
class SGLangRequest:
    """A generation request with the state of its samples."""

    request: Request
    samples: list[SGLangSample]
    end_ids: frozenset[int]
    shares_prefix: bool
    """True while the prompt must be prefilled before the samples start."""
    unfinished: int
    """Number of samples that have not ended."""
    aborted: bool = False
    """True if the request was aborted, so that samples that have not started must not start."""
    media: str = ""
    """Text that identifies the prompt's media, for prefix-cache keys; empty without media."""
    mm_inputs: Any = None
    """The prompt's media in SGLang's form, pickled once for all samples; None without media."""

    @classmethod
    def of(cls, request: Request, end_ids: frozenset[int]) -> "SGLangRequest":
        """Create a request that has not started; `end_ids`: the model's end tokens."""
        samples = [SGLangSample.of(request, index) for index in request.samples]
        shares = len(samples) > 1 and len(request.prompt_tokens) >= SHARED_PREFIX_TOKENS
        stop_ids = frozenset(request.sampling.stop_token_ids) or end_ids
        return cls(request, samples, stop_ids, shares, len(samples))

    def take_media(self, prompt: SeenPrompt | None) -> None:
        """Set the prompt's media; None for a prompt without media."""
        if prompt is not None:
            self.media = prompt.identity
            self.mm_inputs = wrap_as_pickle(to_sglang(prompt, max(sample.begun for sample in self.samples)))

    def messages(self, key: str, *, routed_experts: bool) -> Iterator[tuple[str, TokenizedGenerateReqInput]]:
        """Yield (id, message) to send to the scheduler next: for the prompt alone, or for all samples.

        `key` is the key of the weights in the prefix cache.
        """
        if self.shares_prefix:
            params = SamplingParams(max_new_tokens=0)
            yield self._message(PREFIX, (), params, key, logprobs=False, routed_experts=False)
            return
        sampling = self.request.sampling
        for sample in self.samples:
            params = SamplingParams(
                max_new_tokens=sampling.max_new_tokens - sample.begun,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                stop_token_ids=set(self.end_ids),
                ignore_eos=sampling.ignore_eos,
                stop=list(sampling.stop),
                min_new_tokens=max(0, sampling.min_new_tokens - sample.begun),
                sampling_seed=sample_seed(sampling.seed, sample.index),
                stream_interval=self.request.report_every if self.request.stream else None,
            )
            tokens = sample.tokens[: sample.begun]
            # Indices have equal lengths because the scheduler's abort matches prefixes of ids.
            yield self._message(
                f"{sample.index:04d}", tokens, params, key, logprobs=True, routed_experts=routed_experts
            )

    def _message(
        self,
        part: str,
        begun: Sequence[int],
        params: SamplingParams,
        key: str,
        *,
        logprobs: bool,
        routed_experts: bool,
    ) -> tuple[str, TokenizedGenerateReqInput]:
        params.normalize(StopLengths)
        rid = f"{self.request.request_id}:{part}"
        message = TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array("q", (*self.request.prompt_tokens, *begun)),
            input_embeds=None,
            mm_inputs=self.mm_inputs,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=logprobs,
            logprob_start_len=-1,
            top_logprobs_num=self.request.likeliest if logprobs else 0,
            token_ids_logprob=None,
            stream=self.request.stream and part != PREFIX,
            return_routed_experts=routed_experts,
            extra_key=prefix_key(key, self.media),
        )
        return rid, message


class StopLengths:
    """Replacement for the tokenizer with which SGLang computes the lengths of stop strings in tokens."""

    @staticmethod
    def encode(text: str, *, add_special_tokens: bool) -> bytes:
        """Return the bytes of a text as tokens. Sampled tokens may split the text into more tokens than a tokenizer."""
        return text.encode()


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of one sample. SGLang uses it only with enable_deterministic_inference."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def add_output(
    sample: SGLangSample,
    output: BatchTokenIDOutput,
    row: int,
    sampling: Sampling,
    decode: Callable[[list[int]], str],
    *,
    experts: int,
) -> str:
    """Append the tokens in one row of the scheduler's output to a sample.

    Returns the reason if the request failed, else "".
    """
    assert output.output_ids is not None
    stop, checked = sampling.stop, len(sample.tokens)
    sample.tokens += output.output_ids[row]
    if output.output_token_logprobs_val is not None:
        new = output.output_token_logprobs_val[row]
        sample.logprobs += new
        if len(new) and not np.isfinite(np.asarray(new, dtype=np.float64)).all():
            return "the model's logits are not finite: its weights or its input are broken"
    if output.output_top_logprobs_idx is not None:
        sample.likeliest += [list(ids) for ids in output.output_top_logprobs_idx[row]]
    if found := end_across(sample.tokens, sample.begun, checked, stop, sampling.min_new_tokens, decode):
        length, sample.stopped_at = found
        new = length - sample.begun
        del sample.tokens[length:], sample.logprobs[new:], sample.likeliest[new:]
        sample.finish_reason = "stop"
        return ""
    reason = output.finished_reasons[row]
    if reason is None:
        return ""
    if reason["type"] == "abort" and reason.get("status_code"):
        return str(reason.get("message"))
    if reason.get("matched") in stop:
        sample.stopped_at = reason["matched"]
    elif isinstance(reason.get("matched"), str):
        return f"the model's output is broken: {reason['matched']}"
    if output.routed_experts is not None and output.routed_experts[row] is not None:
        chosen = output.routed_experts[row].numpy()
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < experts:
            return f"SGLang routed tokens to experts {chosen.min()} to {chosen.max()}: the model has {experts}"
        sample.routed_experts = chosen.astype(expert_dtype(experts))
    kinds: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    sample.finish_reason = kinds[reason["type"]]
    return ""


def aborted_outputs(group: SGLangRequest) -> list[Output]:
    """Return an empty output with finish reason "abort" for each sample of a request."""
    return [Output(sample.index, finish_reason="abort") for sample in group.samples]


def to_sglang(prompt: SeenPrompt, more: int) -> MultimodalProcessorOutput:
    """Return a prompt's media, with the positions of its tokens and of `more` tokens after it.

    The result contains relaxd's hashes, places and positions, so that SGLang computes none.
    """
    items = [
        MultimodalDataItem(hash=int(item.sha256, 16), offsets=item.spans, **_content(item)) for item in prompt.items
    ]
    return MultimodalProcessorOutput(
        mm_items=items,
        im_token_id=prompt.vision.tokens.token,
        audio_token_id=prompt.vision.tokens.audio,
        # SGLang continues from the last position here for the answer of a retracted request.
        mrope_positions=torch.from_numpy(prompt.positions(more + 1)),
        mrope_position_delta=torch.tensor([[prompt.offset]]),
    )


def _content(item: SeenFrame | HeardSound) -> dict[str, Any]:
    if isinstance(item, HeardSound):
        return {"modality": Modality.AUDIO, "feature": item.samples}
    grid = {"image_grid_thw": torch.tensor([item.grid])}
    return {"modality": Modality.IMAGE, "feature": item.patches, "model_specific_data": grid}


def take_media(model: Any, vision: VisionModel, device: torch.device) -> None:
    """Patch a model so that its towers accept the items of `to_sglang`."""
    model = getattr(model, "thinker", model)  # Qwen3-Omni is a model within a model
    look = model.get_image_feature

    def look_at_cut(items: Sequence[MultimodalDataItem]) -> torch.Tensor:
        normal = [copy.copy(item) for item in items]
        for item in normal:
            item.feature = normalised(torch.from_numpy(item.feature).to(device), vision)
        found: torch.Tensor = look(normal)
        return found

    def hear(items: Sequence[MultimodalDataItem]) -> torch.Tensor:
        """Run the audio tower on each sound alone. In a batch with a longer sound, the tower's output for a sound of
        less than a second would differ."""
        assert vision.sound is not None  # or the prompt would have been refused
        tower, rows = model.audio_tower, []
        for item in items:
            features = spectrogram(item.feature, vision.sound).to(device, tower.dtype)
            lengths = torch.tensor([features.shape[1]], device=device)
            rows.append(tower(features, feature_lens=lengths).last_hidden_state)
        return torch.cat(rows)

    model.get_image_feature = look_at_cut
    model.get_audio_feature = hear


def forget_features() -> None:
    """Clear SGLang's cache of tower outputs. Its keys are hashes of items and don't depend on the weights.

    All ranks must clear it after the same version, because they run the towers together.
    """
    if mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()
