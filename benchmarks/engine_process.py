"""The SGLang engine's process with its initial weights, for benchmarks and tests without a trainer.

A reception takes up a new version of the same weights: nothing is sent.
"""

from collections.abc import Callable
from typing import Any

from relaxd.v1 import rollout_pb2
from services.rollout.engines.engine_process import read_arguments
from services.rollout.engines.sglang import scheduler_launch
from services.rollout.engines.sglang.scheduler import run_scheduler
from services.rollout.engines.sglang.sglang_process import SGLangProcess
from services.rollout.engines.sglang.sglang_weights import ReceiveResult, Reception, SGLangWeights


class UntrainedProcess(SGLangProcess):
    def JoinWeightGroup(self, request: Any, context: Any) -> rollout_pb2.JoinWeightGroupResponse:
        """Join nothing."""
        self._group = request.group.name
        return rollout_pb2.JoinWeightGroupResponse()


def run_untrained_scheduler(*args: Any) -> None:
    """Run a scheduler process that commits the weights that it has."""

    def finish(self: SGLangWeights, begun: Reception, *, checksum: bool, commit: Callable[[], None]) -> ReceiveResult:
        commit()
        return ReceiveResult(0.0, touched=False)

    SGLangWeights.begin = lambda self, name, timeout: None  # type: ignore[assignment,method-assign,return-value]
    SGLangWeights.finish = finish  # type: ignore[method-assign]
    run_scheduler(*args)


if __name__ == "__main__":
    read_arguments()
    from benchmarks import engine_process  # scheduler processes import it by this name

    scheduler_launch._Launcher.run_scheduler_process_func = staticmethod(engine_process.run_untrained_scheduler)
    UntrainedProcess().serve()
