"""Bad requests to every RPC of the coordinator: the error names the field and the rule."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import redis
from typer.testing import CliRunner

from relaxd import PROTOCOL_VERSION
from relaxd.board.attempts import samples_attempt
from relaxd.cli.main import app
from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.client.run_changes import merge
from relaxd.redis_client import key_prefix
from relaxd.roles import COORDINATOR, REWARD, TRAINER
from relaxd.rpc.errors import field_violations
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_IDLE,
    ReplicaStatus,
    WeightVersion,
)
from tests.integration.coordinator.cluster import LEASE_SECONDS, Cluster

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
def up(shared_cluster: Cluster) -> Cluster:
    shared_cluster.until("up", lambda: shared_cluster.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)
    return shared_cluster


def refused(call, request: object) -> grpc.RpcError:
    def ask() -> None:
        answer = call(request, timeout=20)
        if not hasattr(answer, "DESCRIPTOR"):
            list(answer)  # a stream

    with pytest.raises(grpc.RpcError) as caught:
        ask()
    return caught.value


def violations(call, request: object) -> dict[str, str]:
    error = refused(call, request)
    assert error.code() == INVALID, error
    return dict(field_violations(error))


def registration(**changes: object) -> pb.RegisterRequest:
    values = {"replica_id": "r-1", "role": REWARD, "address": "127.0.0.1:9", "protocol_version": PROTOCOL_VERSION}
    return pb.RegisterRequest(registration=pb.Registration(**(values | changes)))


def test_start_run_names_what_is_wrong_in_the_configuration(up: Cluster) -> None:
    start = up.stub.StartRun

    def asked(toml: str, run_id: str = "") -> dict[str, str]:
        return violations(start, pb.StartRunRequest(run_id=run_id, config_toml=toml))

    assert "is empty" in asked("")["config_toml"]
    assert set(asked("", run_id="../x")) == {"run_id", "config_toml"}
    assert "run_id" in asked(up.config(), run_id="coordinator")
    assert "line 1" in asked("[run\nsteps = 3")["config_toml"]
    assert "run.steps" in asked(up.config(run__stepps=3))["config_toml.run.stepps"]
    wrong = asked(up.config(run__steps=0, rollout__engine="vllm"))
    assert "at least 1" in wrong["config_toml.run.steps"]
    assert "transformers" in wrong["config_toml.rollout.engine"]
    assert "neither a folder" in asked(up.config(model__path="nope"))["config_toml.model.path"]
    assert list(up.stub.ListRuns(pb.ListRunsRequest(), timeout=5).runs) == []


def test_start_run_reads_the_data_first(up: Cluster, tmp_path: Path) -> None:
    broken, empty, long = tmp_path / "broken.jsonl", tmp_path / "empty.jsonl", tmp_path / "long.jsonl"
    broken.write_text('{"prompt": "fine"}\n{"prompt": \n')
    empty.write_text("")
    long.write_text(json.dumps({"prompt": "word " * 500}) + "\n")
    (tmp_path / "empty-model").mkdir()

    def asked(**overrides: object) -> dict[str, str]:
        return violations(up.stub.StartRun, pb.StartRunRequest(config_toml=up.config(**overrides)))

    jsonl = {"data__source": "jsonl"}
    assert "line 2: not JSON" in asked(**jsonl, data__path=str(broken))["config_toml.data.path"]
    assert "is empty" in asked(**jsonl, data__path=str(empty))["config_toml.data.path"]
    assert "No such file" in asked(**jsonl, data__path="/nope.jsonl")["config_toml.data.path"]
    assert "line 1 has" in asked(**jsonl, data__path=str(long), data__max_prompt_tokens=64)["config_toml.data.path"]
    assert "no tokenizer" in asked(model__path=str(tmp_path / "empty-model"))["config_toml.model.path"]
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "a"}\n')
    nothing = asked(**jsonl, data__path=str(short), eval__prompts=5)
    assert "nothing is held out" in nothing["config_toml.eval.prompts"]
    unwritable = asked(run__folder="/proc/nope")
    assert "can't write" in unwritable["config_toml.run.folder"]


def test_two_runs_with_one_id_and_two_runs_at_once(up: Cluster) -> None:
    up.start_run("twice")
    error = refused(up.stub.StartRun, pb.StartRunRequest(run_id="twice", config_toml=up.config()))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    error = refused(up.stub.StartRun, pb.StartRunRequest(config_toml=up.config()))
    assert (error.code(), "'twice' is active" in error.details()) == (PRECONDITION, True)
    # A run without replicas can be stopped, and its id stays taken.
    error = refused(up.stub.StopRun, pb.StopRunRequest(run_id="other"))
    assert error.code() == PRECONDITION
    up.stub.StopRun(pb.StopRunRequest(run_id="twice"), timeout=5)
    assert up.until_state(pb.RUN_STATE_STOPPED).reason == "stopped"
    error = refused(up.stub.StartRun, pb.StartRunRequest(run_id="twice", config_toml=up.config()))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    # The files of an id that this Redis never knew are not mixed with those of a new run.
    (up.folder / "runs" / "elsewhere" / "steps").mkdir(parents=True)
    error = refused(up.stub.StartRun, pb.StartRunRequest(run_id="elsewhere", config_toml=up.config()))
    assert (error.code(), "contains an earlier run" in error.details()) == (PRECONDITION, True)


def test_a_request_starts_one_run_however_often_it_comes(up: Cluster) -> None:
    start, request = up.stub.StartRun, pb.StartRunRequest(config_toml=up.config(), request_id="a-request")
    hasty = [start.future(request, timeout=seconds) for seconds in (0.01, 0.03, 0.1, 0.3)]  # their callers give up
    started = start(request, timeout=20).run
    for call in hasty:
        with contextlib.suppress(grpc.RpcError):
            assert call.result().run.run_id == started.run_id
    assert start(request, timeout=5).run.run_id == started.run_id
    assert up.run().run_id == started.run_id
    for other in (
        pb.StartRunRequest(config_toml=up.config(run__steps=5), request_id="a-request"),
        pb.StartRunRequest(config_toml=up.config(), request_id="a-request", run_id="another"),
    ):
        error = refused(start, other)
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        assert f"'a-request' started run '{started.run_id}' with another run_id or configuration" in error.details()
    # The run has ended, and the coordinator is another one.
    up.stub.StopRun(pb.StopRunRequest(), timeout=5)
    up.until_state(pb.RUN_STATE_STOPPED)
    assert set(violations(start, pb.StartRunRequest(config_toml=up.config(), request_id="a request"))) == {"request_id"}
    up.kill("coordinator")
    up.coordinator()
    up.until("up", lambda: up.run())
    assert set(violations(start, pb.StartRunRequest(config_toml=up.config(), request_id="a request"))) == {"request_id"}
    again = start(request, timeout=5).run
    assert (again.run_id, again.state) == (started.run_id, pb.RUN_STATE_STOPPED)
    # A deleted run is forgotten together with its request.
    up.stub.DeleteRun(pb.DeleteRunRequest(run_id=started.run_id), timeout=5)
    assert start(request, timeout=20).run.run_id != started.run_id
    up.stub.StopRun(pb.StopRunRequest(), timeout=5)
    up.until_state(pb.RUN_STATE_STOPPED)


def test_a_start_that_was_cut_off_is_taken_up(up: Cluster) -> None:
    folder = up.folder / "runs" / "cut"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")  # an earlier coordinator died here: the run has no record
    assert up.start_run("cut").run_id == "cut"
    up.stub.StopRun(pb.StopRunRequest(), timeout=5)
    up.until_state(pb.RUN_STATE_STOPPED)


def test_a_start_whose_answer_is_lost_is_no_second_run(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with CoordinatorClient(f"127.0.0.1:{up.port}") as client:
        start, answers = client._stub.StartRun, []

        def lossy(request: pb.StartRunRequest, timeout: float) -> pb.StartRunResponse:
            answers.append(start(request, timeout=timeout))
            if len(answers) == 1:  # nobody gets to know of it
                up.kill("coordinator")
                up.coordinator()
                return start(request, timeout=0.1)
            return answers[-1]

        monkeypatch.setattr(client._stub, "StartRun", lossy)
        run = client.start_run(up.config())
        assert [answer.run.run_id for answer in answers] == [run.run_id] * 2
        assert [one.state for one in client.runs()].count(pb.RUN_STATE_PENDING) == 1
        client.stop_run(run.run_id, "")
    up.until_state(pb.RUN_STATE_STOPPED)


def test_calls_about_runs(up: Cluster) -> None:
    stub = up.stub
    for call, request in (
        (stub.GetRun, pb.GetRunRequest(run_id="no/slash")),
        (stub.PauseRun, pb.PauseRunRequest(run_id=" ")),
        (stub.ResumeRun, pb.ResumeRunRequest(run_id="x" * 65)),
        (stub.StopRun, pb.StopRunRequest(run_id=".hidden")),
        (stub.SyncWeights, pb.SyncWeightsRequest(run_id="*")),
        (stub.GetWeights, pb.GetWeightsRequest(run_id="*")),
    ):
        assert set(violations(call, request)) == {"run_id"}
    wrong = violations(stub.ListSamples, pb.ListSamplesRequest(run_id="*", page_size=1001, step=-1))
    assert set(wrong) == {"run_id", "page_size", "step"}
    request = pb.GetMetricsRequest(run_id="*", first_step=2, last_step=1, max_points=10_001, names=[""])
    assert set(violations(stub.GetMetrics, request)) == {"run_id", "last_step", "max_points", "names"}
    wrong = violations(stub.WatchRun, pb.WatchRunRequest(run_id="*", resume_token="x", max_seconds=301))
    assert set(wrong) == {"run_id", "resume_token", "max_seconds"}
    for call, request in (
        (stub.GetRun, pb.GetRunRequest(run_id="unknown")),
        (stub.WatchRun, pb.WatchRunRequest(run_id="unknown")),
        (stub.ListSamples, pb.ListSamplesRequest(run_id="unknown")),
    ):
        assert refused(call, request).code() == grpc.StatusCode.NOT_FOUND
    assert refused(stub.PauseRun, pb.PauseRunRequest()).code() == PRECONDITION


def test_a_run_is_held_and_ended_from_the_command_line(up: Cluster) -> None:
    def relaxd(*words: str) -> str:
        return CliRunner().invoke(app, [*words, "--coordinator", f"127.0.0.1:{up.port}"], catch_exceptions=False).output

    with pytest.raises(CliError, match="no run is active"):
        relaxd("pause")
    up.start_run("by-hand")
    assert relaxd("pause", "--reason", "a closer look") == "run by-hand is paused: a closer look\n"
    with pytest.raises(CliError, match="runs/another is not the folder of a run"):
        relaxd("resume", "another")
    assert "paused" not in relaxd("resume", "by-hand")
    assert up.run().state == pb.RUN_STATE_PENDING
    assert "is stop" in relaxd("stop", "--reason", "seen enough")
    assert up.until_state(pb.RUN_STATE_STOPPED).reason == "seen enough"


def test_samples_come_in_pages_however_long_they_are(up: Cluster) -> None:
    up.start_run("long")
    with redis.Redis.from_url(up.redis_url) as client:
        prefix = key_prefix("long")
        for step, numbers in ((1, range(20)), (2, range(20, 40))):
            shown = [{"group_id": f"g{number}", "response": "x" * 100_000} for number in numbers]
            count, attempt = samples_attempt(prefix, step, shown)
            for one in attempt.slices():
                client.set(one.key, b"".join(one.data.parts))
            client.xadd(f"{prefix}samples", {"count": count, "pointer": attempt.pointer}, id=f"{step}-0")
    for step, expected in ((0, range(39, -1, -1)), (1, range(19, -1, -1))):
        request, found, pages = pb.ListSamplesRequest(run_id="long", step=step, page_size=1000), [], 0
        while not found or request.page_token:
            page = up.stub.ListSamples(request, timeout=5)
            assert page.ByteSize() < 1.1 * (1 << 20)
            found += [sample.group_id for sample in page.samples]
            request.page_token, pages = page.next_page_token, pages + 1
        assert found == [f"g{number}" for number in expected]
        assert pages > len(found) // 11
    with CoordinatorClient(f"127.0.0.1:{up.port}") as client:
        assert [sample.group_id for sample in client.samples("long", limit=30)] == [f"g{n}" for n in range(39, 9, -1)]
    for wrong in ("x", up.stub.ListSamples(pb.ListSamplesRequest(run_id="long"), timeout=5).next_page_token):
        request = pb.ListSamplesRequest(run_id="long", step=2, page_token=wrong)
        assert set(violations(up.stub.ListSamples, request)) == {"page_token"}
    up.stub.StopRun(pb.StopRunRequest(), timeout=5)
    up.until_state(pb.RUN_STATE_STOPPED)


def test_registration_and_leases(up: Cluster) -> None:
    stub = up.stub
    wrong = violations(stub.Register, registration(replica_id="", role="", address="nowhere"))
    assert set(wrong) == {"registration.replica_id", "registration.role", "registration.address"}
    assert set(violations(stub.Register, registration(role=COORDINATOR, engine_ranks=-1))) == {
        "registration.role",
        "registration.engine_ranks",
    }
    error = refused(stub.Register, registration(protocol_version=PROTOCOL_VERSION + 1, package_version="9.9"))
    assert error.code() == PRECONDITION
    assert f"relaxd 9.9) speaks protocol version {PROTOCOL_VERSION + 1}" in error.details()

    answer = stub.Register(registration(), timeout=5)
    assert (answer.lease_seconds, answer.assignment.run_id) == (LEASE_SECONDS, "")
    status = ReplicaStatus(replica_id="r-1", state=REPLICA_STATE_IDLE, detail="fine")
    stub.Heartbeat(pb.HeartbeatRequest(replica_id="r-1", status=status), timeout=5)
    (replica,) = stub.ListReplicas(pb.ListReplicasRequest(role=REWARD), timeout=5).replicas
    assert replica.status == status
    assert list(stub.ListReplicas(pb.ListReplicasRequest(role=TRAINER), timeout=5).replicas) == []
    stub.Register(registration(replica_id="r-2"), timeout=5)
    (first,) = (page := stub.ListReplicas(pb.ListReplicasRequest(page_size=1), timeout=5)).replicas
    (second,) = stub.ListReplicas(pb.ListReplicasRequest(page_token=page.next_page_token), timeout=5).replicas
    assert [one.registration.replica_id for one in (first, second)] == ["r-1", "r-2"]
    elsewhere = pb.ListReplicasRequest(role=REWARD, page_token=page.next_page_token)
    assert set(violations(stub.ListReplicas, elsewhere)) == {"page_token"}
    # It is asked to drain at its next heartbeat even when it can't be reached now.
    error = refused(stub.DrainReplica, pb.DrainReplicaRequest(replica_id="r-1"))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    begun = time.monotonic()
    assert stub.Heartbeat(pb.HeartbeatRequest(replica_id="r-1", status=status), timeout=5).drain
    # Without heartbeats the lease ends, not before and not long after.
    up.until("gone", lambda: not stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas)
    assert LEASE_SECONDS * 0.9 < time.monotonic() - begun < LEASE_SECONDS + 20  # a busy machine's
    assert refused(stub.Heartbeat, pb.HeartbeatRequest(replica_id="r-1")).code() == grpc.StatusCode.NOT_FOUND
    assert refused(stub.DrainReplica, pb.DrainReplicaRequest(replica_id="r-1")).code() == grpc.StatusCode.NOT_FOUND


def test_announcements(up: Cluster) -> None:
    stub = up.stub
    assert set(violations(stub.AnnounceVersion, pb.AnnounceVersionRequest(weights=WeightVersion(version=-1)))) == {
        "run_id",
        "replica_id",
        "weights.term",
        "weights.version",
    }

    def announce(term: int, version: int, run_id: str = "announced") -> pb.AnnounceVersionRequest:
        weights = WeightVersion(term=term, version=version)
        return pb.AnnounceVersionRequest(run_id=run_id, replica_id="trainer", weights=weights)

    assert refused(stub.AnnounceVersion, announce(1, 0)).code() == PRECONDITION
    up.start_run("announced")
    stub.AnnounceVersion(announce(2, 1), timeout=5)
    assert refused(stub.AnnounceVersion, announce(1, 5)).code() == PRECONDITION
    stub.AnnounceVersion(announce(2, 1), timeout=5)  # said again: the answer was lost
    assert stub.GetWeights(pb.GetWeightsRequest(), timeout=5).announced == WeightVersion(term=2, version=1)
    with pytest.raises(grpc.RpcError) as caught:
        stub.SyncWeights(pb.SyncWeightsRequest(), timeout=2)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    stub.StopRun(pb.StopRunRequest(), timeout=5)
    up.until_state(pb.RUN_STATE_STOPPED)


def test_a_watch_speaks_every_second_and_ends_in_time(up: Cluster) -> None:
    up.start_run("watched")
    begun = time.monotonic()
    times = [
        time.monotonic() for _ in up.stub.WatchRun(pb.WatchRunRequest(run_id="watched", max_seconds=2.5), timeout=60)
    ]
    assert 2.0 < time.monotonic() - begun < 30  # a busy machine's
    assert len(times) >= 3

    # Many watchers ask Redis no more often than one, and large fields come once.
    with redis.Redis.from_url(up.redis_url) as client, ThreadPoolExecutor(12) as watchers:
        client.config_resetstat()
        request = pb.WatchRunRequest(run_id="watched", max_seconds=2)
        asked = [watchers.submit(lambda: list(up.stub.WatchRun(request, timeout=60))) for _ in range(12)]
        heard = [future.result() for future in asked]
        assert client.info("commandstats")["cmdstat_scard"]["calls"] < 30
    for messages in heard:
        assert [message.run.config_json != "" for message in messages] == [True] + [False] * (len(messages) - 1)
        assert all("config_json" in message.unchanged for message in messages[1:])
        assert {message.run.run_id for message in messages} == {"watched"}

    # One who asks for changes gets the whole run and then what has changed, which merged is the run; one who reads
    # slowly gets all changes in few messages.
    request = pb.WatchRunRequest(run_id="watched", max_seconds=20, only_changes=True)
    stream = up.stub.WatchRun(request, timeout=60)
    first = next(stream)
    known = merge(pb.Run(), first)
    assert (first.partial, known.config_json) == (False, up.run("watched").config_json)
    for number in range(40):
        up.stub.PauseRun(pb.PauseRunRequest(run_id="watched", reason=f"reason {number}"), timeout=5)
        up.stub.ResumeRun(pb.ResumeRunRequest(run_id="watched"), timeout=5)
    up.stub.PauseRun(pb.PauseRunRequest(run_id="watched", reason="for lunch"), timeout=5)
    sizes = [first.ByteSize()]
    for message in stream:
        known = merge(known, message)
        sizes.append(message.ByteSize())
        assert message.partial
        assert "config_json" not in {field.name for field, _ in message.run.ListFields()}
        if known.reason == "for lunch":
            break
    stream.cancel()
    now = up.run("watched")
    assert (known.state, known.run_id, known.config_json) == (pb.RUN_STATE_PAUSED, "watched", now.config_json)
    assert max(sizes[1:]) < sizes[0] / 4
    up.stub.ResumeRun(pb.ResumeRunRequest(run_id="watched"), timeout=5)

    up.stub.StopRun(pb.StopRunRequest(), timeout=5)
    last = list(up.stub.WatchRun(pb.WatchRunRequest(max_seconds=60), timeout=30))[-1]
    assert last.run.state == pb.RUN_STATE_STOPPED  # an ended run ends the watch
    assert last.resume_token == "0"
