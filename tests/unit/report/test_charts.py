"""What the charts of a report hold: every metric, no color twice in a legend, and little even of a long run."""

import colorsys
import itertools
import random
from typing import Any

import pytest

from relaxd.report.charts import COLOURS, NAMED, SECTIONS, UNDRAWN, chart_data
from relaxd.report.report_files import packed
from relaxd.telemetry.metrics import METRICS


def charts(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Charts by title."""
    return {chart["title"]: chart for section in chart_data(lines)["sections"] for chart in section["charts"]}


def names(lines: list[dict[str, Any]]) -> list[str]:
    return [line["name"] for chart in charts(lines).values() if chart["kind"] != "stack" for line in chart["lines"]]


def test_every_metric_is_drawn_once() -> None:
    known = {name for name, metric in METRICS.items() if metric.kind == "step"}
    own = {
        "reward_brief",
        "eval_brief",
        "dropped_groups_zero_variance",
        "of_an_algorithm",
    }
    replicas = {"engine_idle_share": {"rollout-1": 0.5}, "gpu_idle_share": {"trainer-1": 0.5}}
    drawn = names([{"step": 1, "replicas": replicas} | dict.fromkeys(known | own, 0.5)])
    single = {"engine_idle_share of rollout-1", "gpu_idle_share of trainer-1"}
    assert sorted(drawn) == sorted((known | own | single) - UNDRAWN)


def test_charts_name_metrics_that_there_are() -> None:
    assert NAMED - METRICS.keys() == set()


def test_values_are_in_the_order_of_the_steps() -> None:
    lines = [
        {"step": 0, "eval_reward": 0.25},
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": None, "eval_reward": 0.123456},
    ]
    assert chart_data(lines)["steps"] == [0, 1, 2]
    found = charts(lines)
    assert [chart["lines"][0]["values"] for chart in found.values()] == [[0.25, None, 0.12346], [None, 1, None]]
    assert [chart["kind"] for chart in found.values()] == ["points", "lines"]
    assert charts([{"step": 1, "loss": float("nan")}, {"step": 2, "lr": float("inf")}]) == {}  # JSON has neither


def test_the_parts_of_a_step_are_stacked_up_to_its_time() -> None:
    lines = [{"step": 1, "step_seconds": 9.0, "train_seconds": 6.0, "wait_seconds": 1.0}, {"step": 2}]
    stack = charts(lines)["the trainer's step"]
    assert {line["name"]: line["values"] for line in stack["lines"]} == {
        "forward, backward, optimizer": [6, None],
        "waiting for groups": [1, None],
        "other: intake, commit, planning": [2, None],
    }


def test_of_many_replicas_those_of_the_largest_means_are_drawn() -> None:
    replicas = {"engine_idle_share": {f"rollout-{n}": n / 500 for n in range(500)}}
    lines = [{"step": step, "replicas": replicas} for step in (1, 2)]
    (chart,) = charts(lines).values()
    assert [line["name"] for line in chart["lines"]][:2] == [
        "engine_idle_share of rollout-499",
        "engine_idle_share of rollout-498",
    ]
    assert len(chart["lines"]) == len(COLOURS)
    assert chart["left_out"] == 500 - len(COLOURS)


def test_no_two_colors_of_a_legend_are_alike() -> None:
    def difference(one: str, other: str) -> float:
        (r, g, b), (s, h, c) = ([int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in (one, other))
        mean = (r + s) / 2  # the "redmean" approximation of what the eye sees, up to 765
        return ((2 + mean / 256) * (r - s) ** 2 + 4 * (g - h) ** 2 + (2 + (255 - mean) / 256) * (b - c) ** 2) ** 0.5

    assert min(difference(*pair) for pair in itertools.combinations(COLOURS, 2)) > 100
    yellow = [
        color
        for color in COLOURS
        if 0.12 < colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))[0] < 0.2
    ]
    assert len(yellow) <= 1
    for whole in (chart for section in SECTIONS.values() for chart in section if "*" not in "".join(chart.metrics)):
        assert len(whole.metrics) <= len(COLOURS)


@pytest.mark.timeout(60)
def test_twenty_thousand_steps_take_a_few_megabytes() -> None:
    rng = random.Random(0)
    many = sorted(NAMED)
    lines = [{"step": step} | {name: rng.random() for name in many} for step in range(2000)]
    assert len(packed(chart_data(lines))) * 10 < 10e6
