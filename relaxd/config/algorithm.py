"""The algorithms' settings: one typed section per algorithm, with its own defaults, chosen by `name`."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, field_validator

from relaxd.config.algorithm_shared import (
    Aggregation,
    ClippedConfig,
    KLEstimator,
    NormalizedConfig,
    PolicyGradientConfig,
    RatioConfig,
)
from relaxd.config.section import Section


class GRPOConfig(NormalizedConfig, ClippedConfig):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), with the usual variants as switches."""

    name: Literal["grpo"] = "grpo"
    """Name of the algorithm, by which a configuration chooses this section."""


class DrGRPOConfig(ClippedConfig):
    """Dr. GRPO (arXiv 2503.20783): GRPO without its biases to short answers and easy prompts."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Name of the algorithm, by which a configuration chooses this section."""
    loss_aggregation: Aggregation = "constant_length"
    """Aggregation of the tokens' losses; the default is that of the paper, which divides by a constant."""

    @property
    def min_samples(self) -> int:
        return 2


class DAPOConfig(NormalizedConfig, ClippedConfig):
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip, dynamic sampling, token mean and overlong shaping."""

    name: Literal["dapo"] = "dapo"
    """Name of the algorithm, by which a configuration chooses this section."""
    clip_high: float = Field(default=0.28, gt=0)
    """The probability ratio is clipped above at 1 + clip_high."""


class GSPOConfig(NormalizedConfig, ClippedConfig):
    """Group Sequence Policy Optimization (arXiv 2507.18071): GRPO with the ratio of whole sequences."""

    name: Literal["gspo"] = "gspo"
    """Name of the algorithm, by which a configuration chooses this section."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """A sequence's ratio is clipped below at 1 - clip_low. A mean over tokens stays close to 1: GRPO's 0.2 would never
    clip."""
    clip_high: float = Field(default=4e-4, gt=0)
    """A sequence's ratio is clipped above at 1 + clip_high."""
    loss_aggregation: Aggregation = "sample_mean"
    """Aggregation of the tokens' losses; the default is that of the paper, the mean over samples."""


class SAPOConfig(NormalizedConfig, RatioConfig):
    """Soft Adaptive Policy Optimization (arXiv 2511.20347): GRPO with a smooth gate instead of a clip."""

    name: Literal["sapo"] = "sapo"
    """Name of the algorithm, by which a configuration chooses this section."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate for tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Steepness of the gate for tokens with a negative advantage; the higher default cuts them off sooner."""
    loss_aggregation: Aggregation = "sample_mean"
    """Aggregation of the tokens' losses; the default is that of the paper, the mean over each sample, then over
    samples."""


class CISPOConfig(NormalizedConfig, RatioConfig):
    """CISPO (MiniMax-M1, arXiv 2506.13585): clips the ratio as a weight, so that no token loses its gradient."""

    name: Literal["cispo"] = "cispo"
    """Name of the algorithm, by which a configuration chooses this section."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """The importance weight is clipped below at 1 - clip_low. 1 means no lower limit, as in the paper."""
    clip_high: float = Field(default=4.0, gt=0)
    """The importance weight is clipped above at 1 + clip_high. ScaleRL (arXiv 2510.13786) finds limits from 4 to 8
    equally good."""


class RLOOConfig(PolicyGradientConfig):
    """REINFORCE Leave-One-Out (arXiv 2402.14740): each sample's baseline is the mean reward of the others."""

    name: Literal["rloo"] = "rloo"
    """Name of the algorithm, by which a configuration chooses this section."""

    @property
    def min_samples(self) -> int:
        return 2

    @property
    def on_policy_only(self) -> str:
        """Reason why samples must come from the newest weights: the loss has no ratio to an old policy. "" if the
        configuration has a correction."""
        return "" if self.correction != "none" else 'it has no ratio to an old policy; or set correction = "tis"'


class ReinforcePlusPlusConfig(ClippedConfig):
    """REINFORCE++ (arXiv 2501.03262): no group, no critic; advantages are normalised over the step."""

    needs_whole_step: ClassVar[bool] = True

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Name of the algorithm, by which a configuration chooses this section."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards for each trained token in between."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal. They still have a gradient, because the group's mean isn't
    subtracted."""


class ReinforcePlusPlusBaselineConfig(ClippedConfig):
    """REINFORCE++-baseline (arXiv 2501.03262): the group's mean as baseline, normalised over the step."""

    needs_whole_step: ClassVar[bool] = True

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Name of the algorithm, by which a configuration chooses this section."""
    kl_estimator: KLEstimator = "k2"
    """Estimator of the KL divergence in the loss; the paper uses k2."""

    @property
    def min_samples(self) -> int:
        return 2


class OPDConfig(NormalizedConfig, ClippedConfig):
    """On-policy distillation (arXiv 2306.13649): a teacher judges every token that the student writes."""

    name: Literal["opd"] = "opd"
    """Name of the algorithm, by which a configuration chooses this section."""
    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the advantages from rewards, which are GRPO's. 0: distillation only; rewards are still reported."""
    distill_coef: float = Field(default=1.0, ge=0)
    """Weight of the teacher's part in the advantages, with the same meaning as in other algorithms."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal. They still have a gradient, which comes from the teacher."""

    @property
    def min_samples(self) -> int:
        return 2 if self.reward_coef > 0 else 1

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.needs_teacher:
            yield (
                "algorithm.distill_coef and algorithm.distill_loss_coef are 0, so the teacher would not count: set one "
                "of them"
            )
        if self.reward_coef == 0 and (self.kl_reward_coef > 0 or self.overlong_buffer > 0):
            yield (
                "algorithm.kl_reward_coef and algorithm.overlong_buffer change rewards, but algorithm.reward_coef is "
                "0, so they would not count: set reward_coef, or use kl_coef"
            )
        if self.reward_coef == 0:
            yield from self.unused(("normalize_std", "std_epsilon"), "algorithm.reward_coef is 0: set reward_coef")


class PPOConfig(ClippedConfig):
    """Proximal Policy Optimization (arXiv 1707.06347) with a critic and generalized advantages (arXiv 1506.02438)."""

    needs_critic: ClassVar[bool] = True

    name: Literal["ppo"] = "ppo"
    """Name of the algorithm, by which a configuration chooses this section."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards for each trained token in between."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalized advantage estimation: decay of later temporal differences. 1: the sum of the following
    rewards minus the critic's value; 0: a single temporal difference."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over all trained tokens of the step."""
    value_clip: float = Field(default=0.2, gt=0)
    """Clip range of values: within a step, a larger change of a value doesn't lower the critic's loss any further."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal. They still have a gradient, because the baseline is the critic's
    value."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.mask_truncated:
            yield (
                "algorithm.mask_truncated is true, but the critic of ppo learns the rewards of all answers, also of "
                "those that were cut: use overlong_buffer instead"
            )
        if self.distill_coef > 0:
            yield (
                f"algorithm.distill_coef is {self.distill_coef:g}, but ppo would sum it over the tokens that follow: "
                "use distill_loss_coef instead"
            )


class OwnConfig(Section):
    """Settings of an algorithm of your own."""

    min_samples: ClassVar[int] = 1
    needs_critic: ClassVar[bool] = False
    on_policy_only: ClassVar[str] = ""

    name: str
    """The algorithm's class, as "package.module:Class". Its module must be in the folder in which the services are
    started, or on PYTHONPATH."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the algorithm's class, which the class's `Config` declares."""

    @property
    def needs_reference(self) -> bool:
        """True: the configuration can't tell whether a user's own algorithm needs a reference; `Algorithm.needs` can.

        A reference service exists if the configuration places one.
        """
        return True

    @property
    def needs_teacher(self) -> bool:
        """True: the configuration can't tell whether a user's own algorithm needs a teacher; `Algorithm.needs` can.

        A teacher exists if the configuration names its model.
        """
        return True

    @field_validator("name")
    @classmethod
    def _is_a_path(cls, name: str) -> str:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise ValueError(f'algorithm.name = "{name}": an algorithm of your own is named "package.module:Class"')
        return name


OWN = "own"
"""Tag by which pydantic selects `OwnConfig`, the section of a user's own algorithm."""
BUILT_IN: dict[str, type[PolicyGradientConfig]] = {
    config.model_fields["name"].default: config
    for config in (
        GRPOConfig,
        DrGRPOConfig,
        DAPOConfig,
        GSPOConfig,
        SAPOConfig,
        CISPOConfig,
        RLOOConfig,
        ReinforcePlusPlusConfig,
        ReinforcePlusPlusBaselineConfig,
        OPDConfig,
        PPOConfig,
    )
}
"""Classes of the [algorithm] section of bundled algorithms, by the algorithm's name."""


def tag_of(section: Any) -> str | None:
    """Return the tag by which pydantic selects an [algorithm] section's class: the algorithm's name, or OWN.

    Returns None if `section` is neither a section nor its TOML table.
    """
    name = section.get("name", "grpo") if isinstance(section, dict) else getattr(section, "name", None)
    return OWN if isinstance(name, str) and ":" in name else name if name is None else str(name)


AlgorithmConfig = Annotated[
    Annotated[GRPOConfig, Tag("grpo")]
    | Annotated[DrGRPOConfig, Tag("dr_grpo")]
    | Annotated[DAPOConfig, Tag("dapo")]
    | Annotated[GSPOConfig, Tag("gspo")]
    | Annotated[SAPOConfig, Tag("sapo")]
    | Annotated[CISPOConfig, Tag("cispo")]
    | Annotated[RLOOConfig, Tag("rloo")]
    | Annotated[ReinforcePlusPlusConfig, Tag("reinforce_plus_plus")]
    | Annotated[ReinforcePlusPlusBaselineConfig, Tag("reinforce_plus_plus_baseline")]
    | Annotated[OPDConfig, Tag("opd")]
    | Annotated[PPOConfig, Tag("ppo")]
    | Annotated[OwnConfig, Tag(OWN)],
    Discriminator(tag_of),
]
"""Type of the [algorithm] section: the settings of the algorithm that `name` chooses, by default GRPO."""

ALGORITHM = TypeAdapter[AlgorithmConfig](AlgorithmConfig)
"""Validates an [algorithm] section without the rest of the configuration."""
