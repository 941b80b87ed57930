"""The report's figure of the mismatch between engine and trainer."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

PANELS = {
    "|log-prob of the trainer - of the engine|": (
        ("logprob_difference_max", "same weights: largest", "#93c5fd", "-"),
        ("logprob_difference_p99", "same weights: 99th percentile", "#2563eb", "--"),
        ("logprob_difference", "same weights: mean", "#2563eb", "-"),
        ("policy_drift_p99", "all tokens: 99th percentile", "#f59e0b", "--"),
        ("policy_drift", "all tokens: mean", "#f59e0b", "-"),
    ),
    "KL(engine, trainer), and what a correction limits": (
        ("logprob_difference_kl", "KL, same weights", "#2563eb", "-"),
        ("policy_drift_kl", "KL, all tokens", "#f59e0b", "-"),
        ("correction_fraction", "share of tokens truncated or left out", "#dc2626", ":"),
    ),
}
"""Step metrics by panel: name, label, color, line."""


def draw_mismatch(steps: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Draw the log-prob differences between engine and trainer over the steps, as PNG; None if no step has them.

    Args:
        steps: the steps' metrics. Lines skip steps that lack a metric (without a token under the step's own weights).
    """
    if not any(step.get("policy_drift") is not None for step in steps):
        return None
    from matplotlib.figure import Figure  # slow to import, and only needed here
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for name, label, color, style in lines:
            # A logarithmic axis cannot show 0.
            points = [(step["step"], step[name]) for step in steps if (step.get(name) or 0) > 0]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=color, linewidth=1.4, marker=".", label=label)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("optimizer step")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=7, loc="best")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
