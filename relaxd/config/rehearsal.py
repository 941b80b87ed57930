"""Settings of a rehearsal (docs/rehearse.md): speeds of the engines, trainer and broadcasts that it does not run."""

from pydantic import Field

from relaxd.config.base import Section


class RehearsalConfig(Section):
    """Speeds and lengths that `relaxd rehearse` assumes (docs/rehearse.md). Other runs ignore them."""

    median_tokens: int = Field(default=0, ge=0)
    """Median length of an answer, in tokens. Lengths are log-normal, cut off at rollout.max_new_tokens; 0 means an
    eighth of that."""
    spread: float = Field(default=1.0, ge=0)
    """Standard deviation of the lengths' logarithm: with 1.0, one answer in six is longer than 2.7 medians."""
    tokens_per_second: float = Field(default=3000.0, gt=0)
    """Tokens per second that one rollout replica generates when it has many samples in progress."""
    sample_tokens_per_second: float = Field(default=60.0, gt=0)
    """Tokens per second of one sample at most, however few are in progress."""
    train_tokens_per_second: float = Field(default=50_000.0, gt=0)
    """Tokens per second that the whole trainer trains, forward and backward. Forward passes alone are three times as
    fast."""
    update_seconds: float = Field(default=1.0, ge=0)
    """Seconds of an optimizer update."""
    sync_seconds: float = Field(default=2.0, ge=0)
    """Seconds in which the weights reach all engines."""
    tensors: int = Field(default=400, ge=1)
    """Tensors of the model, whose list every engine gets when a weight group forms."""
    moe_layers: int = Field(default=0, ge=0)
    """Layers with experts, for rollout.return_routed_experts and trainer.routing_replay."""
    experts_per_token: int = Field(default=0, ge=0)
    """Experts that a token is sent to in each of these layers."""
    reward_seconds: float = Field(default=0.0, ge=0)
    """Seconds that the reward takes for a sample."""
    success: float = Field(default=0.5, ge=0, le=1)
    """Share of samples with reward 1; the others get 0."""
    redis_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Memory of the Redis that the run will have (its maxmemory)."""

    @property
    def experts(self) -> tuple[int, int]:
        """Layers, and experts of each token in a layer; (0, 0) for a model without."""
        return self.moe_layers, self.experts_per_token
