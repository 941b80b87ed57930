"""The SGLang engine's process with its initial weights, for benchmarks without a trainer."""

from typing import Any

from relaxd.v1 import rollout_pb2
from services.rollout.engines.engine_process import read_arguments
from services.rollout.engines.sglang.process import SGLangProcess
from services.rollout.engines.types import Version


class UntrainedProcess(SGLangProcess):
    def JoinWeightGroup(self, request: Any, context: Any) -> rollout_pb2.JoinWeightGroupResponse:
        """Do nothing."""
        return rollout_pb2.JoinWeightGroupResponse()

    def _receive_weights(self, request: Any) -> rollout_pb2.ReceiveWeightsResponse:
        """Commit the current weights."""
        with self._loaded().update(Version(request.weights.term, request.weights.version)):
            pass
        return rollout_pb2.ReceiveWeightsResponse()


if __name__ == "__main__":
    read_arguments()
    UntrainedProcess().serve()
