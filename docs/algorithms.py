"""Writes the tables of docs/algorithms.md: `.venv/bin/python docs/algorithms.py`."""

from pathlib import Path
from typing import NamedTuple

from relaxd.algorithms import ALGORITHMS
from relaxd.config.algorithm import BUILT_IN
from relaxd.config.settings_table import settings
from relaxd.config.write_toml import toml

PAGE = Path(__file__).with_suffix(".md")


class Row(NamedTuple):
    """Facts about an algorithm that its code doesn't say."""

    paper: str
    advantage: str
    loss: str
    use: str


ROWS = {
    "grpo": Row(
        "2402.03300", "(R - mean) / std of the group", "PPO's clip of each token's ratio", "the default; start here"
    ),
    "dr_grpo": Row(
        "2503.20783", "R - mean of the group", "PPO's clip, divided by a constant", "answers that grow without a reason"
    ),
    "dapo": Row(
        "2503.14476", "as GRPO", "PPO's clip, higher above than below", "long answers; entropy that falls too fast"
    ),
    "gspo": Row(
        "2507.18071",
        "as GRPO",
        "PPO's clip of the sequence's ratio: the geometric mean of its tokens'",
        "mixture-of-experts models, whose token ratios are noisy",
    ),
    "sapo": Row(
        "2511.20347", "as GRPO", "a smooth gate of the ratio instead of a clip", "clip fractions above a few percent"
    ),
    "cispo": Row(
        "2506.13585",
        "as GRPO",
        "log-prob, weighted by the clipped ratio: no token loses its gradient",
        "stale samples; rare tokens that matter",
    ),
    "rloo": Row(
        "2402.14740",
        "R - mean of the others' rewards",
        "log-prob: no ratio, no clip",
        "strictly on-policy runs, or with a correction",
    ),
    "reinforce_plus_plus": Row(
        "2501.03262",
        "sum of the later tokens' rewards, normalised over the step",
        "PPO's clip",
        "one sample a prompt",
    ),
    "reinforce_plus_plus_baseline": Row(
        "2501.03262", "R - mean of the group, normalised over the step", "PPO's clip", "prompts of unequal difficulty"
    ),
    "opd": Row(
        "2306.13649",
        "log(p_teacher / p_student) of each token",
        "PPO's clip of each token's ratio",
        "a better model is there that has the same vocabulary ([distillation.md](distillation.md))",
    ),
    "ppo": Row(
        "1707.06347",
        "generalized advantages of the critic's values, normalised over the step",
        "PPO's clip",
        "one sample a prompt; long answers of which the critic can tell where they went wrong",
    ),
}
COMPARED = (
    "clip_low",
    "clip_high",
    "loss_aggregation",
    "normalize_std",
    "drop_zero_variance",
    "kl_estimator",
)
BEGIN, END = "<!-- begin: written by docs/algorithms.py -->\n", "<!-- end -->\n"


def page() -> str:
    """Return the page, with its tables as they should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + _tables() + END + rest.partition(END)[2]


def _tables() -> str:
    text = _line("name", "paper", "advantage", "loss of a token", "needs", "use it for") + _line(*["---"] * 6)
    for name in ALGORITHMS:
        row = ROWS[name]
        paper = f"[{row.paper}](https://arxiv.org/abs/{row.paper})"
        text += _line(f"`{name}`", paper, row.advantage, row.loss, _needs(name), row.use)
    text += "\nDefaults that differ:\n\n" + _line("", *(f"`{name}`" for name in COMPARED))
    text += _line(*["---"] * (len(COMPARED) + 1))
    for name in ALGORITHMS:
        found = [settings(name).get(("algorithm", setting)) for setting in COMPARED]
        text += _line(f"`{name}`", *(f"`{toml(one.default)}`" if one else "" for one in found))
    return text


def _needs(name: str) -> str:
    section = BUILT_IN[name]
    default = section()
    needs = [f"n ≥ {default.min_samples}"] if default.min_samples > 1 else []
    if default.on_policy_only:
        needs.append("`board.max_staleness = 0` or a correction")
    if section.model_fields["distill_coef"].default > 0:
        needs.append("`roles.teacher.model`")
    if section.needs_whole_step:
        needs.append("statistics of the whole step")
    if section.needs_critic:
        needs.append("a critic")
    return ", ".join(needs)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
