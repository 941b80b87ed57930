"""Exchange of activations and their gradients between pipeline stages, without waiting for a GPU.

Micro-batches differ in length. Megatron then sends each tensor's shape ahead, for which the host waits until the GPU
has done everything before: the GPU is idle while the host prepares its next work. But all stages have the same
micro-batches, so each knows the shapes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

Shape = list[int]


class StageExchange(P2PCommunicator):
    """Megatron's exchange in one schedule, with shapes known in advance."""

    def __init__(self, config: ModelParallelConfig, shapes: Sequence[Shape]) -> None:
        """Prepare for a schedule.

        Args:
            config: the model's configuration; with several chunks also the schedule's, which says how many
                micro-batches go through a chunk before they go through the next.
            shapes: of the hidden states that each micro-batch has between stages.
        """
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        self._forward: Iterator[Shape] = iter(shapes)
        self._backward: Iterator[Shape] = iter(shapes)
        if (chunks := config.virtual_pipeline_model_parallel_size) is not None:
            # Micro-batches in the order in which they go through this stage's chunks, from the first, or backwards from
            # the last. Nothing comes to a model's first chunk, and no gradient to its last.
            passes = get_schedule_table(len(shapes), chunks, config.microbatch_group_size_per_vp_stage)
            first, last = self.pp_group.rank() == 0, self.pp_group.rank() == self.pp_group.size() - 1
            self._forward = iter([shapes[number] for number, turn in passes if turn or not first])
            self._backward = iter([shapes[number] for number, turn in passes if turn or not last])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Return the shapes of the next tensors from the previous and the next stage."""
        return next(self._forward) if recv_prev else [], next(self._backward) if recv_next else []


def pipeline_groups() -> ProcessGroupCollection:
    """Return the process groups that Megatron's schedules require beside an exchange."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    return groups
