"""Memory limits of an engine that has only a share of its GPUs.

SGLang's cache takes the memory that is free once the model is loaded, except 1 - mem_fraction_static of the memory that
was free before. On a GPU shared with other engines, the result would depend on the order in which they start and on
their allocations meanwhile. So SGLang is shown a GPU of the share's size, on which only its own process allocates. Then
weights and cache take mem_fraction_static x share x the GPU's memory, in whatever order engines start. The rest of the
share is for activations, CUDA graphs and memory that torch doesn't count: CUDA's context and NCCL's buffers.
"""

import torch

from relaxd.rpc.errors import InvalidArgument

memory_of_all = torch.cuda.mem_get_info
"""torch's own mem_get_info, before `show_share` replaces it: free and total bytes of a GPU, counting all processes."""


def show_share(share: float) -> None:
    """Make torch.cuda.mem_get_info, with which SGLang measures memory, report only this process and its share.

    `share`: fraction of each GPU's memory, above 0; 1 changes nothing.
    """
    if share >= 1:
        return

    def of_share(device: "torch.device | str | int | None" = None) -> tuple[int, int]:
        """Return the GPU memory that this process may still allocate, and its whole share, both in bytes."""
        room = int(memory_of_all(device)[1] * share)
        return max(0, room - torch.cuda.memory_reserved(device)), room

    torch.cuda.mem_get_info = of_share


def fraction_of_share(whole: float, share: float) -> float:
    """Return the mem_fraction_static for a share of a GPU; `whole`: SGLang's value for the whole GPU.

    SGLang reserves 1 - `whole` of the GPU for activations and CUDA graphs, whose batch sizes depend on the GPU's size.
    An engine with a share needs the same number of bytes. Raises InvalidArgument: no memory would be left.
    """
    fraction = 1 - (1 - whole) / share
    if fraction <= 0:
        raise InvalidArgument(
            f"rollout.memory_fraction is 0, so that SGLang keeps {1 - whole:.2f} of the GPU for activations and CUDA "
            f"graphs, but the engine has only {share:g} of it (roles.judge.gpu_share): change this share, or set "
            "rollout.memory_fraction, and smaller rollout.sglang.chunked_prefill_size and cuda_graph_max_bs_decode"
        )
    return fraction
