"""Good requests for every call, from which bad ones are made, and values that fields may well have."""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from relaxd import PROTOCOL_VERSION
from relaxd.roles import REWARD
from relaxd.v1 import (
    advantage_pb2,
    content_pb2,
    judge_pb2,
    launcher_pb2,
    replica_pb2,
    reward_pb2,
    rollout_pb2,
    sample_pb2,
    scaling_pb2,
    trainer_pb2,
    weights_pb2,
)
from relaxd.v1 import coordinator_pb2 as pb
from tests.fuzz.fleet import RUN_ID, Fleet

REPLICAS = ("replica-1", "replica-2", "replica-3")


def tame(now: int) -> Mapping[str, tuple[Any, ...]]:
    """All values that some fields get. A number beyond these would be remembered, and every call with a lower one be
    refused from then on. `now` is the id of a synchronisation that would begin now."""
    return {
        "sync_id": (0, -1, 1, now, now, now, 2**63 - 1),
        "term": (0, -1, 1, 1, 3),
        "quarantine": (False,) * 9 + (True,),
    }


QUEUED = frozenset({"/relaxd.v1.Judge/Ask", "/relaxd.v1.Reward/Score", "/relaxd.v1.Rollout/Generate"})
"""Calls that wait for those before them: no answer in time is no wonder when thousands of responses are ahead."""

TURNS = frozenset(f"/relaxd.v1.{role}/{turn}" for role in ("Rollout", "Judge", "Trainer") for turn in ("Sleep", "Wake"))
"""Calls that put a service to sleep, as they are asked to: they come last in a round, and then all are woken up."""

SLOW = frozenset(
    {
        "/relaxd.v1.Coordinator/SyncWeights",
        "/relaxd.v1.Coordinator/WatchRun",
        "/relaxd.v1.Coordinator/WatchReplicas",
        "/relaxd.v1.Coordinator/DrainReplica",
        "/relaxd.v1.Trainer/JoinWeightGroup",
        "/relaxd.v1.Rollout/JoinWeightGroup",
        "/relaxd.v1.Rollout/ReceiveWeights",
        "/relaxd.v1.Rollout/PauseGeneration",
        "/relaxd.v1.Replica/Drain",
        "/relaxd.v1.Replica/Leave",
        *TURNS,
    }
)
"""Calls that wait for something by design: they get a short deadline."""


def hints(fleet: Fleet) -> dict[str, tuple[Any, ...]]:
    """Values by name of field."""
    victim_run = str(fleet.folder / "victim" / RUN_ID)
    return {
        "run_id": (RUN_ID, "run-2", ""),
        "replica_id": REPLICAS,
        "group_name": ("group-1", "group-2"),
        "folder": (
            "model",
            "a/b",
            "../model",
            "/tmp",
            victim_run,
            "link",
            "checkpoints",
            ".",
        ),
        "config_toml": (fleet.config("victim"), "[run]\nsteps = nan", fleet.config("victim").replace("1000000", "0")),
        "resume_token": ("0", "1", "-1", "²", "99999999999999999999999"),
        "max_seconds": (0.0, 0.1, 0.5, 300.0),
        "drain_seconds": (0.0, 0.1),
        "timeout_seconds": (0.05, 0.2, 1.0),
        "lease_seconds": (0.05, 0.2, 1.0),
        "grace_seconds": (0.0, 0.1),
        "max_new_tokens": (1, 2, 3, 8),
        "n": (1, 2, 3),
        "world_size": (2, 3),
        "rank": (1, 2),
        "transport": (1, 2, 3),
        "store_host": ("127.0.0.1", "localhost", "::1", "no.such.host.invalid"),
        "store_port": (fleet.ports["reward"], 1),
        "address": (f"127.0.0.1:{fleet.ports['standby']}", "127.0.0.1:1"),
        "addresses": (f"127.0.0.1:{fleet.ports['standby']}", "127.0.0.1:1"),
        "replica_ids": REPLICAS,
        "request_id": ("scale-1", "scale-2", ""),
        "launch_id": ("launched-1", "launched-2", ""),
        "reward": ("addition", "exact_match", "f1"),
        "algorithm_json": ('{"name": "grpo"}', '{"name": "grpo", "kl": {}}'),
        "protocol_version": (PROTOCOL_VERSION,),
        "gpu_uuids": ("GPU-1", "GPU-2"),
        "candidate_uuids": ("GPU-1", "GPU-2"),
        "count": (0, 1, 2),
        "replicas": (1, 2),
        "metadata_json": ("{}", '{"a": 1}', "[" * 100_000, "1"),
    }


def message(text: str) -> content_pb2.Message:
    return content_pb2.Message(role="user", content=[content_pb2.ContentPart(text=text)])


def good_requests(fleet: Fleet, now: int) -> dict[str, Callable[[int], Message]]:
    """A good request by method, as "/package.Service/Method"; each gets a number of its own. `now` as in `tame`."""
    version = replica_pb2.WeightVersion(term=1, version=1)
    manifest = weights_pb2.WeightManifest(
        buckets=[
            weights_pb2.WeightBucket(
                tensors=[
                    weights_pb2.TensorSpec(name="model.norm.weight", dtype=sample_pb2.ELEMENT_TYPE_FLOAT32, shape=[64])
                ]
            )
        ]
    )
    group = weights_pb2.WeightGroup(
        name="group-1",
        world_size=2,
        store_host="127.0.0.1",
        store_port=fleet.ports["reward"],
        transport="TRANSPORT_GLOO",
        timeout_seconds=0.2,
    )
    sampling = sample_pb2.SamplingParams(max_new_tokens=4, temperature=1.0, top_p=0.9, top_k=5, seed=1)
    status = replica_pb2.ReplicaStatus(replica_id="replica-1", run_id=RUN_ID, state=replica_pb2.REPLICA_STATE_READY)
    return {
        "/relaxd.v1.Coordinator/StartRun": lambda i: pb.StartRunRequest(
            run_id=f"run-x{i}", config_toml=fleet.config("victim")
        ),
        "/relaxd.v1.Coordinator/WatchRun": lambda i: pb.WatchRunRequest(
            run_id=RUN_ID, resume_token="0", max_seconds=0.2
        ),
        "/relaxd.v1.Coordinator/WatchReplicas": lambda i: pb.WatchReplicasRequest(role="rollout", max_seconds=0.2),
        "/relaxd.v1.Coordinator/RestoreRun": lambda i: pb.RestoreRunRequest(
            folder=str(fleet.folder / "victim" / RUN_ID)
        ),
        "/relaxd.v1.Coordinator/GetMetrics": lambda i: pb.GetMetricsRequest(
            run_id=RUN_ID, first_step=1, last_step=i + 1, names=["reward_mean"], max_points=5
        ),
        "/relaxd.v1.Coordinator/ListSamples": lambda i: pb.ListSamplesRequest(run_id=RUN_ID, step=1, page_size=5),
        "/relaxd.v1.Coordinator/Register": lambda i: pb.RegisterRequest(
            registration=pb.Registration(
                replica_id=REPLICAS[i % 3],
                role=REWARD,
                address="127.0.0.1:1",
                protocol_version=PROTOCOL_VERSION,
                gpu_uuids=["GPU-1"],
            )
        ),
        "/relaxd.v1.Coordinator/Heartbeat": lambda i: pb.HeartbeatRequest(replica_id=REPLICAS[i % 3], status=status),
        "/relaxd.v1.Coordinator/DrainReplica": lambda i: pb.DrainReplicaRequest(replica_id=REPLICAS[i % 3]),
        "/relaxd.v1.Coordinator/LeaseGpus": lambda i: pb.LeaseGpusRequest(
            replica_id=REPLICAS[i % 3], candidate_uuids=["GPU-1", "GPU-2"], count=1
        ),
        "/relaxd.v1.Coordinator/AnnounceVersion": lambda i: pb.AnnounceVersionRequest(
            run_id=RUN_ID, replica_id="replica-1", weights=version
        ),
        "/relaxd.v1.Coordinator/ScaleOut": lambda i: scaling_pb2.ScaleOutRequest(
            request_id=f"scale-{i % 5}", role=REWARD, replicas=2, timeout_seconds=1
        ),
        "/relaxd.v1.Coordinator/ScaleIn": lambda i: scaling_pb2.ScaleInRequest(
            request_id=f"scale-{i % 5}", role=REWARD, replicas=1, drain_seconds=0.1
        ),
        "/relaxd.v1.Trainer/JoinWeightGroup": lambda i: trainer_pb2.TrainerJoinWeightGroupRequest(
            sync_id=now, group=group
        ),
        "/relaxd.v1.Trainer/BroadcastWeights": lambda i: trainer_pb2.BroadcastWeightsRequest(
            sync_id=now, group_name="group-1", weights=version, timeout_seconds=0.2
        ),
        "/relaxd.v1.Trainer/ExportHuggingFace": lambda i: trainer_pb2.ExportHuggingFaceRequest(folder=f"model-{i % 3}"),
        "/relaxd.v1.Rollout/Generate": lambda i: rollout_pb2.GenerateRequest(
            prompt_tokens=[1, 2, 3], n=2, sampling=sampling
        ),
        "/relaxd.v1.Rollout/PauseGeneration": lambda i: rollout_pb2.PauseGenerationRequest(
            sync_id=now, lease_seconds=0.2
        ),
        "/relaxd.v1.Rollout/ResumeGeneration": lambda i: rollout_pb2.ResumeGenerationRequest(sync_id=now),
        "/relaxd.v1.Rollout/JoinWeightGroup": lambda i: rollout_pb2.JoinWeightGroupRequest(
            sync_id=now, group=group, rank=1, manifest=manifest
        ),
        "/relaxd.v1.Rollout/ReceiveWeights": lambda i: rollout_pb2.ReceiveWeightsRequest(
            sync_id=now, group_name="group-1", weights=version, timeout_seconds=0.2
        ),
        "/relaxd.v1.Reward/Score": lambda i: reward_pb2.ScoreRequest(
            reward="addition",
            prompt=[message("1+1")],
            answer=[message("2")],
            metadata_json="{}",
            responses=[content_pb2.Conversation(messages=[message(text)]) for text in ("2", "3")],
        ),
        "/relaxd.v1.Judge/Ask": lambda i: judge_pb2.AskRequest(messages=[message("Is it 2?")], seed=i),
        "/relaxd.v1.Advantage/Compute": lambda i: advantage_pb2.ComputeRequest(
            algorithm_json='{"name": "grpo"}', rewards=[0.0, 1.0], lengths=[2, 3]
        ),
        "/relaxd.v1.Launcher/Launch": lambda i: launcher_pb2.LaunchRequest(
            launch_id=f"launched-{i % 5}", role="reward", gpu_uuids=["GPU-1"]
        ),
        "/relaxd.v1.Launcher/Remove": lambda i: launcher_pb2.RemoveRequest(launch_id=f"launched-{i % 5}"),
        "/relaxd.v1.Replica/Join": lambda i: replica_pb2.JoinRequest(launch_id="launched-1"),
        "/relaxd.v1.Replica/Leave": lambda i: replica_pb2.LeaveRequest(launch_id="launched-1"),
    }
