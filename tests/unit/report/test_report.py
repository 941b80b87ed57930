"""The report: made from a run's files alone, complete, self-contained, and safe to open. See also test_charts.py."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from relaxd.client import CliError
from relaxd.config.load_toml import load
from relaxd.report.charts import chart_data
from relaxd.report.report_files import shown_text, write_report
from relaxd.report.run_result import read_result
from relaxd.report.step_times import GROUP, TRAINER, mean_rows, share_rows, tables
from tests.kit.reports import read_report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    summary = {"run_id": "r1", "state": "stopped", "reason": "completed", "steps": 3, "wall_seconds": 90.0}
    summary |= {"reward_before": 0.08, "reward_after": 0.66, "brief_before": 0.5, "brief_after": 1.0}
    summary |= {"published": 14, "trained": 12, "dropped": 2, "in_flight": 0, "dropped_by_reason": {"zero_variance": 2}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = [{"step": 0, "eval_reward": 0.08, "eval_brief": 0.5}]
    for step in (1, 2, 3):
        timing = {"step_seconds": 20.0, "train_seconds": 12.0, "wait_seconds": 5.0, "step_file_seconds": 0.5}
        timing |= {
            "group_seconds": 40.0,
            "queue_rollout_seconds": 1.0,
            "generate_seconds": 20.0,
            "in_step_seconds": 9.0,
        }
        timing |= {"queue_train_seconds": 8.0, "score_seconds": 0.5, "sync_seconds": 0.4, "trainer_idle_share": 0.4}
        timing |= {"engine_idle_share": step / 10, "replicas": {"engine_idle_share": {"rollout-2": 0.25}}}
        lines.append({"step": step, "reward_mean": step / 4, "reward_accuracy": step / 4, "kl": None, **timing})
    lines[-1] |= {"eval_reward": 0.66, "eval_brief": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.toml").write_text("[run]\nsteps = 3 # <b>\n")
    nasty = "<script>alert(1)</script> $title"
    sample = {"step": 3, "prompt": "1 + 1", "answer": "2", "response": nasty, "reward": 0.25}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    return tmp_path


class Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def answers(folder: Path) -> dict[str, Any]:
    """What the report of a folder answers its views."""
    found: dict[str, Any] = read_report(write_report(folder))["answers"]
    return found


def test_report_has_everything_and_needs_nothing(folder: Path) -> None:
    text = write_report(folder).read_text()
    parser = Parser()
    parser.feed(text)
    assert parser.open == []
    assert not any({"src", "href"} & attributes.keys() for _, attributes in parser.tags)
    assert "The MIT License" in text
    assert not re.search("<script.alert|# <b", text)  # data is no markup, not even its beginning
    assert not re.search("^(import|export) ", text, re.MULTILINE)  # a file has no modules
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")

    data = read_report(folder / "report.html")
    run, found = data["run"], data["answers"]
    assert (run["run_id"], run["state"], run["reason"], run["step"]) == ("r1", "stopped", "completed", 3)
    counts = {"published": 14, "trained": 12, "dropped": 2, "open": 0, "dropped_by_reason": {"zero_variance": 2}}
    assert run["groups"] == counts
    assert found["results"]["cards"] == [
        ["held-out reward", "0.08 → 0.66", "+0.58"],
        ["held-out brief", "0.50 → 1.00", "+0.50"],
        ["steps", "3", ""],
        ["wall time", "1.5 min", "90 s"],
    ]
    steps = found["results"]["steps"]
    assert (steps["head"], steps["rows"][-1]) == (
        ["step", "reward", "accuracy", "seconds"],
        ["3", "0.750", "0.750", "20.0"],
    )
    (sample,) = found["samples"]["samples"]
    assert {name: sample[name] for name in ("step", "prompt", "answer", "response", "reward")} == {
        "step": 3, "prompt": "1 + 1", "answer": "2", "response": "<script>alert(1)</script> $title", "reward": 0.25,
    }  # fmt: skip
    assert found["config"]["config_toml"] == "[run]\nsteps = 3 # <b>\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n" * 400, "(only 400 blank characters)"),
        (" \n\t\u200b\u2028\r\n" * 50, "(only 350 blank characters)"),
        ("", ""),
        ("one\n  two\n\nthree\n", "one\n  two\n\nthree"),
        ("\n\n\none\n \n\n\t\n\r\n   two" + "\n" * 90, "one\n\n   two"),
        (12, "12"),
    ],
)
def test_blank_text_takes_little_room(text: object, shown: str) -> None:
    assert shown_text(text) == shown


def test_blank_samples_and_answers_are_short(folder: Path) -> None:
    blank = {"response": "\n" * 500, "prompt": "1 + 1", "answer": "2"}
    said = {"role": "assistant", "content": " " * 300, "tool_calls": []}
    sample = {"step": 3, "reward": 0, **blank, "conversation": [said], "turns": 1}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "evaluations").mkdir()
    answer = {"index": 0, "sample": 0, "reward": 0.0, "error": "", **blank}
    (folder / "evaluations" / "step-000003.jsonl").write_text(json.dumps(answer) + "\n")
    found = answers(folder)
    (shown,) = found["samples"]["samples"]
    assert shown["response"] == found["answers"]["sets"][0]["rows"][0][2] == "(only 500 blank characters)"
    assert shown["conversation"][0]["content"] == "(only 300 blank characters)"


def test_the_ledger_has_the_newest_groups(folder: Path) -> None:
    lines = [{"group": f"0-{place:06}", "index": place, "step": 1 + place // 100} for place in range(299)]
    lines.append(
        {"group": "0-000299", "index": 299, "reason": "stale", "stage": "train", "attempt": 1, "retried": False}
    )
    (folder / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = answers(folder)["groups"]["groups"]
    assert ([one["group_id"] for one in groups[:2]], len(groups)) == (["0-000299", "0-000298"], 200)
    assert (groups[0]["reason"], groups[1]["step"], "step" in groups[0]) == ("stale", 3, False)


def test_the_time_adds_up(folder: Path) -> None:
    results = answers(folder)["results"]
    assert results["outside"].startswith("60.0 s in 3 steps, 30.0 s outside of them: ")
    times = {one["title"]: one["rows"] for one in results["times"]}
    trainer = {row["label"]: [row["seconds"], row["share"]] for row in times["the trainer's step"]}
    assert trainer == {
        "forward, backward, optimizer": ["12.000", "60.0%"],
        "waiting for groups": ["5.000", "25.0%"],
        "writing the step file": ["0.500", "2.5%"],
        "other: intake, commit, planning": ["2.500", "12.5%"],
    }
    stages = {row["label"]: [row["seconds"], row["share"]] for row in times["a group's stages (mean)"]}
    assert list(stages) == [
        "queue: rollout",
        "generate",
        "score",
        "queue: train",
        "in its step",
        "other: commits, failed attempts",
    ]
    assert stages["generate"] == ["20.000", "50.0%"]
    assert sum(float(seconds) for seconds, _ in stages.values()) == 40.0
    shares = {row["label"]: [row["share"]] for row in times["of the time of all steps"]}
    assert shares == {
        "weight synchronisation: share of a step": ["2.0%"],
        "trainer: not computing": ["40.0%"],
        "engines: idle": ["20.0%"],
        "rollout-2: idle": ["25.0%"],
    }


def test_shares_are_weighed_by_time_and_a_step_without_them_is_left_out() -> None:
    steps = [
        {"step": 1, "step_seconds": 30.0, "trainer_idle_share": 0.2, "sync_seconds": 3.0},
        {"step": 2, "step_seconds": 10.0, "trainer_idle_share": 0.6},
        {"step": 3, "step_seconds": 10.0, "trainer_idle_share": None},
    ]
    assert share_rows(steps) == [
        ("weight synchronisation: share of a step", pytest.approx(0.1)),
        ("trainer: not computing", pytest.approx(0.3)),
    ]
    parts = {part.name: (seconds, share) for part, seconds, share in mean_rows(steps, TRAINER)}
    assert parts == {"": (pytest.approx(50 / 3), 1.0)}
    assert mean_rows(steps, GROUP) == []
    assert len(tables(steps)) == 2
    assert tables([]) == []


def test_a_run_that_goes_on_has_a_report(folder: Path) -> None:
    (folder / "summary.json").unlink()
    (folder / "run.json").write_text(json.dumps({"run_id": "r1", "phase": "RUNNING", "reason": ""}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # it is being written
    result = read_result(folder)
    assert (result.run_id, result.state, len(result.steps)) == ("r1", "running", 3)
    assert read_report(write_report(folder))["run"]["state"] == "running"


def test_a_run_without_steps_and_evaluations_has_a_report(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"run_id": "r1", "steps": 0}))
    (folder / "metrics.jsonl").write_text("")
    (folder / "samples.jsonl").unlink()
    results = answers(folder)["results"]
    assert (results["times"], results["steps"]["rows"], results["cards"]) == ([], [], [["steps", "0", ""]])


def test_values_are_read_by_kind(folder: Path) -> None:
    result = read_result(folder)
    assert [step["step"] for step in result.steps] == [1, 2, 3]
    assert [(e["step"], e["eval_reward"]) for e in result.evaluations] == [(0, 0.08), (3, 0.66)]


@pytest.mark.parametrize("broken", ["summary.json", "metrics.jsonl"])
def test_a_broken_folder_is_named(folder: Path, broken: str) -> None:
    (folder / broken).write_text('{"step": ')
    with pytest.raises(CliError, match="is not the folder of a run"):
        write_report(folder)
    (folder / broken).unlink()
    with pytest.raises(CliError, match=broken):
        write_report(folder)


def keep_answers(folder: Path, step: int, responses: list[str]) -> None:
    (folder / "evaluations").mkdir(exist_ok=True)
    same = {"answer": "3", "parts": {}, "error": "", "length": 1, "finish_reason": "stop"}
    lines = [
        {"index": index, "prompt": f"1 + 2 ({index})", "response": response, "reward": float(response == "3"), **same}
        for index, response in enumerate(responses)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "evaluations" / f"step-{step:06d}.jsonl").write_text(text)


def test_held_out_answers_are_shown_before_and_after(folder: Path) -> None:
    assert read_result(folder).answered_sets == []
    keep_answers(folder, 0, ["<b>4", "3"])
    keep_answers(folder, 3, ["3", "12"])
    (held_out,) = answers(folder)["answers"]["sets"]
    assert held_out["head"] == ["prompt", "answer", "response, step 0", "reward", "response, step 3", "reward"]
    assert held_out["rows"] == [
        ["1 + 2 (0)", "3", "<b>4", "0.00", "3", "1.00"],
        ["1 + 2 (1)", "3", "3", "1.00", "12", "0.00"],
    ]
    (folder / "evaluations" / "step-000003.jsonl").write_text("{")
    with pytest.raises(CliError, match="answers of the evaluation of step 3 can't be read"):
        write_report(folder)


def test_every_set_has_its_results_and_charts(folder: Path) -> None:
    metrics = {"reward": 0.5, "prompts": 10, "response_length": 7.0, "truncated_share": 0.125}
    metrics |= {"pass_at_4": 0.75, "pass_at_4_low": 0.6, "pass_at_4_high": 0.9, "maj_at_4": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9} | {f"eval/sums/{name}": value for name, value in metrics.items()}) + "\n")
    (folder / "evaluations" / "sums").mkdir(parents=True)
    lines = [{"index": 1, "sample": 1, "reward": 0.0, "error": ""}]
    lines += [{"index": 0, "sample": n, "reward": 1.0, "error": "", "prompt": f"p{n}", "answer": "a"} for n in (1, 0)]
    (folder / "evaluations" / "sums" / "step-000009.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = read_result(folder)
    assert [result.answers(9, "sums", limit) for limit in (None, 1)] == [[*lines[:0:-1], lines[0]], lines[-1:]]
    found = answers(folder)["answers"]
    row = ["sums", "9", "10", "0.500", "0.750 [0.600, 0.900]", "0.500", "7", "12.5%"]
    assert found["results"]["rows"][-1] == row
    assert [one["name"] for one in found["sets"]] == ["sums"]
    sections = {one["title"]: one["charts"] for one in chart_data(result.lines)["sections"]}
    assert [[line["name"] for line in chart["lines"]] for chart in sections["Evaluation sets"]] == [
        ["eval/sums/pass_at_4", "eval/sums/maj_at_4"],
        ["eval/sums/response_length"],
        ["eval/sums/truncated_share"],
        ["eval/sums/reward"],
    ]


def test_what_was_trained_with_which_code_is_on_top(folder: Path) -> None:
    config = load('[run]\nsteps = 3\n[model]\npath = "tiny"\n[data]\nsource = "addition"\n[reward]\nname = "addition"')
    (folder / "config.json").write_text(config.model_dump_json())
    code = {"relaxd": "0.1.0", "python": "3.12.1", "commit": "0123456789abcdef", "uncommitted_changes": True}
    (folder / "code.json").write_text(json.dumps(code))
    found = answers(folder)
    assert dict(found["results"]["facts"]) == {
        "model": "tiny",
        "data": "addition",
        "reward": "addition",
        "algorithm": "grpo",
        "engine": "transformers",
        "code": "relaxd 0.1.0, commit 0123456789ab, with uncommitted changes, Python 3.12.1",
    }
    assert 'steps = 3\n\n[model]\npath = "tiny"' in found["config"]["changes_toml"]
    assert found["config"]["config"]["run"]["steps"] == 3


def test_a_long_run_has_a_short_table_of_steps(folder: Path) -> None:
    lines = "".join(json.dumps({"step": step, "reward_mean": 0.5}) + "\n" for step in range(1, 301))
    (folder / "metrics.jsonl").write_text(lines)
    results = answers(folder)["results"]
    assert results["newest"].startswith("The newest 100 of 300")
    assert [row[0] for row in results["steps"]["rows"]][0::99] == ["201", "300"]
