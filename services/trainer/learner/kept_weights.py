"""Copies of the weights in the host's memory, which broadcasts send while a step's updates change the weights."""

from collections.abc import Sequence

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
from torch import Tensor

from services.trainer.megatron.world import World
from services.trainer.model.architecture import Architecture
from services.trainer.model.hf_weights import ExportedParameter, HFTensor
from services.trainer.model.parameter_entries import ParameterEntry


class KeptWeights:
    """Copies of the parameters that this rank gathers or sends. Their memory is allocated once, pinned for a GPU."""

    def __init__(self, exported: Sequence[ExportedParameter], world: World) -> None:
        """`exported` are the parameters that may change."""
        self._device = world.device
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Each parameter with its copy, by the parameter's id: experts of a layer share one."""
        self.exported: list[ExportedParameter] = []
        """The copies, for `gather_hf_tensors`."""
        for one in exported:
            if (world.gather.experts if one.entry.expert else world.gather.dense) is None:
                continue  # `gather_hf_tensors` skips it on this rank
            source = one.parameter
            if id(source) not in self._copies:
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._device.type == "cuda")
                self._copies[id(source)] = (source, copy)
            self.exported.append(_KeptParameter(one.entry, self._copies[id(source)][1], self._device))

    def copy(self) -> None:
        """Copy the weights as they are now, and wait until they are copied."""
        for source, copy in self._copies.values():
            copy.copy_(source.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class _KeptParameter(ExportedParameter):
    """A copied parameter, or an expert's part of it, which goes to the device when it is sent."""

    def __init__(self, entry: ParameterEntry, copy: Tensor, device: torch.device) -> None:
        super().__init__(entry, copy)
        self._device = device

    @property
    def part(self) -> Tensor:
        return self.entry.of(self.parameter).to(self._device, non_blocking=True)

    def own_tensors(self, shape: Architecture) -> list[tuple[HFTensor, Tensor]]:
        return self.tensors([self.part], 0, shape)
