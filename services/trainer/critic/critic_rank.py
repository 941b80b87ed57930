"""One rank of a critic's replica: a child process of the service."""

from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.board import CRITIC_STATE, Board, DropReason, stages_for
from relaxd.config import RunConfig
from relaxd.process.child_server import ChildServer
from relaxd.process.upkeep import freeze_objects
from relaxd.run_folder import critic_folder
from relaxd.v1 import rank_pb2 as pb
from relaxd.v1 import rank_pb2_grpc
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.checkpoints.rank_part import CheckpointPart
from services.trainer.critic.critic_learner import CriticLearner, CriticRank, compute_values
from services.trainer.critic.follower import Follower
from services.trainer.loop.checkpoint_control import REMOVAL_SECONDS
from services.trainer.megatron.channels import RankChannel
from services.trainer.reference_models.model_rank import ModelRank, world_config
from services.trainer.reference_models.model_stage import ModelStage


class CriticServiceRank(ModelRank):
    """A rank of the critic."""

    def __init__(self) -> None:
        super().__init__()
        self._follower: Follower | None = None

    def _clean_up(self) -> None:
        """Remove the replaced best checkpoint, because the last evaluation comes after the last checkpoint."""
        if self._follower is not None:
            wait([self._follower.checkpoints.remove_replaced()], REMOVAL_SECONDS)

    def _compute(self, request: pb.WorkRequest, config: RunConfig) -> None:
        create_tried(config.algorithm, with_loss=False)
        trainer, run_folder = world_config(config, request.role), Path(request.folder)
        learner = CriticLearner(config, self._report_loading if self._thread.number == 0 else None)
        freeze_objects()
        rank = CriticRank(
            channel=RankChannel(trainer.collective_timeout_seconds, learner.world.disk),
            learner=learner,
            checkpoint=CheckpointPart(learner),
            board=Board(request.redis, request.run_id, stages_for(config), config.board),
            run_folder=critic_folder(run_folder),
            steps_of=run_folder,
        )
        if self._thread.number != 0:
            rank.follow()

        def compute(name: str, micro_batches: Sequence[PackedMicroBatch]) -> list[dict[str, NDArray[Any]]]:
            self._report_progress()
            return rank.run(compute_values, micro_batches)

        self._stage = ModelStage(
            rank.board,
            request.role,
            request.replica_id,
            compute,
            vocab_sizes={"": learner.forward.architecture.vocab_size},
            temperature=config.rollout.temperature,
            micro_batch_tokens=trainer.micro_batch_tokens,
            pipeline_stages=trainer.pipeline_parallel,
            of_each=lambda: {CRITIC_STATE: follower.state()},
            what="value",
            reason=DropReason.NO_VALUES,
            on_failure=self._thread.fail,
        )
        follower = Follower(config, request.run_id, rank, self._stage, self._report_progress)
        follower.restore()
        self._follower = follower
        self._thread.events.put(pb.WorkResponse(loaded=pb.RankLoaded()))
        follower.run()


if __name__ == "__main__":
    ChildServer((rank_pb2_grpc.add_RankServicer_to_server, CriticServiceRank())).serve()
