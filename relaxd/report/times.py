"""The report's section on time: a figure and tables."""

import base64
import html
import io
from collections.abc import Sequence

from relaxd.report.step_times import GROUP, SHARES, TRAINER, Steps, mean_rows, part_seconds, share_rows

MAX_BARS = 120


def render_times(steps: Steps, wall_seconds: float | None) -> str:
    """Render the section as HTML; empty if no step has times.

    Args:
        steps: the steps' metrics.
        wall_seconds: duration of the whole run if known, to show the time outside of steps.
    """
    if (image := draw_times(steps)) is None:
        return ""
    data = base64.b64encode(image).decode()
    parts = [f'<h2>Where the time went</h2><img alt="Parts of each step" src="data:image/png;base64,{data}">']
    total = sum(step.get("step_seconds") or 0.0 for step in steps)
    if wall_seconds:
        parts.append(
            f"<p>{total:.1f} s in {len(steps)} steps, {max(0.0, wall_seconds - total):.1f} s outside of them: start, "
            "first weights, evaluations, export.</p>"
        )
    parts.append('<div class="times">')
    for whole in (TRAINER, GROUP):
        rows = [
            f'<tr><td><i style="background:{part.color}"></i>{html.escape(part.label)}</td>'
            f"<td>{seconds:.3f}</td><td>{share:.1%}</td></tr>"
            for part, seconds, share in mean_rows(steps, whole)
        ]
        parts.append(_table((whole.title, "mean s", "share"), rows))
    shares = [f"<tr><td>{html.escape(label)}</td><td>{value:.1%}</td></tr>" for label, value in share_rows(steps)]
    parts.append(_table(("of the time of all steps", "share"), shares))
    return "".join(parts) + "</div>"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def draw_times(steps: Steps) -> bytes | None:
    """Draw stacked bars of each step's parts and the shares below, as PNG; None if no step has times.

    With more than MAX_BARS steps, a bar shows the mean of neighbouring steps.
    """
    if not mean_rows(steps, TRAINER):
        return None
    from matplotlib.figure import Figure  # slow to import, and only needed here
    from matplotlib.ticker import MaxNLocator

    bars = _group_steps(steps)
    wholes = [whole for whole in (TRAINER, GROUP) if mean_rows(steps, whole)]
    shares = [name for name in SHARES if any(step.get(name) is not None for step in steps)]
    panels = len(wholes) + bool(shares)
    figure = Figure(figsize=(9, 2.7 * panels), dpi=150, layout="constrained")
    all_axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    width = 0.85 * (bars[1][0] - bars[0][0] if len(bars) > 1 else 1.0)
    for axes, whole in zip(all_axes, wholes, strict=False):
        shown = {part.name for part, _, _ in mean_rows(steps, whole)}
        heights = [_means([part_seconds(step, whole) for step in bar]) for _, bar in bars]
        bottom = [0.0] * len(bars)
        for index, part in enumerate(whole.parts):
            if part.name in shown:
                values = [height[index] for height in heights]
                axes.bar([x for x, _ in bars], values, width, bottom, color=part.color, label=part.label)
                bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        axes.set_title(f"{whole.title}, seconds", loc="left", fontsize=9)
    if shares:
        axes = all_axes[-1]
        for name in shares:
            points = [(step["step"], step[name]) for step in steps if step.get(name) is not None]
            label, color = SHARES[name]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.4, marker=".", label=label)
        axes.set_ylim(-0.04, 1.04)
        axes.set_title("share of the step's time", loc="left", fontsize=9)
        axes.set_xlabel("optimizer step")
    for axes in all_axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _group_steps(steps: Steps) -> list[tuple[float, Steps]]:
    """Group steps into at most MAX_BARS bars of (middle, steps)."""
    timed = [step for step in steps if step.get("step_seconds")]
    size = -(-len(timed) // MAX_BARS)
    bars = [timed[start : start + size] for start in range(0, len(timed), size)]
    return [((bar[0]["step"] + bar[-1]["step"]) / 2, bar) for bar in bars]


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each column."""
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]
