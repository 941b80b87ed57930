"""Losses written once more, token by token in Python's floats, without relaxd's code.

`frozen` are the log-probs for what carries no gradient (weights, masks, the old policy of one update): a difference of
two losses of other `new` and the same `frozen` is then a difference quotient of the gradient.
"""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Micro:
    """A micro-batch of tokens, as lists."""

    frozen: list[float]
    rollout: list[float]
    ref: list[float]
    teacher: list[float]
    advantage: list[float]
    mask: list[float]
    weight: list[float]
    entropy: list[float]
    sequence: list[int]
    old: list[float] | None = None
    """The trainer's log-probs at the beginning of a step of several updates."""
    sums: dict[str, float] = field(default_factory=dict)


def formula(s: dict[str, Any], micro: Micro, new: list[float]) -> float:
    """Return the loss by settings `s`; fill `micro.sums`."""
    tokens = [t for t in range(len(new)) if micro.mask[t]]
    at_start = micro.old or micro.frozen
    has_ratio = s["name"] != "rloo"
    old = micro.rollout if has_ratio and s["old_logprobs"] == "rollout" else at_start
    loss = 0.0
    names = ("ratio", "clip_fraction", "veto_fraction", "opsm_fraction", "kl", "teacher_kl", "entropy")
    sums = dict.fromkeys((*names, "correction_weight", "correction_fraction"), 0.0)
    extreme = {t for t in tokens if _extreme(s, micro.frozen[t] - micro.rollout[t], micro.frozen[t] - old[t])}
    if s["veto_sequences"]:
        extreme = {t for t in tokens if any(micro.sequence[u] == micro.sequence[t] for u in extreme)}
    means = {}
    for sequence in set(micro.sequence):
        own = [t for t in tokens if micro.sequence[t] == sequence]
        means[sequence] = (
            mean_of([new[t] - old[t] for t in own]),
            mean_of([micro.rollout[t] - micro.frozen[t] for t in own]),
        )
    for t in tokens:
        a = micro.advantage[t]
        if s["student_logprobs"] == "current":  # the divergence from the teacher, under the current weights
            a -= s["distill_coef"] * (micro.frozen[t] - micro.teacher[t])
        r = math.exp(limit(new[t] - old[t], -20, 20))
        frozen_r = math.exp(limit(micro.frozen[t] - old[t], -20, 20))
        mean, moved = means[micro.sequence[t]]
        policy, ratio, clipped = policy_term(s, a, r, frozen_r, math.exp(limit(mean, -20, 20)), new[t])
        w, limited = correction(s, math.exp(limit(at_start[t] - micro.rollout[t], -20, 20)))
        policy *= w
        if t in extreme:
            policy, sums["veto_fraction"] = 0.0, sums["veto_fraction"] + 1
        if 0 < s["opsm_delta"] < moved and a < 0:
            policy, sums["opsm_fraction"] = 0.0, sums["opsm_fraction"] + 1
        kl = divergence(s["kl_estimator"], new[t] - micro.ref[t])
        unbiased = 0.0 if t in extreme else r
        term = policy + s["kl_coef"] * kl * (unbiased if s["kl_unbiased"] else 1.0)
        term -= s["entropy_coef"] * micro.entropy[t]
        disagreement = new[t] - micro.teacher[t]
        term += s["distill_loss_coef"] * divergence(s["distill_estimator"], disagreement)
        loss += micro.weight[t] * term
        for name, value in (
            ("ratio", ratio),
            ("clip_fraction", clipped),
            ("correction_weight", w),
            ("correction_fraction", limited),
            ("kl", kl),
            ("teacher_kl", disagreement),
            ("entropy", micro.entropy[t]),
        ):
            sums[name] += value
    micro.sums = sums
    return loss


def policy_term(
    s: dict[str, Any], a: float, r: float, frozen_r: float, sequence_ratio: float, logprob: float
) -> tuple[float, float, bool]:
    """Loss, reported ratio, and whether the token counts as clipped."""
    name = s["name"]
    if name == "rloo":
        return -a * logprob, r, False
    if name == "cispo":
        weight = limit(frozen_r, 1 - s["clip_low"], 1 + s["clip_high"])
        return -weight * a * logprob, frozen_r, weight != frozen_r
    if name == "sapo":
        tau = s["tau_positive"] if a > 0 else s["tau_negative"]
        p = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * p * a, r, 4 * p * (1 - p) < 0.9
    if name == "gspo":
        r = sequence_ratio
    high, low = 1 + s["clip_high"], 1 - s["clip_low"]
    objective = min(r * a, limit(r, low, high) * a)
    if s["dual_clip"] and a < 0:
        objective = max(objective, s["dual_clip"] * a)
    return -objective, r, (a > 0 and r > high) or (a < 0 and r < low)


def correction(s: dict[str, Any], w: float) -> tuple[float, bool]:
    """Weight of one token by TIS and IcePop, and whether it was limited."""
    if s["correction"] == "tis":
        limited = limit(w, s["tis_clip_low"], s["tis_clip"])
        return limited, limited != w
    if s["correction"] == "icepop":
        inside = s["icepop_low"] <= w <= s["icepop_high"]
        return (w if inside else 0.0), not inside
    return 1.0, False


def divergence(estimator: str, d: float) -> float:
    """KL of one token from d = log(policy / reference)."""
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        return math.exp(-d) - 1 + d
    d = limit(d, -20, 20)
    return limit(math.exp(-d) - 1 + d, -10, 10)


def mean_of(values: list[float]) -> float:
    """The mean, 0 of nothing."""
    return sum(values) / max(len(values), 1)


def limit(value: float, low: float, high: float) -> float:
    """The nearest value between two limits."""
    return max(low, min(high, value))


def _extreme(s: dict[str, Any], to_engine: float, to_old: float) -> bool:
    high = s["veto_high"] or math.inf
    return any(math.exp(log) > high or math.exp(log) < s["veto_low"] for log in (to_engine, limit(to_old, -20, 20)))
