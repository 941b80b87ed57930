"""Settings of an optimizer."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from relaxd.config.base import Section, refuse_unused


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    section: ClassVar[str] = "trainer.optimizer"

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate over run.steps after the warm-up. All updates of a step have the same rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up, whatever the number of updates in a step is."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm, above which gradients are clipped; 0 turns clipping off."""
    moments: Literal["float32", "bfloat16", "float8"] = "float32"
    """Element type in which AdamW keeps its two moments. bfloat16: 4 bytes for each parameter instead of 8, and a
    slower update, which still computes in float32 and rounds stochastically (docs/fit.md). float8: 3 bytes, because
    only the first moment is in float8, with a scale for each 32 elements; the second is in bfloat16. A checkpoint of
    another type is converted."""
    cpu_offload: bool = False
    """Keep and update the optimizer's state and main weights in host memory."""

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        if self.schedule == "constant":
            refuse_unused(self, self.section, ("min_lr",), f'{self.section}.schedule is "constant": set another one')
        return self

    @model_validator(mode="after")
    def _offloaded_moments_are_float32(self) -> Self:
        if self.cpu_offload and self.moments != "float32":
            raise ValueError(
                f'{self.section}.moments is "{self.moments}", but {self.section}.cpu_offload is true: moments in the '
                'host\'s memory are "float32"; set one of the two'
            )
        return self

    @property
    def moment_bytes(self) -> float:
        """Bytes of a parameter's two moments, with their scales."""
        return {"float32": 8, "bfloat16": 4, "float8": 3 + 1 / 32}[self.moments]

    @property
    def saved_moment_bytes(self) -> int:
        """Bytes of a parameter's two moments in a checkpoint, where float8 is written as bfloat16."""
        return 8 if self.moments == "float32" else 4
