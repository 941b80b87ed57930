"""One rank of the Megatron world: a child process of the trainer service.

Its place in the world comes from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, everything else from the parent's Work
call. Training runs in one thread, and each of the parent's calls in another, so that broadcasts overlap
training and LeaveWeightGroup reaches a rank that is stuck.
"""

import logging
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from relaxd import telemetry
from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.board import Board, stages_for
from relaxd.config import RunConfig
from relaxd.models.vocabulary import check_vocabularies
from relaxd.process.child_server import ChildServer, in_turn
from relaxd.process.upkeep import freeze_objects
from relaxd.rpc.errors import Aborted, FailedPrecondition, ResourceExhausted, RpcError, Unavailable
from relaxd.v1 import rank_pb2 as rank_pb
from relaxd.v1 import rank_pb2_grpc, replica_pb2, trainer_pb2_grpc
from relaxd.v1 import trainer_pb2 as pb
from relaxd.weights.buckets import TensorBucket, to_proto
from relaxd.weights.weight_group import Rendezvous, WeightGroupError, host_store
from services.trainer.learner.learner import Learner
from services.trainer.loop.commanded_rank import CheckpointPart, RankThread
from services.trainer.loop.round_runner import RoundRunner
from services.trainer.loop.step_profiler import ProfileOptions, ProfilePlan, step_profiler
from services.trainer.loop.thread_requests import Controls, result_of
from services.trainer.loop.training_commands import TrainingRank, export
from services.trainer.loop.training_queue import TrainingQueue
from services.trainer.loop.training_thread import Training
from services.trainer.loop.weight_broadcast import WeightBroadcaster, weight_buckets
from services.trainer.loop.weight_read_lock import HOLD_MARGIN_SECONDS, WeightReadLock
from services.trainer.megatron.channels import ModelParallelChannel, RankChannel
from services.trainer.megatron.disk_work import DiskRefused

logger = logging.getLogger(__name__)


class Rank(trainer_pb2_grpc.TrainerServicer, rank_pb2_grpc.RankServicer):
    """RPC handlers and training thread of a rank. The parent has validated the requests."""

    def __init__(self) -> None:
        self._thread = RankThread()
        self._controls: Controls[Training] = Controls()
        self._broadcaster: WeightBroadcaster | None = None
        self._weights: WeightReadLock | None = None
        self._profiles: ProfilePlan | None = None
        self._run_folder = Path()

    async def Work(self, request: rank_pb.WorkRequest, context: Any) -> AsyncIterator[rank_pb.WorkResponse]:
        """Start the training thread. Stream its events, such as progress and new versions, to the parent."""
        if request.paused:
            self._controls.paused.set()
        self._thread.start(request, self._train)
        async for event in self._thread.events:
            yield event

    def SetPaused(self, request: rank_pb.SetPausedRequest, context: Any) -> rank_pb.SetPausedResponse:
        """Pause or resume training."""
        (self._controls.paused.set if request.paused else self._controls.paused.clear)()
        return rank_pb.SetPausedResponse()

    def HandBackGroups(self, request: rank_pb.HandBackGroupsRequest, context: Any) -> rank_pb.HandBackGroupsResponse:
        """Ask the training thread to hand back its groups. Wait until it has, or `seconds` have passed."""
        self._controls.draining.set()
        done = self._controls.drained.wait(request.seconds)
        telemetry.flush()  # the end of a run kills the ranks right after
        return rank_pb.HandBackGroupsResponse(done=done)

    def HoldWeights(self, request: rank_pb.HoldWeightsRequest, context: Any) -> rank_pb.HoldWeightsResponse:
        """Lock the weights against changes while they are broadcast; see `WeightReadLock.acquire`."""
        hold = self._read_lock().acquire(request.weights.term, request.weights.version, request.seconds)
        return rank_pb.HoldWeightsResponse(hold=hold)

    def ReleaseWeights(self, request: rank_pb.ReleaseWeightsRequest, context: Any) -> rank_pb.ReleaseWeightsResponse:
        """Release a lock on the weights that HoldWeights acquired."""
        return rank_pb.ReleaseWeightsResponse(in_time=self._read_lock().release(request.hold))

    def JoinWeightGroup(
        self, request: pb.TrainerJoinWeightGroupRequest, context: Any
    ) -> pb.TrainerJoinWeightGroupResponse:
        """Connect this rank to the engines in a weight group."""
        with _group_errors():
            self._loaded_broadcaster().join(Rendezvous.from_proto(request.group), request.group.timeout_seconds)
        return pb.TrainerJoinWeightGroupResponse()

    def LeaveWeightGroup(
        self, request: pb.TrainerLeaveWeightGroupRequest, context: Any
    ) -> pb.TrainerLeaveWeightGroupResponse:
        """Abort a weight group, even during a broadcast, and leave it."""
        self._loaded_broadcaster().leave(request.group_name)
        return pb.TrainerLeaveWeightGroupResponse()

    @in_turn
    def BroadcastVersions(
        self, request: rank_pb.BroadcastVersionsRequest, context: Any
    ) -> rank_pb.BroadcastVersionsResponse:
        """Take part in a weight broadcast. A single rank holds its weights itself, which saves two calls."""
        asked = request.broadcast
        with _group_errors(), self._held(asked) if self._thread.alone else nullcontext():
            sent = self._loaded_broadcaster().broadcast(asked.group_name, asked.timeout_seconds, asked.checksum)
        return rank_pb.BroadcastVersionsResponse(sent=sent)

    def ExportHuggingFace(self, request: pb.ExportHuggingFaceRequest, context: Any) -> pb.ExportHuggingFaceResponse:
        """Export the model on all ranks to an absolute path, in Hugging Face's format."""
        folder = Path(request.folder)
        version = self._controls.requests.ask(
            lambda training: training.rank.run(export, folder), context.time_remaining()
        )
        if isinstance(version, DiskRefused):
            raise ResourceExhausted(str(version))
        # The run ends with an export, after its last evaluation and without another checkpoint.
        removal = self._controls.requests.ask(
            lambda training: training.checkpoints.remove_replaced(), context.time_remaining()
        )
        wait([removal], context.time_remaining())
        return pb.ExportHuggingFaceResponse(path=request.folder, weights=self._weight_version(version))

    def SaveCheckpoint(
        self, request: pb.TrainerSaveCheckpointRequest, context: Any
    ) -> pb.TrainerSaveCheckpointResponse:
        """Request a checkpoint from the training thread, and wait until it is written."""
        saved = self._controls.requests.ask(
            lambda training: training.checkpoints.request(rotate=request.rotate), context.time_remaining()
        )
        path, step = result_of(saved, context.time_remaining())
        return pb.TrainerSaveCheckpointResponse(path=path, weights=self._weight_version(step))

    def Profile(self, request: pb.TrainerProfileRequest, context: Any) -> pb.TrainerProfileResponse:
        """Plan to profile the next steps. Answer with the first step and the paths of the profiles."""
        if self._profiles is None:
            raise Unavailable("the trainer has no weights yet")
        if request.memory and not torch.cuda.is_available():
            raise FailedPrecondition("memory is true, but the ranks run on the CPU: torch records that of GPUs only")
        options = ProfileOptions(ranks=tuple(request.ranks), stacks=request.stacks, memory=request.memory)
        steps = self._profiles.request(request.steps, options)
        paths = [str(path) for step in steps for path in options.files(self._run_folder, step)]
        return pb.TrainerProfileResponse(first_step=steps[0], paths=paths)

    def Sleep(self, request: pb.TrainerSleepRequest, context: Any) -> pb.TrainerSleepResponse:
        """Move the training state of all ranks to the host's memory."""
        sleep = self._controls.sleep_requests.ask(lambda training: training.sleeping.sleep(), context.time_remaining())
        return pb.TrainerSleepResponse(memory=sleep)

    def Wake(self, request: pb.TrainerWakeRequest, context: Any) -> pb.TrainerWakeResponse:
        """Move the training state of all ranks back to the devices."""
        wake = self._controls.sleep_requests.ask(
            lambda training: training.sleeping.wake(request.metrics), context.time_remaining()
        )
        return pb.TrainerWakeResponse(memory=wake)

    def _train(self, request: rank_pb.WorkRequest, config: RunConfig) -> None:
        algorithm = create_tried(config.algorithm, with_loss=True)
        for role in config.frozen_roles("trainer"):
            check_vocabularies(config, role)
        self._run_folder = Path(request.folder)
        profiler = step_profiler(config, self._thread.number, self._run_folder)
        learner, buckets, self._broadcaster = self._load(config)
        freeze_objects()
        board = Board(request.redis, request.run_id, stages_for(config), config.board)
        timeout = config.trainer.collective_timeout_seconds
        rank = TrainingRank(
            channel=RankChannel(timeout, learner.world.disk),
            sharing=ModelParallelChannel(learner.world.dp_rank, timeout),
            profiler=profiler,
            learner=learner,
            runner=RoundRunner(learner, config),
            checkpoint=CheckpointPart(learner),
            board=board,
            run_folder=self._run_folder,
        )
        gather = learner.world.gather
        loaded = rank_pb.RankLoaded(
            source=gather.source, gathers=gather.dense is not None or gather.experts is not None
        )
        self._thread.events.put(rank_pb.WorkResponse(loaded=loaded))
        if self._thread.number != 0:
            rank.follow()
        store = host_store(request.store_host, ports=config.weights.port_range)
        self._profiles = ProfilePlan(config)
        self._weights = WeightReadLock(board.new_trainer_term())
        manifest = pb.GetWeightManifestResponse(
            manifest=to_proto(buckets), source_ranks=learner.world.pp_size, store_port=store.port
        )
        self._thread.events.put(rank_pb.WorkResponse(manifest=manifest))
        intake = TrainingQueue(
            board,
            request.replica_id,
            config,
            routing=learner.routing,
            media=learner.media_tokens,
            vocab_sizes=learner.vocab_sizes,
        )
        Training(
            config=config,
            run_id=request.run_id,
            rank=rank,
            intake=intake,
            algorithm=algorithm,
            weights=self._weights,
            controls=self._controls,
            profiles=self._profiles,
            emit=self._thread.events.put,
        ).run()

    def serve(self) -> None:
        """Serve the parent's RPCs until the trainer service ends."""
        ChildServer(
            (trainer_pb2_grpc.add_TrainerServicer_to_server, self),
            (rank_pb2_grpc.add_RankServicer_to_server, self),
        ).serve()

    def _load(self, config: RunConfig) -> tuple[Learner, list[TensorBucket], WeightBroadcaster]:
        """Load the model. Return the learner, the buckets of weight broadcasts, and this rank's broadcaster."""
        learner = Learner.of_run(config, self._report_loading if self._thread.number == 0 else None)
        weights = config.weights
        buckets = weight_buckets(learner, weights.bucket_bytes, first_alone=weights.transport == "nccl")
        return learner, buckets, WeightBroadcaster(learner, buckets, config.rollout.engine)

    def _report_loading(self, detail: str) -> None:
        """Report to the parent how far the model is loaded."""
        progress = rank_pb.RankProgress(detail=detail)
        self._thread.events.put(rank_pb.WorkResponse(progress=progress))

    def _weight_version(self, version: int) -> replica_pb2.WeightVersion:
        return replica_pb2.WeightVersion(term=self._read_lock().term, version=version)

    def _read_lock(self) -> WeightReadLock:
        if self._weights is None:
            raise FailedPrecondition("the trainer has no weights yet")
        return self._weights

    def _held(self, request: pb.BroadcastWeightsRequest) -> AbstractContextManager[None]:
        weights = request.weights
        return self._read_lock().held(weights.term, weights.version, request.timeout_seconds + HOLD_MARGIN_SECONDS)

    def _loaded_broadcaster(self) -> WeightBroadcaster:
        if self._broadcaster is None:
            raise Aborted("this rank has no model yet")
        return self._broadcaster


@contextmanager
def _group_errors() -> Iterator[None]:
    """Raise errors of weight groups as RPC errors: Aborted for other members' faults, else Unavailable."""
    try:
        yield
    except WeightGroupError as error:  # caused by other members, not by this trainer
        raise Aborted(str(error)) from error
    except RpcError:
        raise
    except Exception as error:  # such as a transport that this machine doesn't have
        raise Unavailable(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    Rank().serve()
