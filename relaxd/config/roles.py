"""Placement and sizes of roles that only some runs need."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from relaxd.config.base import Section
from relaxd.config.optimizer import OptimizerConfig


class FrozenModelConfig(Section):
    """A model that isn't trained and gives log-probs of the policy's tokens. It has the trainer's dtype and kernels."""

    section: ClassVar[str]
    """Name of the section, for errors."""

    model: str = ""
    """A Hugging Face folder, the name of a fetched model, or a hub name."""
    placement: Literal["trainer", "service"] = "service"
    """trainer: in the trainer's ranks, beside the model that they train. service: in replicas of its own."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks of a replica that share each layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks of a replica that share the layers."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks of a replica that share each micro-batch's tokens, and its heads within attention."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks of a replica that share the experts."""
    micro_batch_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of a replica's packed micro-batch; 0 means trainer.micro_batch_tokens."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank of a replica; 0 divides all cores among the ranks."""

    @property
    def ranks(self) -> int:
        """Ranks of a replica. More replicas, not more ranks, work on different groups."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @model_validator(mode="after")
    def _experts_divide(self) -> Self:
        sharing = self.tensor_parallel * self.context_parallel
        if sharing % self.expert_parallel:
            raise ValueError(
                f"{self.section}.expert_parallel is {self.expert_parallel}: it must divide tensor_parallel x "
                f"context_parallel = {sharing}"
            )
        return self


class ReferenceConfig(FrozenModelConfig):
    """The reference model of the KL term, frozen. It has the trainer's dtype and kernels."""

    section: ClassVar[str] = "roles.reference"

    model: str = ""
    """A Hugging Face folder, the name of a fetched model, or a hub name: a model of any supported architecture and
    size, with the vocabulary of the trained model. Empty: the initial model."""
    placement: Literal["trainer", "service"] = "trainer"
    """trainer: in the trainer's ranks, beside the model that they train. service: in reference replicas of their own,
    which write the column ref_logprobs; the trainer then keeps no reference. Sizes and threads are the replicas'."""


class TeacherConfig(FrozenModelConfig):
    """The teacher of on-policy distillation. It has the trainer's dtype and kernels."""

    section: ClassVar[str] = "roles.teacher"

    model: str = ""
    """A Hugging Face folder, the name of a fetched model, or a hub name: a model of any supported architecture and
    size, with the vocabulary of the trained model."""
    placement: Literal["trainer", "service"] = "service"
    """service: in teacher replicas of its own, which write columns. trainer: in the trainer's ranks, beside the model
    that they train, which can then also be asked for its own likeliest tokens (algorithm.distill_candidates). Sizes and
    threads are the replicas'."""


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, and its learning-rate schedule."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate; usually above the policy's, because the critic has to keep up with it."""


class CriticConfig(Section):
    """The critic of algorithm.name = "ppo": a model like the trained one, with one value instead of logits. It has the
    trainer's parallel sizes, dtype and kernels."""

    placement: Literal["trainer"] = "trainer"
    """trainer: in the trainer's ranks, beside the model that they train. There is no other place yet."""
    model: str = ""
    """Folder or name of the model from which it starts, which must have the architecture of model.path; empty: that
    model. Its value head starts with zeros."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """The optimizer of the critic."""


class RolesConfig(Section):
    """Settings of roles that only some runs need."""

    reference: ReferenceConfig = ReferenceConfig()
    """The reference model of the KL term."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher of on-policy distillation."""
    critic: CriticConfig = CriticConfig()
    """The critic."""

    @property
    def frozen(self) -> dict[str, FrozenModelConfig]:
        """The sections of frozen models, by the role that holds the model."""
        return {"reference": self.reference, "teacher": self.teacher}
