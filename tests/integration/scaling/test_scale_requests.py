"""Scale requests during a run. Coordinator, supervisor and launcher are real; trainer and engines are doubles.

Time limits, and replicas that fail on their way, are in tests/unit/coordinator/test_scale_drive.py.
"""

import signal

import grpc
import pytest

from relaxd.roles import TRAINER
from relaxd.rpc.errors import field_violations
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2 as scale_pb
from tests.integration.scaling.kit import (
    ACTIVE,
    CANCELLED,
    CREATING,
    DONE,
    DRAINING,
    FAILED,
    PARTIAL,
    REMOVING,
    SYNCING,
    ScalingCluster,
)
from tests.kit.ports import free_port


def start_all(cluster: ScalingCluster, *, trainer: bool = True, max_restarts: int = 5, **environment: str) -> None:
    """Start all services and an endless run; return once the first engine counts as one of those that there are."""
    cluster.supervisor(max_restarts, **environment)
    cluster.judges()
    cluster.rollout("first", **environment)
    if trainer:
        cluster.trainer(PEER_STEP_SECONDS="0.1")
    cluster.start_when_up("run", run__steps=100000, trainer__groups_per_step=8)
    cluster.until("the first is registered", lambda: list(cluster.rollouts()) == ["first"])


def refusal(call, *arguments, **named) -> grpc.RpcError:
    try:
        answer = call(*arguments, **named)
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"not refused: {answer}")


def test_out_and_in_during_a_run(cluster: ScalingCluster) -> None:
    start_all(cluster)
    assert refusal(cluster.request).code() == grpc.StatusCode.NOT_FOUND
    assert refusal(cluster.cancel).code() == grpc.StatusCode.FAILED_PRECONDITION
    cluster.until_step(1)

    planned = cluster.out(3, request_id="more", dry_run=True)
    assert [replica.launch_id for replica in planned.scaled] == ["rollout-more-1", "rollout-more-2"]
    assert refusal(cluster.request).code() == grpc.StatusCode.NOT_FOUND
    other_engine = refusal(cluster.out, 0, sglang_urls=["http://gpu-1:30000"])
    assert 'only runs with "sglang_external" use servers that run already' in other_engine.details()

    cluster.closed.touch()  # the request is not done before the questions about it
    asked = cluster.out(3, request_id="more", timeout_seconds=240)
    assert asked.state in (scale_pb.SCALE_STATE_PENDING, CREATING)
    assert [replica.launch_id for replica in asked.scaled] == ["rollout-more-1", "rollout-more-2"]
    # The same again is the same request, by id and by target; anything else has to wait.
    assert cluster.out(3, timeout_seconds=240).request_id == "more"
    assert cluster.out(3, request_id="more", timeout_seconds=240).create_time == asked.create_time
    busy = refusal(cluster.out, 4)
    assert busy.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "'more' is in progress" in busy.details()
    assert refusal(cluster.into, 1).code() == grpc.StatusCode.FAILED_PRECONDITION
    assert refusal(cluster.out, 4, request_id="more").code() == grpc.StatusCode.ALREADY_EXISTS
    cluster.closed.unlink()

    grown = cluster.until_scaled(ACTIVE, FAILED, PARTIAL)
    assert grown.state == ACTIVE, grown
    new = [replica.replica_id for replica in grown.scaled]
    assert set(cluster.rollouts()) == {"first", *new}
    for name in new:  # weights first, then prompts
        cluster.until(f"{name} works", lambda name=name: cluster.calls(name, "generate"))
        methods = [call["method"] for call in cluster.calls(name)]
        assert "ReceiveWeights" in methods[: methods.index("generate")]

    assert cluster.out(3).state == ACTIVE  # there are as many
    assert cluster.out(2).scaled == []
    assert cluster.out(3, request_id="more", timeout_seconds=240) == grown
    stays = refusal(cluster.into, 1, replica_ids=["first"])
    assert field_violations(stays) == [("replica_ids", "must be empty when replicas is given")]
    assert "was not scaled out" in refusal(cluster.into, 0, replica_ids=["first"]).details()
    assert refusal(cluster.into, 0, replica_ids=["nobody"]).code() == grpc.StatusCode.NOT_FOUND

    processes = cluster.launched()
    assert len(processes) == 2
    shrunk = cluster.into(2, drain_seconds=5)
    assert [replica.replica_id in new for replica in shrunk.scaled] == [True]
    assert cluster.until_scaled(DONE, FAILED).state == DONE
    assert cluster.into(1).request_id
    assert cluster.until_scaled(DONE, FAILED).state == DONE
    assert set(cluster.rollouts()) == {"first"}
    assert cluster.launched() == {}
    ways = [request.direction for request in cluster.requests(page_size=3)]
    assert ways == [scale_pb.SCALE_DIRECTION_IN] * 2 + [scale_pb.SCALE_DIRECTION_OUT]
    less = cluster.requests(filter=scale_pb.ScaleFilter(direction=scale_pb.SCALE_DIRECTION_IN))
    assert [request.state for request in less] == [DONE, DONE]
    assert cluster.requests(filter=scale_pb.ScaleFilter(role="rollout", states=[FAILED, PARTIAL])) == []

    before = cluster.run().step
    cluster.until_step(before + 2)
    cluster.ended_run()


def test_wrong_requests_name_their_fields(cluster: ScalingCluster) -> None:
    cluster.until("the coordinator", lambda: cluster.stub.ListRuns(pb.ListRunsRequest(), timeout=5) is not None)

    def fields(call, *arguments, **named) -> set[str]:
        error = refusal(call, *arguments, **named)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
        return {field for field, _ in field_violations(error)}

    assert fields(cluster.out, 0) == {"replicas"}
    assert fields(cluster.out, 4097) == fields(cluster.out, -1) == {"replicas"}
    assert fields(cluster.out, 2, role=TRAINER, request_id="a b", timeout_seconds=-1) == {
        *("role", "request_id", "timeout_seconds")
    }
    assert fields(cluster.out, 2, addresses=["host:1"]) == {"addresses"}
    assert fields(cluster.out, 0, addresses=["host:1", "host", "host:1"]) == {"addresses", "addresses[1]"}
    assert fields(cluster.out, 0, addresses=["host:1"], gpu_uuids=["GPU-1"]) == {"gpu_uuids"}
    assert fields(cluster.out, 2, gpu_uuids=["0"]) == {"gpu_uuids[0]"}
    assert fields(cluster.out, 2, sglang_urls=["http://host:1"]) == {"sglang_urls"}
    assert fields(cluster.out, 0, role="reward", sglang_urls=["host:1"]) == {"role", "sglang_urls[0]"}
    assert fields(cluster.requests, filter=scale_pb.ScaleFilter(role="x", direction=7, states=[4] * 11 + [0])) == {
        *("filter.role", "filter.direction", "filter.states[11]")
    }
    assert fields(cluster.into, 0) == {"replicas"}
    assert fields(cluster.into, 1, replica_ids=["a"]) == {"replica_ids"}
    assert fields(cluster.into, 1, drain_seconds=1e9) == {"drain_seconds"}
    assert "can't be divided evenly" in refusal(cluster.out, 2, gpu_uuids=["GPU-1", "GPU-2", "GPU-3"]).details()
    cluster.kill("coordinator")
    cluster.coordinator(launcher=False)
    no_launcher = cluster.until("the coordinator", lambda: "no launcher" in refusal(cluster.out, 2).details())
    assert no_launcher


def test_a_launched_replica_gets_its_server(cluster: ScalingCluster) -> None:
    cluster.supervisor(max_restarts=0)
    cluster.fail("-30000")
    cluster.until("the coordinator", lambda: cluster.requests() == [])
    cluster.out(0, sglang_urls=["http://gpu-1:30000"])
    (scaled,) = cluster.until_scaled(FAILED).scaled
    assert scaled.launch_id == "sglang-gpu-1-30000"
    assert "its server is http://gpu-1:30000" in scaled.detail


@pytest.mark.night
def test_cancelled_in_every_state(cluster: ScalingCluster) -> None:
    start_all(cluster, trainer=False, PEER_GENERATE_SECONDS="0.5")
    cluster.closed.touch()
    cluster.out(2)
    cluster.until_scaled(CREATING)
    cluster.until("it is launched", cluster.launched)
    assert cluster.cancel().cancelled
    assert cluster.until_scaled(CANCELLED).scaled[0].detail == "cancelled"
    assert cluster.launched() == {}
    assert cluster.cancel(cluster.request().request_id).state == CANCELLED  # again is the same

    cluster.closed.unlink()
    cluster.out(2)
    waiting = cluster.until_scaled(SYNCING)  # no trainer, so no weights
    assert waiting.scaled[0].detail == "it waits for weights"
    cluster.cancel(waiting.request_id)
    cluster.until_scaled(CANCELLED)
    assert (cluster.launched(), list(cluster.rollouts())) == ({}, ["first"])

    cluster.trainer(PEER_STEP_SECONDS="0.1")
    cluster.out(2)
    (scaled,) = cluster.until_scaled(ACTIVE, FAILED).scaled
    over = refusal(cluster.cancel, cluster.request().request_id)
    assert over.code() == grpc.StatusCode.FAILED_PRECONDITION

    cluster.hold.touch()
    cluster.until("it holds groups", lambda: cluster.rollouts()[scaled.replica_id].status.held_groups)
    cluster.into(1, drain_seconds=120)
    cluster.until_scaled(DRAINING)
    cluster.cancel()
    cluster.until_scaled(CANCELLED)
    cluster.hold.unlink()
    begun = len(cluster.calls(scaled.replica_id, "generate"))
    # More than what it could have begun with before it was asked to drain.
    cluster.until("it works again", lambda: len(cluster.calls(scaled.replica_id, "generate")) > begun + 8)

    cluster.processes["supervisor"].send_signal(signal.SIGSTOP)  # now nothing can be removed
    cluster.into(1)
    cluster.until_scaled(REMOVING)
    late = refusal(cluster.cancel)
    assert late.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "nothing left to roll back" in late.details()
    cluster.processes["supervisor"].send_signal(signal.SIGCONT)
    cluster.until_scaled(DONE, FAILED)
    assert (cluster.request().state, cluster.launched()) == (DONE, {})
    cluster.ended_run()


@pytest.mark.night
def test_a_coordinator_killed_in_every_state_goes_on(cluster: ScalingCluster) -> None:
    # One group each: else one replica takes all that there are, and the others have nothing to drain.
    start_all(cluster, trainer=False, PEER_GENERATE_SECONDS="1", PEER_CONCURRENCY="1")

    def kill_in(*states: int) -> None:
        cluster.until_scaled(*states)
        cluster.kill("coordinator")
        cluster.coordinator()
        cluster.until("the coordinator", lambda: cluster.request() is not None)

    cluster.closed.touch()
    cluster.out(3, request_id="more")
    kill_in(CREATING)
    cluster.closed.unlink()
    kill_in(SYNCING)
    assert len(cluster.launched()) == 2
    cluster.trainer(PEER_STEP_SECONDS="0.1")
    assert cluster.until_scaled(ACTIVE, FAILED, PARTIAL).state == ACTIVE
    assert len(cluster.launched()) == 2
    assert len(cluster.rollouts()) == 3
    new = [replica.replica_id for replica in cluster.request().scaled]
    cluster.hold.touch()
    cluster.until("they work", lambda: all(cluster.rollouts()[name].status.held_groups for name in new))

    cluster.into(1, request_id="less", drain_seconds=240)
    kill_in(DRAINING)
    cluster.hold.unlink()
    cluster.until_scaled(REMOVING, DONE)
    cluster.processes["supervisor"].send_signal(signal.SIGSTOP)
    kill_in(REMOVING, DONE)
    cluster.processes["supervisor"].send_signal(signal.SIGCONT)
    assert cluster.until_scaled(DONE, FAILED, PARTIAL).state == DONE
    assert cluster.launched() == {}
    # A kill may come between a removal and its record: then a lease ends first.
    cluster.until("the first is left", lambda: list(cluster.rollouts()) == ["first"])
    assert cluster.request("more").state == ACTIVE
    for name in new:  # whoever was drained had nothing taken from it in the middle
        assert "handed back" not in cluster.state.log(name).read_text()
    cluster.ended_run()


@pytest.mark.slow
def test_some_or_all_that_cannot_be_started(cluster: ScalingCluster) -> None:
    start_all(cluster, max_restarts=0)
    cluster.fail("-2")
    cluster.out(3, request_id="two")
    some = cluster.until_scaled(PARTIAL, ACTIVE, FAILED)
    assert some.state == PARTIAL
    assert [replica.state for replica in some.scaled] == [ACTIVE, FAILED]
    assert "exited with code 1" in some.scaled[1].detail
    assert some.scaled[1].launch_id in some.reason
    cluster.until("one is left", lambda: len(cluster.launched()) == 1)
    assert len(cluster.rollouts()) == 2

    cluster.out(4, request_id="all", rollback_all=True)  # beside the first and two-1, which stay
    back = cluster.until_scaled(PARTIAL, ACTIVE, FAILED)
    assert (back.state, back.scaled[0].state, back.scaled[1].state) == (FAILED, CANCELLED, FAILED), back
    assert (len(cluster.launched()), len(cluster.rollouts())) == (1, 2)

    cluster.fail("-1")
    cluster.out(4, request_id="none")
    assert cluster.until_scaled(PARTIAL, ACTIVE, FAILED).state == FAILED
    cluster.ended_run()


@pytest.mark.slow
def test_services_that_wait_to_be_asked(cluster: ScalingCluster) -> None:
    start_all(cluster)
    ports = {name: free_port() for name in ("waiting", "judge")}
    standby = {"RELAXD_STANDBY": "yes"}
    cluster.rollout("waiting", RELAXD_PORT=str(ports["waiting"]), **standby)
    cluster.replica("judge", "services.reward", RELAXD_PORT=str(ports["judge"]), **standby)
    there = [f"127.0.0.1:{port}" for port in ports.values()]
    nobody = f"127.0.0.1:{free_port()}"
    cluster.until_step(1)
    assert list(cluster.rollouts()) == ["first"]

    cluster.out(0, addresses=[nobody], timeout_seconds=1)
    absent = cluster.until_scaled(PARTIAL, ACTIVE, FAILED)
    assert absent.state == FAILED
    assert "not active within 1 s" in absent.scaled[0].detail
    cluster.out(0, addresses=there, request_id="theirs")
    theirs = cluster.until_scaled(PARTIAL, ACTIVE, FAILED)
    assert [replica.state for replica in theirs.scaled] == [ACTIVE, FAILED], theirs
    assert "127.0.0.1" in theirs.scaled[1].detail
    assert "of role reward, not rollout" in theirs.scaled[1].detail
    cluster.until("it works", lambda: cluster.calls("waiting", "generate"))
    assert cluster.out(0, addresses=there[:1]).scaled == []  # it is there

    cluster.into(0, replica_ids=["waiting"])
    assert cluster.until_scaled(DONE, FAILED).state == DONE
    assert list(cluster.rollouts()) == ["first"]
    assert cluster.processes["waiting"].poll() is None  # it was told to leave, and waits
    cluster.out(0, addresses=there[:1])
    assert cluster.until_scaled(ACTIVE, FAILED).state == ACTIVE
    cluster.ended_run()
