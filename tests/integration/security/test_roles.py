"""Each service has a token of its own, as `deploy/secrets.sh` makes them; what one can do that leaked."""

from collections.abc import Iterator

import grpc
import pytest

from relaxd import PROTOCOL_VERSION
from relaxd.rpc.client import sync_channel
from relaxd.rpc.errors import explain
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import replica_pb2, replica_pb2_grpc, reward_pb2, reward_pb2_grpc, scaling_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.integration.security.guarded_cluster import Guarded, guarded_cluster
from tests.kit.processes import run_python


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A coordinator that is up."""
    with guarded_cluster(tmp_path_factory.mktemp("guarded")) as cluster:
        yield cluster


def outcome(call, request: object) -> str:
    """The status of a call and what it says; empty if it is answered."""
    try:
        answer = call(request, timeout=20)
        if not hasattr(answer, "DESCRIPTOR"):
            next(answer)
    except grpc.RpcError as error:
        return explain(error)
    return ""


def registration(role: str, replica_id: str, **more: str) -> pb.RegisterRequest:
    values = {"role": role, "replica_id": replica_id, "address": "127.0.0.1:9", "protocol_version": PROTOCOL_VERSION}
    return pb.RegisterRequest(registration=pb.Registration(**values, **more))


PULSE = replica_pb2.ReplicaStatus(state=replica_pb2.REPLICA_STATE_FAILED)
REFUSED = {
    "register as trainer": ("Register", registration("trainer", "trainer-2")),
    "replace the trainer": ("Register", registration("reward", "trainer")),
    "take the trainer's instance": ("Register", registration("reward", "reward-9", instance="trainer")),
    "report for the trainer": ("Heartbeat", pb.HeartbeatRequest(replica_id="trainer", status=PULSE)),
    "lease for the trainer": ("LeaseGpus", pb.LeaseGpusRequest(replica_id="trainer", count=0)),
    "take the trainer's turn": ("TakeTurn", pb.TakeTurnRequest(replica_id="trainer")),
    "announce a version": ("AnnounceVersion", pb.AnnounceVersionRequest(run_id="guarded", replica_id="trainer")),
    "start a run": ("StartRun", pb.StartRunRequest(config_toml="")),
    "stop a run": ("StopRun", pb.StopRunRequest()),
    "drain a replica": ("DrainReplica", pb.DrainReplicaRequest(replica_id="rollout")),
    "scale": ("ScaleOut", scaling_pb2.ScaleOutRequest(replicas=9)),
    "read what the model wrote": ("ListSamples", pb.ListSamplesRequest()),
    "watch": ("WatchRun", pb.WatchRunRequest()),
}
SAYS = {
    "register as trainer": 'token "reward" is for reward, but to register trainer-2 as trainer is for trainer: give '
    "this process a token for trainer (RELAXD_TOKEN_FILE)",
    "replace the trainer": "but to replace trainer is for trainer",
    "report for the trainer": "but to report for trainer is for trainer",
    "announce a version": 'token "reward" is for reward, but /relaxd.v1.Coordinator/AnnounceVersion is for trainer or '
    "admin: call it with such a token",
    "start a run": "/relaxd.v1.Coordinator/StartRun is for admin: call it with such a token",
}


@pytest.mark.parametrize("deed", REFUSED)
def test_a_token_that_leaked_from_the_reward_service_is_no_other(guarded: Guarded, deed: str) -> None:
    method, request = REFUSED[deed]
    with sync_channel(f"127.0.0.1:{guarded.port}", token=guarded.tokens["trainer"]) as channel:
        CoordinatorStub(channel).Register(registration("trainer", "trainer", instance="trainer"), timeout=20)
    with sync_channel(f"127.0.0.1:{guarded.port}", token=guarded.tokens["reward"]) as channel:
        told = outcome(getattr(CoordinatorStub(channel), method), request)
    assert told.startswith("PERMISSION_DENIED: "), told
    assert SAYS.get(deed, "") in told
    assert guarded.tokens["reward"] not in told


def test_it_does_what_a_reward_service_does(guarded: Guarded) -> None:
    with sync_channel(f"127.0.0.1:{guarded.port}", token=guarded.tokens["reward"]) as channel:
        stub = CoordinatorStub(channel)
        assert outcome(stub.Register, registration("reward", "reward-2")) == ""
        assert outcome(stub.Heartbeat, pb.HeartbeatRequest(replica_id="reward-2", status=PULSE)) == ""
        assert outcome(stub.LeaseGpus, pb.LeaseGpusRequest(replica_id="reward-2", count=0)) == ""
        assert next(stub.WatchReplicas(pb.WatchReplicasRequest(role="judge"), timeout=20)).complete
        unknown = outcome(stub.Heartbeat, pb.HeartbeatRequest(replica_id="nobody", status=PULSE))
        assert unknown.startswith("NOT_FOUND: no replica 'nobody' is registered: register again")


def test_who_looks_sees_the_run_and_changes_nothing(guarded: Guarded) -> None:
    with sync_channel(f"127.0.0.1:{guarded.port}", token=guarded.tokens["read"]) as channel:
        stub = CoordinatorStub(channel)
        assert outcome(stub.ListRuns, pb.ListRunsRequest()) == ""
        assert outcome(stub.ListReplicas, pb.ListReplicasRequest()) == ""
        assert outcome(stub.PauseRun, pb.PauseRunRequest()).startswith("PERMISSION_DENIED: ")
        assert outcome(stub.Register, registration("reward", "reward-3")).startswith("PERMISSION_DENIED: ")


def test_a_service_with_the_token_of_another_says_so(guarded: Guarded) -> None:
    here = {"RELAXD_COORDINATOR": f"127.0.0.1:{guarded.port}", "RELAXD_REDIS": guarded.redis_url}
    # Its own file has the roles of tokens ...
    wrong = guarded.tokens.environment("reward") | {"RELAXD_TOKEN_FILE": str(guarded.tokens.folder / "trainer.token")}
    done = run_python("-m", "services.reward", environment=here | wrong)
    assert done.returncode == 2
    assert 'for the role reward, or for admin: "trainer" is for trainer' in " ".join(done.stderr.split())
    # ... or only the coordinator's has.
    done = run_python("-m", "services.reward", environment=here | {"RELAXD_TOKEN": guarded.tokens["trainer"]})
    assert done.returncode not in (0, 2)
    assert 'PERMISSION_DENIED: token "trainer" is for trainer, but to register reward-' in done.stderr
    assert "as reward is for reward: give this process a token for reward (RELAXD_TOKEN_FILE)" in done.stderr


@pytest.mark.slow
def test_a_run_between_services_with_tokens_of_their_own(guarded: Guarded) -> None:
    guarded.trainer()
    guarded.rollout("rollout")
    guarded.judges()
    guarded.start_run("guarded", run__steps=100_000)
    guarded.until_step(2)
    # The token of one gives no orders to others.
    for replica in guarded.stub.ListReplicas(pb.ListReplicasRequest(), timeout=20).replicas:
        if replica.registration.replica_id not in guarded.processes:
            continue  # one that this test's neighbours have registered
        with sync_channel(replica.registration.address, token=guarded.tokens["reward"], term=1 << 40) as channel:
            drain = replica_pb2_grpc.ReplicaStub(channel).Drain
            assert outcome(drain, replica_pb2.DrainRequest()).startswith("PERMISSION_DENIED: ")
            score = outcome(reward_pb2_grpc.RewardStub(channel).Score, reward_pb2.ScoreRequest())
            assert score.startswith(("PERMISSION_DENIED: ", "UNIMPLEMENTED: "))
    guarded.until_step(guarded.run().step + 2)
    assert [name for name, process in guarded.processes.items() if process.poll() is not None] == []
