"""Settings that algorithms share: rewards, corrections, limits, KL and entropy terms, the mean over tokens."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from relaxd.config.section import Section

Aggregation = Literal["token_mean", "sample_mean", "group_mean", "sample_sum", "constant_length"]
Correction = Literal["none", "tis", "icepop"]
KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
DistillEstimator = Literal["k2", "k3", "low_var_kl"]
Candidates = Literal["teacher", "student", "union"]
Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon"]
StudentLogprobs = Literal["current", "rollout"]


class PolicyGradientConfig(Section):
    """Settings that all bundled algorithms have."""

    section: ClassVar[str] = "algorithm"

    needs_whole_step: ClassVar[bool] = False
    """True if advantages are normalised over all groups of a step."""
    needs_critic: ClassVar[bool] = False
    """True if the algorithm trains a critic and the trainer computes advantages from its values."""

    name: str = ""
    """Name of the algorithm, by which a configuration chooses this section."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal and publish the next prompt instead (DAPO's dynamic sampling). With
    mask_truncated, groups whose answers were all cut off are dropped, too."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Overlong shaping (DAPO, arXiv 2503.14476, equation 13): the reward of an answer falls linearly, by up to
    overlong_penalty, over its last overlong_buffer tokens before overlong_limit. 0 turns it off."""
    overlong_limit: int = Field(default=0, ge=0)
    """Answer length, in tokens, from which the full penalty applies; usually rollout.max_new_tokens."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Largest penalty of overlong shaping, which is subtracted from the reward."""
    mask_truncated: bool = False
    """Give no advantage to answers that a limit such as rollout.max_new_tokens cut off (DAPO's overlong filtering).
    They still count in their group's mean and in the divisors of the loss."""
    correction: Correction = "none"
    """Weight each token's policy-gradient term by w, its probability under the trainer at the start of the step divided
    by that under the engine. tis: w, truncated (Yao et al. 2025). icepop: w, and 0 outside two limits (arXiv
    2510.18855)."""
    tis_clip_low: float = Field(default=0.0, ge=0)
    """Minimum of a token's weight w with correction = "tis"."""
    tis_clip: float = Field(default=2.0, gt=0)
    """Maximum of a token's weight w with correction = "tis"."""
    icepop_low: float = Field(default=0.5, ge=0)
    """With correction = "icepop": leave out tokens whose weight w is smaller than this (the paper's alpha)."""
    icepop_high: float = Field(default=5.0, gt=0)
    """With correction = "icepop": leave out tokens whose weight w is larger than this (the paper's beta)."""
    veto_high: float = Field(default=100.0, ge=0)
    """Leave out tokens whose current probability is more than this many times the engine's: a single one could have a
    larger gradient than all other tokens of the step. 0 turns the limit off."""
    veto_low: float = Field(default=0.0, ge=0, lt=1)
    """Leave out tokens whose current probability is less than this share of the engine's."""
    veto_sequences: bool = False
    """Leave out the whole sequence if one of its tokens is beyond veto_high or veto_low."""
    opsm_delta: float = Field(default=0.0, ge=0)
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): leave out tokens with a negative advantage in
    sequences whose mean of log(engine's probability / current probability) is above this. 0 turns it off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference (the initial model) in the loss. With 0 no reference is kept."""
    kl_estimator: KLEstimator = "low_var_kl"
    """Estimator of the KL divergence that kl_coef weights (Schulman 2020, "Approximating KL divergence"); low_var_kl is
    k3, clamped."""
    kl_unbiased: bool = False
    """Multiply the KL estimate of kl_coef by the probability ratio to the old policy, so that its gradient is unbiased,
    too (DeepSeek-V3.2, arXiv 2512.02556)."""
    kl_reward_coef: float = Field(default=0.0, ge=0)
    """Subtract this many times the KL divergence to the reference, estimated as the sum of log(student's probability /
    reference's) over an answer's tokens, from its reward. student_logprobs says whose probability is the student's."""
    distill_coef: float = Field(default=0.0, ge=0)
    """On-policy distillation (arXiv 2306.13649) in the advantages: subtract this many times log(student's probability /
    teacher's) from each token's; student_logprobs says whose probability is the student's. Needs
    roles.teacher.model."""
    student_logprobs: StudentLogprobs = "current"
    """The student's log-probs in distill_coef and kl_reward_coef. current: the trainer's, under its current weights
    (kl_reward_coef: at the step's beginning). rollout: the engine's; with stale samples the expected gradient is then
    not that of the divergence."""
    distill_loss_coef: float = Field(default=0.0, ge=0)
    """On-policy distillation in the loss: weight of the KL divergence to the teacher, estimated at the sampled tokens,
    or computed over distill_top_k. Needs roles.teacher.model."""
    distill_estimator: DistillEstimator = "k2"
    """Estimator of distill_loss_coef at the sampled tokens. k2 has the gradient of KL(student || teacher), like
    distill_coef; k3 has that of KL(teacher || student); low_var_kl is k3, clamped."""
    distill_top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens in each place over which the divergence of distill_loss_coef is computed; all other
    tokens count as one. 0: estimate it at the sampled token instead."""
    distill_candidates: Candidates = "teacher"
    """Model whose likeliest tokens distill_top_k selects: the teacher, the student, or both. The student's come from
    the weights at the beginning of the step with roles.teacher.placement = "trainer", and from the engine that
    generated the token with "service", which needs roles.teacher.engine = "megatron"."""
    distill_divergence: Divergence = "reverse_kl"
    """Divergence between student and teacher over distill_top_k's tokens. reverse_kl: KL(student || teacher).
    forward_kl: KL(teacher || student). jensen_shannon: half of the KL divergences of both to their mean."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss, which rewards a high entropy of the policy."""
    loss_aggregation: Aggregation = "token_mean"
    """Aggregation of the tokens' losses. token_mean: mean over all tokens of the step (DAPO). sample_mean: mean over
    each sample's tokens, then over samples (GRPO). group_mean: mean over each group's tokens, then over groups.
    sample_sum: sum over each sample's tokens, then mean over samples. constant_length: that sum divided by
    constant_length (Dr. GRPO). A sample's tokens are those of all its sequences, so a branched conversation counts
    once."""
    constant_length: int = Field(default=1024, ge=1)
    """Divisor of loss_aggregation = "constant_length", in tokens."""

    @property
    def needs_reference(self) -> bool:
        """True if the loss or the reward has a KL term."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_teacher(self) -> bool:
        """True if advantages or loss use a teacher."""
        return self.distill_coef > 0 or self.distill_loss_coef > 0

    @property
    def on_policy_only(self) -> str:
        """Reason why the algorithm needs samples of the newest weights and one update per step; empty if it doesn't."""
        return ""

    def problems(self) -> Iterator[str]:
        for low, high in (("icepop_low", "icepop_high"), ("tis_clip_low", "tis_clip")):
            if getattr(self, low) >= getattr(self, high):
                yield (
                    f"algorithm.{low} is {getattr(self, low):g}: it must be less than {high}, {getattr(self, high):g}"
                )
        if 0 < self.veto_high <= 1:
            yield f"algorithm.veto_high is {self.veto_high:g}: it must be more than 1, or 0 for no limit"
        if self.overlong_buffer > 0 and self.overlong_limit <= self.overlong_buffer:
            yield (
                f"algorithm.overlong_limit is {self.overlong_limit}: with overlong_buffer = {self.overlong_buffer} it "
                "must be longer; set it to rollout.max_new_tokens"
            )
        correction, mean = self.correction, self.loss_aggregation
        no_sum, no_limit = self.distill_coef == self.kl_reward_coef == 0, self.veto_high == self.veto_low == 0
        for is_off, names, reason in (
            (correction != "tis", ("tis_clip_low", "tis_clip"), f'correction is "{correction}": set "tis"'),
            (correction != "icepop", ("icepop_low", "icepop_high"), f'correction is "{correction}": set "icepop"'),
            (
                self.overlong_buffer == 0,
                ("overlong_limit", "overlong_penalty"),
                "overlong_buffer is 0, which turns shaping off: set it",
            ),
            (no_limit, ("veto_sequences",), "veto_high and algorithm.veto_low are 0: set one of them"),
            (self.kl_coef == 0, ("kl_unbiased",), "kl_coef is 0: set kl_coef"),
            (not self.needs_reference, ("kl_estimator",), "kl_coef is 0: set kl_coef"),  # the metric kl has it, too
            (self.distill_loss_coef == 0, ("distill_estimator",), "distill_loss_coef is 0: set distill_loss_coef"),
            (no_sum, ("student_logprobs",), "distill_coef and algorithm.kl_reward_coef are 0: set one of them"),
            (mean != "constant_length", ("constant_length",), f'loss_aggregation is "{mean}": set "constant_length"'),
        ):
            if is_off:
                yield from self.unused(names, f"algorithm.{reason}")
        if self.needs_whole_step and self.mask_truncated:
            yield (
                f"algorithm.mask_truncated is true, but {self.name} subtracts the step's mean from every advantage, "
                "also from those of answers that were cut: use overlong_buffer instead"
            )
        if self.kl_coef > 0 and self.kl_reward_coef > 0:
            yield (
                f"algorithm.kl_coef is {self.kl_coef:g} and algorithm.kl_reward_coef is {self.kl_reward_coef:g}: the "
                "divergence counts in the loss or in the reward; set one of them to 0"
            )
        if self.distill_coef > 0 and self.distill_loss_coef > 0:
            yield (
                f"algorithm.distill_coef is {self.distill_coef:g} and algorithm.distill_loss_coef is "
                f"{self.distill_loss_coef:g}: the teacher counts in the advantages or in the loss; set one of them to 0"
            )
        if self.distill_top_k > 0 and self.distill_loss_coef == 0:
            yield (
                f"algorithm.distill_top_k is {self.distill_top_k}, but algorithm.distill_loss_coef is 0: only the loss "
                "compares several tokens in a place, because as an advantage their divergence, which is the same "
                "whatever token was sampled, has no gradient in expectation: set distill_loss_coef, and "
                "distill_coef = 0"
            )
        if self.distill_top_k == 0:
            reason = "algorithm.distill_top_k is 0, which compares the sampled tokens only: set distill_top_k"
            yield from self.unused(("distill_candidates", "distill_divergence"), reason)
        else:
            reason = f"with algorithm.distill_top_k = {self.distill_top_k} nothing is estimated: set distill_divergence"
            yield from self.unused(("distill_estimator",), reason)

    @property
    def min_samples(self) -> int:
        """Minimum number of samples of a group: 2 if the algorithm compares samples with each other, else 1."""
        return 1


class RatioConfig(PolicyGradientConfig):
    """Settings of algorithms with a probability ratio to an old policy."""

    old_logprobs: Literal["rollout", "current"] = "rollout"
    """Log-probs in the denominator of the ratio. rollout: the engine's. current: the trainer's at the step's beginning,
    computed before the first of several updates (trainer.mini_batches, epochs); with a single update the ratio is 1."""
    correction: Correction = "none"
    """Weight each token's policy-gradient term by w, its probability under the trainer at the start of the step divided
    by that under the engine. tis: w, truncated (Yao et al. 2025). icepop: w, and 0 outside two limits (arXiv
    2510.18855). Both need old_logprobs = "current": with "rollout" the same ratio would count twice."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.correction != "none" and self.old_logprobs == "rollout":
            yield (
                f'algorithm.correction is "{self.correction}" and algorithm.old_logprobs is "rollout": both weight a '
                'token by its ratio to the engine. Use old_logprobs = "current", or correction = "none"'
            )


class ClippedConfig(RatioConfig):
    """Settings of algorithms with PPO's clipped objective."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The probability ratio is clipped above at 1 + clip_high. DAPO (arXiv 2503.14476) uses 0.28."""
    dual_clip: float = Field(default=0.0, ge=0)
    """For tokens with a negative advantage, also clip the probability ratio above at this (Dual-Clip PPO, arXiv
    1912.09729), for example 3. 0 turns it off."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if 0 < self.dual_clip <= 1:
            yield f"algorithm.dual_clip is {self.dual_clip:g}: it must be more than 1, or 0 for none"


class NormalizedConfig(PolicyGradientConfig):
    """Settings of algorithms whose advantages are relative to the group's mean and standard deviation."""

    normalize_std: bool = True
    """Divide advantages by the group's standard deviation."""
    std_epsilon: float = Field(default=1e-6, gt=0)
    """Number added to the group's standard deviation before advantages are divided by it."""

    @property
    def min_samples(self) -> int:
        return 2

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.normalize_std:
            yield from self.unused(("std_epsilon",), "algorithm.normalize_std is false: set true")
