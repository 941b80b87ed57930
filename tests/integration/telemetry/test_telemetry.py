"""Traces and metrics of real processes, as a real OTLP receiver gets them."""

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relaxd.cli.main import app
from relaxd.report.traces import read_group_trace
from tests.kit.otlp import OtlpReceiver, otlp_receiver
from tests.kit.processes import run_python
from tests.kit.run_folders import write_run


@pytest.fixture(scope="module")
def receiver():
    with otlp_receiver() as running:
        yield running


def play(role: str, environment: dict[str, str], *words: str) -> str:
    process = run_python("-m", "tests.integration.telemetry.group_main", role, *words, environment=environment)
    assert process.returncode == 0, process.stderr
    return (process.stderr if role in ("abandoned", "away") else process.stdout).strip()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("place"))
        return write_run("r", steps=9, done=7, telemetry={"traces": "file"}).resolve()


@pytest.fixture(scope="module")
def group(receiver: OtlpReceiver, run_folder: Path) -> dict[str, str]:
    """A group that went through four processes; its carrier."""
    environment = receiver.environment() | {"RUN_FOLDER": str(run_folder)}
    carrier = play("coordinator", environment)
    for role in ("rollout", "reward", "trainer"):
        play(role, environment, carrier)
    return json.loads(carrier)


def test_a_group_is_one_trace_across_services(receiver, group):
    spans = receiver.wait_for(lambda r: {s.name for s in r.spans()} >= {"publish", "train", "step"} and r.spans())
    trace = [span for span in spans if span.trace_id in group["traceparent"]]
    (publish,) = [span for span in trace if not span.parent_id]
    assert publish.attributes["relaxd.group_id"] == "g1"
    assert all(span.parent_id == publish.span_id for span in trace if span is not publish)
    by_name = {span.name: span for span in trace if span.name != "wait"}
    assert {name: span.service for name, span in by_name.items()} == {
        "publish": "relaxd-coordinator",
        "generate": "relaxd-rollout",
        "score": "relaxd-reward",
        "train": "relaxd-trainer",
    }
    assert by_name["generate"].instance == "rollout-1"
    assert by_name["score"].attributes["samples"] == 8
    assert by_name["score"].attributes["relaxd.wait_seconds"] == 0.25
    waits = {span.attributes["relaxd.stage"]: (span.end - span.start) / 1e9 for span in trace if span.name == "wait"}
    assert waits == {"rollout": pytest.approx(0.5), "reward": pytest.approx(0.25)}
    (step,) = [span for span in spans if span.name == "step"]
    assert step.trace_id != publish.trace_id
    assert by_name["train"].links == ((step.trace_id, step.span_id),)


def test_the_same_spans_are_in_the_runs_folder(receiver, group, run_folder: Path) -> None:
    sent = receiver.wait_for(lambda r: {s.name for s in r.spans()} >= {"publish", "train", "step"} and r.spans())
    found = read_group_trace(run_folder, "g1")
    assert found is not None
    assert [span.name for span in found.linked] == ["step"]
    written = {span.span_id: span for span in [*found.spans, *found.linked]}
    expected = {span.span_id: span for span in sent if span.trace_id in group["traceparent"] or span.name == "step"}
    assert len(expected) == 7
    assert written.keys() == expected.keys()
    for span_id, span in expected.items():
        for name in ("name", "instance", "trace_id", "parent_id", "start", "end", "attributes"):
            assert getattr(written[span_id], name) == getattr(span, name)
    assert read_group_trace(run_folder, "g2") is None
    assert len(list((run_folder / "traces").iterdir())) == 4  # a file for each process


def test_a_groups_tree_is_shown(group, run_folder: Path) -> None:
    def relaxd(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--folder", str(run_folder)], env={"COLUMNS": "160"})

    title, _, *rows = relaxd("trace", "g1").stdout.splitlines()
    assert title.strip() == f"group g1, trace {group['traceparent'].split('-')[1]}"
    shown = {tuple(re.split(r"\s\s+", row.strip())[:2]): len(row) - len(row.lstrip()) for row in rows}
    assert shown == {
        ("publish", "coordinator-1"): 0,
        ("wait", "rollout-1"): 2,
        ("generate", "rollout-1"): 2,
        ("wait", "reward-1"): 2,
        ("score", "reward-1"): 2,
        ("train", "trainer-1"): 2,
        ("step", "trainer-1"): 0,  # of another trace, to which train links
    }
    assert "there is no trace of group g2" in str(relaxd("trace", "g2").exception)


def test_calls_join_their_callers_trace_and_begin_none(receiver, group):
    spans = receiver.wait_for(lambda r: {s.name for s in r.spans()} >= {"evaluate"} and r.spans())
    (evaluate,) = [span for span in spans if span.name == "evaluate"]
    calls = [span for span in spans if span.name.startswith("relaxd.v1.") and span.service == "relaxd-coordinator"]
    assert [(span.name, span.parent_id, span.error) for span in calls] == [
        ("relaxd.v1.Reward/Score", evaluate.span_id, False),
        ("relaxd.v1.Reward/Score", evaluate.span_id, True),
    ]


def test_metrics_arrive_with_unit_and_attributes(receiver, group):
    receiver.wait_for(lambda r: {"relaxd.step.loss", "relaxd.rpc.seconds"} <= {p.name for p in r.points()})
    (loss,) = receiver.points("relaxd.step.loss")[-1:]
    assert (loss.value, loss.service, loss.attributes) == (0.5, "relaxd-trainer", {"relaxd.run_id": "run"})
    assert receiver.points("relaxd.step.number")[-1].value == 7
    assert receiver.points("relaxd.step.reward_own")[-1].value == 1.0
    assert not receiver.points("relaxd.step.kl")  # it was not a number
    assert receiver.points("relaxd.queue.waiting")[-1].value == 3
    wait = receiver.points("relaxd.queue.wait_seconds")[-1]
    assert (wait.value, wait.count, wait.unit) == (0.25, 1, "s")
    counts = {
        (p.attributes["rpc.method"], p.attributes["rpc.grpc.status_code"]): p.count
        for p in receiver.points("relaxd.rpc.seconds")
    }
    assert counts[("/relaxd.v1.Reward/Score", "OK")] == 1
    assert counts[("/relaxd.v1.Reward/Score", "NOT_FOUND")] == 1


def test_a_call_whose_caller_left_is_no_success(receiver):
    log = play("abandoned", receiver.environment())
    (leave,) = receiver.wait_for(lambda r: [span for span in r.spans() if span.name == "leave"])
    spans = [span for span in receiver.spans() if span.parent_id == leave.span_id]
    assert sorted((span.name, span.error) for span in spans) == [
        *[("relaxd.v1.Reward/Score", True)] * 2,
        *[("relaxd.v1.Rollout/Generate", True)] * 2,
    ]
    counts = {
        (point.attributes["rpc.method"].rpartition("/")[2], point.attributes["rpc.grpc.status_code"]): point.count
        for point in receiver.points("relaxd.rpc.seconds")
        if point.service == "relaxd-abandoned"
    }
    assert counts == {("Score", "CANCELLED"): 1, ("Score", "DEADLINE_EXCEEDED"): 1, ("Generate", "CANCELLED"): 2}
    assert log.count("/relaxd.v1.Rollout/Generate was cancelled: CANCELLED") == 2
    assert "ERROR" not in log


def test_nothing_is_exported_and_groups_are_not_traced_without_an_endpoint():
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    assert play("coordinator", environment) == "{}"
    play("reward", environment, "{}")
    play("trainer", environment, "{}")


def test_a_collector_that_is_away_is_said_once():
    log = play("away", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert log.count("Failed to export") == 1
    assert "WARNING away-1 Failed to export" in log
    # Which of both it is depends on how busy the machine is.
    assert re.search(r"127\.0\.0\.1:9, error code: StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)", log)
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_collector_that_is_away_does_not_hold_up_the_end():
    begun = time.monotonic()
    play(
        "reward",
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        '{"traceparent": "00-' + "1" * 32 + "-" + "2" * 16 + '-01"}',
    )
    assert time.monotonic() - begun < 40
