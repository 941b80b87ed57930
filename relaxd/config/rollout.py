"""[rollout]: generation of answers."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from relaxd.config.section import Section
from relaxd.engines import RolloutEngineName


class PartialConfig(Section):
    """Treatment of unfinished answers of engines that leave (docs/partial-rollout.md)."""

    enabled: bool = False
    """Keep unfinished answers on the board, and let another engine continue them. If false, they are generated
    again."""
    save_seconds: float = Field(default=30.0, gt=0)
    """Seconds between two saves of unfinished answers, for replicas that die without notice. A drained or removed
    replica always saves."""
    save_tokens: int = Field(default=1024, ge=1)
    """Number of unsaved tokens of an answer at which the answers of its group are saved."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum number of versions by which the weights that wrote a kept token to be trained may be older than the
    engine's; otherwise the token's group is generated again. Defaults to board.max_staleness."""
    mask_off_policy: bool = False
    """Exclude kept tokens from training if older weights wrote them than those of the engine that continues the
    answer."""


class RolloutConfig(Section):
    """Generation of answers by the inference engines."""

    section: ClassVar[str] = "rollout"

    samples_per_prompt: int = Field(default=8, ge=1)
    """Number of samples in a group (n)."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum length of an answer, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of answers. Log-probs are computed at the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling (top-p) of answers; 1 turns it off."""
    top_k: int = Field(default=0, ge=0)
    """Sample answers from the k likeliest tokens; 0 turns it off."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, such as ["</answer>"]. The text excludes the string, the tokens include it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer and are part of it; empty means the model's own end tokens."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum length of an answer, in tokens: no end token is sampled before."""
    engine: RolloutEngineName = "transformers"
    """Inference engine. transformers: on CPUs. sglang: on GPUs. sglang_external: an SGLang server that runs already,
    whose URL each rollout replica gets (docs/engines.md). scripted: none, and no trainer either; `relaxd rehearse`
    sets it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the engine's weights."""
    max_running_samples: int = Field(default=64, ge=1)
    """Maximum number of samples in progress per engine."""
    threads: int = Field(default=0, ge=0)
    """Number of CPU threads of the engine; 0 means all cores."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs that share each layer's matrices (sglang; for sglang_external, as the servers were started)."""
    memory_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of GPU memory for weights and key-value cache, or of the memory that the gpu_share of judge and teacher
    leaves; 0 lets SGLang decide (sglang)."""
    return_routed_experts: bool = False
    """Store which experts the engine chose for each token, in the column routed_experts (sglang, mixture-of-experts
    models)."""
    partial: PartialConfig = PartialConfig()
    """Treatment of unfinished answers of engines that leave."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang's own options, by their names in ServerArgs, such as attention_backend = "triton"."""

    def problems(self) -> Iterator[str]:
        if self.min_new_tokens > self.max_new_tokens:
            yield (
                f"rollout.min_new_tokens is {self.min_new_tokens}: rollout.max_new_tokens is only {self.max_new_tokens}"
            )
        if "" in self.stop:
            yield "rollout.stop has an empty string, which would end every answer at once"
        if wrong := [token for token in self.stop_token_ids if token < 0]:
            yield f"rollout.stop_token_ids has {wrong[0]}: token ids are not negative"
        if not self.partial.enabled:
            if self.partial != PartialConfig():
                yield "rollout.partial is set, but rollout.partial.enabled is false: set it to true"
        elif self.return_routed_experts:
            yield (
                "rollout.partial.enabled and rollout.return_routed_experts are both true: the experts of tokens that "
                "another engine wrote aren't known, so set one of them to false"
            )
        yield from self.of_other_engines(self.engine)
