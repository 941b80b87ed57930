"""Tables of terminals that are 80, 100 and 120 columns wide: nothing is cut, and no number is broken."""

import io

import pytest
from rich.console import Console

from relaxd.cli.reading.live_view import samples_table
from relaxd.cli.reading.logs_command import GroupTrace, TracedSpan, trace_table
from relaxd.cli.reading.run_tables import SHOWN_METRICS, _runs_table, metrics_tables, results_table
from relaxd.report.run_result import set_rows
from relaxd.v1 import coordinator_pb2 as pb

WIDTHS = pytest.mark.parametrize("width", [80, 100, 120])


def shown(width: int, *tables: object) -> list[str]:
    """The lines of tables, none of which is cut or too long."""
    text = io.StringIO()
    Console(file=text, width=width, markup=False).print(*tables, sep="\n")
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    return lines


@WIDTHS
def test_runs_have_their_whole_ids(width: int) -> None:
    run_id = "demo-20261129-152536-ab12"
    run = pb.Run(run_id=run_id, state=pb.RUN_STATE_STOPPED, step=20, steps=20, folder="none")
    lines = shown(width, _runs_table([run], set(), known_to_live=True))
    assert any(line.startswith(f"{run_id} ") for line in lines)


@WIDTHS
def test_results_of_evaluations_have_a_row_for_each_metric(width: int) -> None:
    values = {"reward": 0.25, "prompts": 1319, "response_length": 1234.5, "truncated_share": 0.125, "unscored": 3}
    for k in (1, 2, 4, 8, 16, 32):
        values |= {f"{name}_at_{k}{end}": 0.5 for name in ("pass", "maj") for end in ("", "_low", "_high")}
    lines = [{"step": step} | {f"eval/competition_mathematics/{name}": value for name, value in values.items()}
             for step in (0, 123456)]  # fmt: skip
    words = [line.split() for line in shown(width, results_table(set_rows(lines)))]
    assert words[0] == ["set", "step", "metric", "value"]
    assert words[1] == ["competition_mathematics", "0", "prompts", "1319"]
    assert words[2:4] == [["reward", "0.250"], ["pass@1", "0.500", "[0.500,", "0.500]"]]
    assert ["competition_mathematics", "123456", "prompts", "1319"] in words
    for row in (
        ["maj@32", "0.500", "[0.500,", "0.500]"],
        ["length", "1234"],
        ["cut", "off", "12.5%"],
        ["unscored", "3"],
    ):
        assert words.count(row) == 2


@WIDTHS
@pytest.mark.parametrize("more", [0, 12])
def test_metrics_of_steps_are_in_as_many_tables_as_it_takes(width: int, more: int) -> None:
    names = [*SHOWN_METRICS, *(f"queue_of_something_long_{number}_seconds" for number in range(more))]
    lines = [
        {"step": step} | {name: -1.2345e-5 * (1 + place) for place, name in enumerate(names)} for step in (9, 99999)
    ]
    words = [line.split() for line in shown(width, *metrics_tables(lines, names, width))]
    values = [f"{-1.2345e-5 * (1 + place):.4g}" for place in range(len(names))]
    for step in ("9", "99999"):
        assert [cell for row in words if row[0] == step for cell in row[1:]] == values


def test_the_usual_metrics_are_one_table_of_80_columns() -> None:
    line = {"step": 123} | dict.fromkeys(SHOWN_METRICS, 0.1234)
    *_, row = shown(80, *metrics_tables([line], SHOWN_METRICS, 80))
    assert row.split() == ["123", *["0.1234"] * len(SHOWN_METRICS)]


@WIDTHS
def test_samples_keep_their_numbers(width: int) -> None:
    sample = pb.TrainedSample(
        step=12345,
        version=12344,
        prompt="What is 1 + 2? " * 9,
        response="https://" + "x" * 90,
        answer="1234567890" * 4,
        reward=-12.25,
        advantage=-1.5,
    )
    lines = shown(width, samples_table([sample]))
    first = lines[1].split()
    assert (first[:2], first[-2:]) == (["12345", "12344"], ["-12.25", "-1.50"])
    assert "".join(line.replace(" ", "") for line in lines).count("x") >= 90


@WIDTHS
def test_a_trace_keeps_its_times(width: int) -> None:
    def span(name: str, start: float, end: float, parent: str = "a", error: str = "") -> TracedSpan:
        return TracedSpan(
            name=name, instance="rollout-3f9a1c2b/engine", trace_id="f" * 32, span_id=name, parent_id=parent,
            start=int(start * 1e9), end=int(end * 1e9), attributes={"relaxd.version": 12345}, links=(), error=error,
        )  # fmt: skip

    root = span("create rollout", 0, 1, parent="")
    spans = [root, span("process rollout", 10, 1234, "create rollout"), span("generate", 11, 900, "process rollout"),
             span("process reward", 1240, 2000, "create rollout", "ValueError: " + "a long reason " * 9)]  # fmt: skip
    lines = shown(width, trace_table(GroupTrace(root, spans, []), "g-" + "0" * 30))
    text = "\n".join(lines)
    for expected in ("1224.000 s", "1240.000 s", "889.000 s", "version 12345" if width > 80 else "12345", "ValueError"):
        assert expected in text
    assert "━━━━" in text
