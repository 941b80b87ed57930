"""The report: made from a run's files alone, complete, self-contained, and safe to open."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from relaxd.cli.errors import CliError
from relaxd.cli.report import read_result, save_samples, write_report
from relaxd.v1 import coordinator_pb2 as pb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    summary = {"run_id": "r1", "state": "stopped", "reason": "completed", "steps": 3, "wall_seconds": 90.0}
    summary |= {"accuracy_before": 0.08, "accuracy_after": 0.66, "format_before": 0.5, "format_after": 1.0}
    summary |= {"published": 14, "trained": 12, "dropped": 2, "in_flight": 0, "dropped_by_reason": {"zero_variance": 2}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = [{"step": 0, "eval_accuracy": 0.08, "eval_format": 0.5}]
    for step in (1, 2, 3):
        timing = {"step_seconds": 20.0, "train_seconds": 12.0, "wait_seconds": 5.0}
        lines.append({"step": step, "reward_mean": step / 4, "reward_accuracy": step / 4, "kl": None, **timing})
    lines[-1] |= {"eval_accuracy": 0.66, "eval_format": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.toml").write_text("[run]\nsteps = 3 # <b>\n")
    nasty = "<script>alert(1)</script> $title"
    save_samples(tmp_path, [pb.TrainedSample(step=3, prompt="1 + 1", answer="2", response=nasty, reward=0.25)])
    return tmp_path


class Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_has_everything_and_needs_nothing(folder: Path) -> None:
    text = write_report(folder).read_text()
    for expected in ("0.08 → 0.66", "+0.58", "0.50 → 1.00", "1.5 min", "dropped: zero_variance", "1 + 1", "0.750"):
        assert expected in text
    assert "steps = 3 # &lt;b&gt;" in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; $title" in text
    parser = Parser()
    parser.feed(text)
    assert parser.open == []
    images = [attributes["src"] for tag, attributes in parser.tags if tag == "img"]
    assert len(images) == 1
    png = base64.b64decode(images[0].removeprefix("data:image/png;base64,"))
    assert png == (folder / "curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_the_time_adds_up(folder: Path) -> None:
    shares = re.findall(r": ([\d.]+) s \((\d+) %\)", write_report(folder).read_text())
    assert [float(seconds) for seconds, _ in shares] == [36.0, 15.0, 9.0, 30.0]
    assert sum(int(percent) for _, percent in shares) in (99, 100, 101)


def test_the_mismatch_has_a_figure_where_steps_say_it(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step, line in enumerate(lines[1:], start=1):
        line |= {"policy_drift": 0.01 * step, "policy_drift_p99": 0.1, "policy_drift_kl": 0.0}
    lines[2] |= {
        "logprob_difference": 1e-4,
        "correction_fraction": 0.02,
    }  # in an asynchronous run not every step has it
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parser = Parser()
    parser.feed(write_report(folder).read_text())
    images = [attributes for tag, attributes in parser.tags if tag == "img"]
    assert [image["alt"] for image in images][1:] == ["Log-prob differences over the steps"]
    png = base64.b64decode((images[1]["src"] or "").removeprefix("data:image/png;base64,"))
    assert png.startswith(b"\x89PNG")


def test_a_run_without_steps_and_evaluations_has_a_report(folder: Path) -> None:
    (folder / "summary.json").write_text(json.dumps({"run_id": "r1", "steps": 0}))
    (folder / "metrics.jsonl").write_text("")
    (folder / "samples.jsonl").unlink()
    assert "r1" in write_report(folder).read_text()


def test_values_are_read_by_kind(folder: Path) -> None:
    result = read_result(folder)
    assert [step["step"] for step in result.steps] == [1, 2, 3]
    assert [(e["step"], e["eval_accuracy"]) for e in result.evaluations] == [(0, 0.08), (3, 0.66)]


@pytest.mark.parametrize("broken", ["summary.json", "metrics.jsonl"])
def test_a_broken_folder_is_named(folder: Path, broken: str) -> None:
    (folder / broken).write_text('{"step": ')
    with pytest.raises(CliError, match="is not the folder of a run that ended"):
        write_report(folder)
    (folder / broken).unlink()
    with pytest.raises(CliError, match=broken):
        write_report(folder)
