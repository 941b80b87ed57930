"""Traces and metrics of real processes, as a real OTLP receiver gets them."""

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relaxd.cli.main import app
from relaxd.cli.reading.logs_command import read_group_trace
from tests.kit.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.kit.processes import run_python
from tests.kit.run_folders import write_run


@pytest.fixture(scope="module")
def receiver():
    with otlp_receiver() as running:
        yield running


def play(role: str, environment: dict[str, str], *words: str) -> str:
    process = run_python("-m", "tests.integration.telemetry.group_main", role, *words, environment=environment)
    assert process.returncode == 0, process.stderr
    return (process.stderr if role in ("abandoned", "away", "stage") else process.stdout).strip()


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


def received(receiver: OtlpReceiver, *names: str) -> list[ReceivedSpan]:
    """All spans, once these have come."""
    spans: list[ReceivedSpan] = receiver.wait_for(lambda r: {s.name for s in r.spans()} >= {*names} and r.spans())
    return spans


def test_a_group_is_one_trace_across_services(receiver, group):
    spans = received(receiver, "create rollout", "process train", "step")
    trace = [span for span in spans if span.trace_id in group["traceparent"]]
    (create,) = [span for span in trace if not span.parent_id]
    assert create.attributes["relaxd.group_id"] == "g1"
    assert all(span.parent_id == create.span_id for span in trace if span is not create)
    by_name = {span.name: span for span in trace if span.name != "wait"}
    assert {name: (span.service, span.kind) for name, span in by_name.items()} == {
        "create rollout": ("relaxd-coordinator", "PRODUCER"),
        "process rollout": ("relaxd-rollout", "CONSUMER"),
        "process reward": ("relaxd-reward", "CONSUMER"),
        "process train": ("relaxd-trainer", "CONSUMER"),
    }
    score = by_name["process reward"]
    assert by_name["process rollout"].instance == "rollout-1"
    assert score.attributes == {
        "messaging.system": "redis",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "reward",
        "messaging.message.id": "g1",
        "relaxd.group_id": "g1",
        "relaxd.stage": "reward",
        "relaxd.wait_seconds": 0.25,
        "samples": 8,
    }
    waits = {span.attributes["relaxd.stage"]: (span.end - span.start) / 1e9 for span in trace if span.name == "wait"}
    assert waits == {"rollout": pytest.approx(0.5), "reward": pytest.approx(0.25)}
    (step,) = [span for span in spans if span.name == "step"]
    assert step.trace_id != create.trace_id
    assert by_name["process train"].links == ((step.trace_id, step.span_id),)


def test_batches_link_to_the_groups_that_are_traced(receiver, group):
    spans = received(receiver, "receive reward", "commit reward")
    _, trace_id, span_id, _ = group["traceparent"].split("-")
    for name, kind in (("receive", "receive"), ("commit", "settle")):
        (batch,) = [span for span in spans if span.name == f"{name} reward"]
        assert (batch.kind, batch.parent_id, batch.links) == ("CLIENT", "", ((trace_id, span_id),))
        assert batch.attributes == {
            "messaging.system": "redis",
            "messaging.operation.name": name,
            "messaging.operation.type": kind,
            "messaging.destination.name": "reward",
            "messaging.batch.message_count": 1,  # the other group is not traced
        }


def test_logs_arrive_with_the_ids_of_their_span(receiver, group):
    (log,) = receiver.wait_for(lambda r: [log for log in r.logs() if log.logger == "relaxd.test"])
    (score,) = [span for span in received(receiver, "process reward") if span.name == "process reward"]
    assert (log.body, log.severity) == ("scoring 8 samples", "WARN")
    assert (log.trace_id, log.span_id) == (score.trace_id, score.span_id)
    assert (log.service, log.instance) == ("relaxd-reward", "reward-1")
    assert log.attributes["code.function.name"] == "main"


def test_histograms_have_exemplars(receiver, group):
    spans = {(span.trace_id, span.span_id): span.name for span in received(receiver, "process reward", "evaluate")}
    waits = receiver.wait_for(lambda r: r.points("relaxd.queue.wait_seconds"))
    # Only the first export after a value has it as an exemplar.
    assert [spans[exemplar] for point in waits for exemplar in point.exemplars] == ["process reward"]
    calls = receiver.wait_for(lambda r: r.points("rpc.server.call.duration"))
    scores = [
        exemplar
        for point in calls
        if point.attributes["rpc.method"] == "relaxd.v1.Reward/Score" and point.service == "relaxd-coordinator"
        for exemplar in point.exemplars
    ]
    assert {spans[exemplar] for exemplar in scores} == {"relaxd.v1.Reward/Score"}
    lists = [point for point in calls if point.attributes["rpc.method"] == "relaxd.v1.Reward/ListRewards"]
    assert lists
    assert not any(point.exemplars for point in lists), "they are in no trace"


def test_the_same_spans_are_in_the_runs_folder(receiver, group, run_folder: Path) -> None:
    sent = received(receiver, "create rollout", "process train", "step")
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


def test_a_steps_timeline_has_its_groups(receiver, group, run_folder: Path) -> None:
    def relaxd(*words: str) -> Result:
        return CliRunner().invoke(app, ["trace", *words, "--folder", str(run_folder)])

    sent = {span.span_id: span for span in received(receiver, "create rollout", "process train", "step")}
    events = json.loads(relaxd("--chrome", "4").stdout)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    shown = {event["args"]["span_id"]: event for event in events if event["ph"] == "X"}
    assert {sent[span_id].name for span_id in shown} >= {"create rollout", "process rollout", "process train", "step"}
    begin = min(sent[span_id].start for span_id in shown)
    for span_id, event in shown.items():
        span = sent[span_id]
        assert (event["name"], names[event["pid"]]) == (span.name, span.instance)
        assert event["ts"] == pytest.approx((span.start - begin) / 1e3)
        assert event["dur"] == pytest.approx((span.end - span.start) / 1e3)

    assert "there is no trace of step 99" in str(relaxd("--chrome", "99").exception)
    assert "name either a group or a step" in str(relaxd().exception)
    assert "name either a group or a step" in str(relaxd("g1", "--chrome", "4").exception)


def test_a_groups_tree_is_shown(group, run_folder: Path) -> None:
    def relaxd(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "--folder", str(run_folder)], env={"COLUMNS": "160"})

    title, _, *rows = relaxd("trace", "g1").stdout.splitlines()
    assert title.strip() == f"group g1, trace {group['traceparent'].split('-')[1]}"
    shown = {tuple(re.split(r"\s\s+", row.strip())[:2]): len(row) - len(row.lstrip()) for row in rows}
    assert shown == {
        ("create rollout", "coordinator-1"): 0,
        ("wait", "rollout-1"): 2,
        ("process rollout", "rollout-1"): 2,
        ("wait", "reward-1"): 2,
        ("process reward", "reward-1"): 2,
        ("process train", "trainer-1"): 2,
        ("step", "trainer-1"): 0,  # of another trace, to which "process train" links
    }
    assert "there is no trace of group g2" in str(relaxd("trace", "g2").exception)


def test_calls_join_their_callers_trace_and_begin_none(receiver, group):
    spans = received(receiver, "evaluate")
    (evaluate,) = [span for span in spans if span.name == "evaluate"]
    calls = [span for span in spans if span.name.startswith("relaxd.v1.") and span.service == "relaxd-coordinator"]
    asked, answered = ([span for span in calls if span.kind == kind] for kind in ("CLIENT", "SERVER"))
    assert {span.name for span in calls} == {"relaxd.v1.Reward/Score"}
    assert all(span.trace_id == evaluate.trace_id for span in calls)
    assert [span.parent_id for span in asked] == [evaluate.span_id] * 2
    assert sorted(span.parent_id for span in answered) == sorted(span.span_id for span in asked)
    method = {"rpc.system.name": "grpc", "rpc.method": "relaxd.v1.Reward/Score"}
    for span in asked:
        assert span.attributes.pop("server.address") == "127.0.0.1"
        assert span.attributes.pop("server.port") > 0
    ok, missing = ({**method, "rpc.response.status_code": status} for status in ("OK", "NOT_FOUND"))
    failed = {**missing, "error.type": "NOT_FOUND"}
    assert [(span.attributes, span.error) for span in asked] == [(ok, False), (failed, True)]
    # What isn't found is an answer of the server, and an error of whoever asked.
    assert [(span.attributes, span.error) for span in answered] == [(ok, False), (missing, False)]


def test_metrics_arrive_with_unit_and_attributes(receiver, group):
    receiver.wait_for(lambda r: {"relaxd.step.loss", "rpc.server.call.duration"} <= {p.name for p in r.points()})
    (loss,) = receiver.points("relaxd.step.loss")[-1:]
    assert (loss.value, loss.service, loss.attributes) == (0.5, "relaxd-trainer", {"relaxd.run_id": "run"})
    assert receiver.points("relaxd.step.number")[-1].value == 7
    assert receiver.points("relaxd.step.reward_own")[-1].value == 1.0
    assert not receiver.points("relaxd.step.kl")  # it was not a number
    assert receiver.points("relaxd.queue.waiting")[-1].value == 3
    wait = receiver.points("relaxd.queue.wait_seconds")[-1]
    assert (wait.value, wait.count, wait.unit) == (0.25, 1, "s")
    counts = {
        (p.attributes["rpc.method"], p.attributes["rpc.response.status_code"]): p.count
        for p in receiver.points("rpc.server.call.duration")
    }
    assert counts[("relaxd.v1.Reward/Score", "OK")] == 1
    assert counts[("relaxd.v1.Reward/Score", "NOT_FOUND")] == 1


def test_a_call_whose_caller_left_is_no_success(receiver):
    log = play("abandoned", receiver.environment())
    (leave,) = receiver.wait_for(lambda r: [span for span in r.spans() if span.name == "leave"])
    of_calls = [span for span in receiver.spans() if span.trace_id == leave.trace_id and span is not leave]
    status = "rpc.response.status_code"
    asked, answered = (
        sorted((s.name.rpartition("/")[2], s.attributes[status], s.error) for s in of_calls if s.kind == kind)
        for kind in ("CLIENT", "SERVER")
    )
    late = ("Score", "DEADLINE_EXCEEDED", True)
    assert asked == [*[("Generate", "CANCELLED", True)] * 2, ("Score", "CANCELLED", True), late]
    assert answered == [*[("Generate", "CANCELLED", False)] * 2, ("Score", "CANCELLED", False), late]
    counts = {
        (point.attributes["rpc.method"].rpartition("/")[2], point.attributes["rpc.response.status_code"]): point.count
        for point in receiver.points("rpc.server.call.duration")
        if point.service == "relaxd-abandoned"
    }
    assert counts == {("Score", "CANCELLED"): 1, ("Score", "DEADLINE_EXCEEDED"): 1, ("Generate", "CANCELLED"): 2}
    assert log.count("/relaxd.v1.Rollout/Generate was cancelled: CANCELLED") == 2
    assert "ERROR" not in log


def test_a_stage_that_fails_says_so_in_its_groups_trace(receiver: OtlpReceiver, redis_url: str) -> None:
    log = play("stage", receiver.environment(), redis_url)
    of_stage = [span for span in received(receiver, "drop rollout") if span.instance == "stage-1"]
    (create,) = [span for span in of_stage if span.name == "create rollout"]
    failed, dropped = sorted((s for s in of_stage if s.name == "process rollout"), key=lambda span: span.start)
    assert (failed.error, failed.attributes["relaxd.attempt"]) == (True, 1)
    assert (dropped.error, dropped.attributes["relaxd.attempt"]) == (False, 2)
    (line,) = [line for line in log.splitlines() if "stage rollout failed on group g1 (attempt 1): broken" in line]
    assert line.endswith(f" trace_id={create.trace_id} span_id={failed.span_id}")
    (told,) = [record for record in receiver.logs() if "failed on group g1" in record.body]
    assert (told.trace_id, told.span_id, told.severity) == (create.trace_id, failed.span_id, "ERROR")
    assert told.attributes["exception.type"] == "ValueError"
    assert "ValueError: broken" in told.attributes["exception.stacktrace"]
    batches = {span.name: span for span in of_stage if span.links}
    assert batches.keys() == {f"{name} rollout" for name in ("publish", "receive", "nack", "drop")}
    for span in batches.values():
        assert span.links == ((create.trace_id, create.span_id),)
        assert span.attributes["relaxd.run_id"] == "run"
        assert (span.attributes.get("messaging.client.id") == "rollout-1") == (span.name != "publish rollout")
    assert batches["drop rollout"].attributes["relaxd.reason"] == "reward_failed"


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
