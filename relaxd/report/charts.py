"""The charts of a report: which metrics of metrics.jsonl are drawn together, and the drawn numbers.

A metric that no chart names gets a separate chart, so that every metric is shown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from relaxd.evaluation.estimates import is_end
from relaxd.report.step_times import GROUP, PER_REPLICA, SHARES, TRAINER, Breakdown, part_seconds, replica_values
from relaxd.run_folder import COMPARED_METRICS, OF_ORIGINAL
from relaxd.telemetry.metrics import METRICS

COLOURS = (
    "#2563eb", "#f28e2b", "#2ca02c", "#d62728", "#9467bd",
    "#17becf", "#8c564b", "#e377c2", "#bcbd22", "#7f7f7f",
)  # fmt: skip
"""Colours of a chart's lines, in order. All can be told apart, on white and on black."""
DIGITS = 5
"""Number of significant digits of a drawn number."""

Lines = Sequence[Mapping[str, Any]]
"""Parsed lines of metrics.jsonl, one per step."""


@dataclass(frozen=True)
class Chart:
    """A chart: metrics that are drawn together."""

    title: str
    metrics: tuple[str, ...]
    """Names of the chart's metrics. A name with * matches all metrics that no chart names in full."""
    kind: Literal["lines", "log", "points"] = "lines"
    """Kind of chart: lines on a linear scale, lines on a logarithmic scale, or a dot per value for metrics that few
    steps have."""


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Rewards": (
        Chart("reward", ("reward_mean", "reward_median", "reward_min", "reward_max", "reward_std")),
        Chart("parts of the reward", ("reward_*",)),
        Chart("held-out: pass@k, greedy", ("eval_pass_at_*",), "points"),
        Chart("held-out: reward and its parts, greedy", ("eval_reward", "eval_*"), "points"),
        Chart(
            "response length",
            (
                "response_length_mean",
                "response_length_median",
                "response_length_min",
                "response_length_max",
                "response_length_std",
            ),
        ),
        Chart("held-out: response length", ("eval_response_length",), "points"),
        Chart("held-out: answers cut off at their limit", ("eval_truncated_share",), "points"),
        Chart("held-out: answers that the reward couldn't score", ("eval_unscored",), "points"),
        Chart("held-out: conversations whose environment failed", ("eval_environment_failed",), "points"),
        Chart("answers cut off at rollout.max_new_tokens", ("truncated_share",)),
        Chart("pass@k of all scored groups, dropped ones included", ("pass_at_*",)),
        Chart("scored groups with equal rewards", ("zero_variance_share", "all_right_share", "all_wrong_share")),
        Chart("dropped groups", ("dropped_groups", "dropped_groups_*")),
        Chart("prompts tried, and left out by the curriculum", ("prompts_tried", "prompts_solved", "prompts_too_hard")),
        Chart("prompts by pass rate, in tenths", ("prompts_pass_rate_*",)),
        Chart("replays and re-tests", ("replayed_groups", "retested_groups")),
    ),
    "Samples": (
        Chart("numbers that the reward logs", ("user/*",)),
        Chart("right answers", ("right_share", "outcome/*/share")),
        Chart("length of right and wrong answers", ("outcome/*/response_length_mean",)),
        Chart("right and wrong answers cut off", ("outcome/*/truncated_share",)),
        Chart("answers that repeat themselves", ("repetition_share",)),
        Chart("how answers ended", ("finish/*/share",)),
        Chart("reward, by how answers ended", ("finish/*/reward_mean",)),
        Chart("response length, by how answers ended", ("finish/*/response_length_mean",)),
        Chart("sources", ("source/*/share",)),
        Chart("reward, by source", ("source/*/reward_mean",)),
        Chart("right answers, by source", ("source/*/right_share",)),
        Chart("response length, by source", ("source/*/response_length_mean",)),
        Chart("answers cut off, by source", ("source/*/truncated_share",)),
    ),
    "Update": (
        Chart("loss", ("loss",)),
        Chart("gradient norm, before clipping", ("grad_norm",), "log"),
        Chart("learning rate", ("lr",)),
        Chart("entropy", ("entropy",)),
        Chart("KL to the reference", ("kl",)),
        Chart("KL to the teacher", ("teacher_kl",)),
        Chart("tokens that the loss clipped", ("clip_fraction",)),
        Chart("probability ratio", ("ratio",)),
        Chart("skipped updates", ("skipped_updates",)),
    ),
    "Engine against trainer": (
        Chart("staleness", ("staleness_mean", "staleness_max")),
        Chart(
            "log-prob differences, same weights",
            ("logprob_difference", "logprob_difference_p99", "logprob_difference_max"),
            "log",
        ),
        Chart("log-prob differences, all tokens", ("policy_drift", "policy_drift_p99", "policy_drift_max"), "log"),
        Chart("KL(engine, trainer)", ("logprob_difference_kl", "policy_drift_kl"), "log"),
        Chart("effective sample size, share of the tokens", ("logprob_difference_ess", "policy_drift_ess")),
        Chart("correction", ("correction_weight", "correction_fraction")),
    ),
    "Experts": (
        Chart("tokens of the fullest expert, over the mean", ("expert_load_max", "expert_load_mean")),
        Chart("share of experts without a token, and of dropped tokens", ("expert_load_empty", "expert_dropped")),
        Chart("auxiliary losses", ("expert_balance_loss", "expert_z_loss")),
    ),
    "Speed": (
        Chart("tokens per second", ("tokens_per_second",)),
        Chart("tokens per second and GPU", ("tokens_per_second_per_gpu", "train_tokens_per_second_per_gpu")),
        Chart("TFLOP/s of a GPU of the trainer", ("train_tflops_per_gpu",)),
        Chart("share of the trainer's GPUs' peak (MFU)", ("mfu",)),
        Chart("tokens of a step", ("tokens",)),
        Chart("samples and groups of a step", ("samples", "groups", "scored_groups")),
    ),
    "Time": (
        Chart("shares of the step's time", (*SHARES, "engine_busy_share")),
        Chart("engines: idle, each", ("engine_idle_share of *",)),
        Chart("GPUs: no kernel running, each replica", ("gpu_idle_share of *",)),
        Chart("weight synchronisation, and its parts", ("sync_seconds", "sync_*_seconds")),
        Chart("bytes of weights", ("sync_bytes",)),
        Chart("a group's longest generation", ("generate_seconds_max",)),
        Chart("turns on shared GPUs", ("switch_seconds", "switch_*")),
        Chart("memory awake and asleep", ("*_awake_bytes", "*_asleep_bytes")),
    ),
}
NAMED = {name for charts in SECTIONS.values() for chart in charts for name in chart.metrics if "*" not in name}
STACKS: tuple[Breakdown, ...] = (TRAINER, GROUP)
"""Durations that are drawn as stacks of their parts, at the beginning of the section "Time"."""
UNDRAWN = frozenset(
    {"step", "commit_time", "weights_checksum", "eval_step", "eval_prompts", *(whole.name for whole in STACKS)}
) | {part.name for whole in STACKS for part in whole.parts}
"""Metrics for which no separate chart is drawn."""


def chart_data(lines: Lines) -> dict[str, Any]:
    """Return the data of all charts, for JSON: steps, times, and sections of charts with the title, kind, unit and
    lines of each.

    A chart's line has a name, a meaning, a color, and a value or None per step. Charts without values are left out. A
    chart shows at most len(COLOURS) lines, those with the highest means; `left_out` counts the others.
    """
    lines = [_flat(line) for line in lines]
    left = {name for line in lines for name, value in line.items() if _is_number(value) and not is_end(name)} - UNDRAWN
    sections = []
    first = [("Beside the original", _fork_charts(left)), ("Evaluation sets", _set_charts(left))]
    for title, charts in (*first, *SECTIONS.items()):
        drawn = [_stack(lines, whole) for whole in STACKS] if title == "Time" else []
        for chart in charts:
            names = _take(chart.metrics, left)
            drawn.append(_chart(chart.title, chart.kind, names, lines))
        sections.append({"title": title, "charts": [chart for chart in drawn if chart["lines"]]})
    others = [_chart(name, "lines", [name], lines) for name in sorted(left)]
    sections.append({"title": "Others", "charts": others})
    return {
        "steps": [line["step"] for line in lines],
        "times": [line.get("commit_time") for line in lines],
        "sections": [one for one in sections if one["charts"]],
    }


def _flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics with each replica's values as further metrics, such as "engine_idle_share of
    rollout-1"."""
    single = {
        f"{name} of {replica}": value for name in PER_REPLICA for replica, value in replica_values(line, name).items()
    }
    return {**line, **single}


def _set_charts(names: set[str]) -> list[Chart]:
    """Return the charts of the metrics of evaluation sets (eval/SET/NAME). Removes the sets' numbers of prompts from
    `names`."""
    charts = []
    for one in sorted({name.split("/")[1] for name in names if name.startswith("eval/")}):
        place = f"eval/{one}/"
        names.discard(f"{place}prompts")
        charts += [
            Chart(f"{one}: pass@k and maj@k", (f"{place}pass_at_*", f"{place}maj_at_*"), "points"),
            Chart(f"{one}: response length", (f"{place}response_length",), "points"),
            Chart(f"{one}: share of answers cut off", (f"{place}truncated_share",), "points"),
            Chart(f"{one}: reward and its parts", (f"{place}reward", f"{place}*"), "points"),
        ]
    return charts


def _fork_charts(names: set[str]) -> list[Chart]:
    """Return the charts that compare a fork's metrics with the original run's."""
    pairs = [(name, f"{name}{OF_ORIGINAL}") for name in COMPARED_METRICS]
    return [Chart(name, (name, original)) for name, original in pairs if original in names]


def color(place: int) -> str:
    """Return the color of a chart's line, given its index from 0."""
    return COLOURS[place % len(COLOURS)]


def _take(patterns: Sequence[str], left: set[str]) -> list[str]:
    """Remove the metrics' names that match the patterns from `left`, and return them in the patterns' order."""
    names: list[str] = []
    for pattern in patterns:
        start, star, end = pattern.partition("*")
        found = (
            {name for name in left if name.startswith(start) and name.endswith(end)} - NAMED
            if star
            else left & {pattern}
        )
        names += sorted(found)
        left -= found
    return names


def _chart(title: str, kind: str, names: Sequence[str], lines: Lines) -> dict[str, Any]:
    columns = {name: [_number(line.get(name)) for line in lines] for name in names}
    shown = (
        sorted(names, key=lambda name: -_mean(columns[name]))[: len(COLOURS)] if len(names) > len(COLOURS) else names
    )
    units = {METRICS[name].unit for name in shown if name in METRICS} - {"1"}
    return {
        "title": title,
        "kind": kind,
        "unit": units.pop().strip("{}") if len(units) == 1 else "",
        "left_out": len(names) - len(shown),
        "lines": [
            {
                "name": name,
                "meaning": METRICS[name].description if name in METRICS else "",
                "color": color(place),
                "values": columns[name],
            }
            for place, name in enumerate(shown)
        ],
    }


def _stack(lines: Lines, whole: Breakdown) -> dict[str, Any]:
    timed = [part_seconds(line, whole) if line.get(whole.name) else None for line in lines]
    drawn = []
    for place, part in enumerate(whole.parts):
        values = [None if seconds is None else _number(seconds[place]) for seconds in timed]
        if any(values):
            drawn.append({"name": part.label, "meaning": part.name, "color": color(place), "values": values})
    return {"title": whole.title, "kind": "stack", "unit": "s", "left_out": 0, "lines": drawn}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> float | None:
    """Return a value rounded for a chart; None if it isn't a finite number."""
    if not _is_number(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
