"""The transformers engine's process, `python -m services.rollout.engines.transformers.transformers_process`, which
receives weights into its model.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from relaxd.config import RolloutConfig
from relaxd.v1 import engine_pb2, rollout_pb2
from relaxd.weights.buckets import (
    ManifestError,
    ManifestMismatch,
    TensorBucket,
    TensorSpec,
    checksum,
    from_proto,
    unpack,
)
from relaxd.weights.weight_group import Rendezvous, Transfer, WeightGroup, WeightGroupError
from services.rollout.engines.engine_process import EngineProcess, read_arguments
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.request_types import BadManifest, EngineError, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.engines.transformers.vision import TOWERS, load_model


def named_parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return every tensor that a manifest may name; tied weights occur under each of their names.

    The tensors share the parameters' memory and torch's version counters.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensors |= _file_views(name, parameter.detach(), model.config.model_type)
    of_files = _FILE_NAMES.get(model.config.model_type, {})
    return {_renamed(name, of_files): tensor for name, tensor in tensors.items()}


_FILE_NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen3_omni_moe_thinker": {
        "model.language_model.": "thinker.model.",
        "model.": "thinker.",
        "lm_head.": "thinker.lm_head.",
    }
}
"""Prefixes of tensor names in the model, mapped to the prefixes in checkpoint files; by model type."""


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    found = next((old for old in beginnings if name.startswith(old)), "")
    return beginnings.get(found, "") + name.removeprefix(found)


_STACKED = {"qwen3_vl_moe": True, "qwen3_5_moe": False, "qwen3_5_moe_text": False}
"""Model types whose checkpoint files store a layer's experts in one tensor. True: as [experts, inputs, outputs],
which is transposed."""


def _file_views(name: str, tensor: torch.Tensor, model_type: str) -> dict[str, torch.Tensor]:
    """Return views of a parameter, with the names and shapes of checkpoint tensors, such as one view per expert."""
    prefix, _, leaf = name.rpartition(".")
    if leaf not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        return {name: tensor}
    if model_type in _STACKED:
        return {name: tensor.transpose(1, 2) if _STACKED[model_type] else tensor}
    views = {}
    if leaf == "gate_up_proj":
        for expert, (gate, up) in enumerate(zip(*tensor.chunk(2, dim=1), strict=True)):
            views[f"{prefix}.{expert}.gate_proj.weight"] = gate
            views[f"{prefix}.{expert}.up_proj.weight"] = up
    else:
        for expert, down in enumerate(tensor):
            views[f"{prefix}.{expert}.down_proj.weight"] = down
    return views


def check_manifest(model: PreTrainedModel, buckets: Sequence[TensorBucket]) -> None:
    """Raise ManifestMismatch unless the buckets have every weight of the model and nothing else.

    Towers may be left out as a whole: a trainer that doesn't train them doesn't send them.
    """
    parameters = named_parameters(model)
    received: set[int] = set()
    for bucket in buckets:
        for spec in bucket.tensors:
            parameter = parameters.get(spec.name)
            if parameter is None:
                raise ManifestMismatch(f"{spec.name}: the model has no such tensor")
            if tuple(parameter.shape) != spec.shape:
                raise ManifestMismatch(
                    f"{spec.name}: the shape is {spec.shape}, the model's is {tuple(parameter.shape)}"
                )
            received.add(parameter.data_ptr())
    missing = [name for name, parameter in parameters.items() if parameter.data_ptr() not in received]
    towers = {parameter.data_ptr() for name, parameter in model.named_parameters() if name.startswith(TOWERS)}
    if missing and missing != [name for name, parameter in parameters.items() if parameter.data_ptr() in towers]:
        raise ManifestMismatch(f"{missing[0]}: the manifest does not have this tensor")


class WeightReceiver:
    """Receives the broadcasts of one weight group into an engine's model.

    With `stage_all`, all buckets are received into separate buffers before the model is touched. A failed broadcast
    then leaves the engine unchanged, but the buffers need as much memory as the model. Without it, two buffers suffice,
    but a failure after the first bucket means quarantine. Values are converted to the model's dtype when copied.
    """

    def __init__(
        self, engine: TransformersEngine, group: WeightGroup, buckets: Sequence[TensorBucket], *, stage_all: bool
    ) -> None:
        """Allocate the buffers, for buckets that `check_manifest` accepts."""
        self.group = group
        self._engine = engine
        self._buckets = list(buckets)
        self._parameters = named_parameters(engine.model)
        slots = len(self._buckets) if stage_all else 2
        largest = max((bucket.nbytes for bucket in self._buckets), default=0)
        self._stage_all = stage_all
        # Never reused by another group: an aborted transfer may still write into them for a while.
        self._buffers = [
            torch.empty(self._buckets[slot].nbytes if stage_all else largest, dtype=torch.uint8)
            for slot in range(min(slots, len(self._buckets)))
        ]

    def receive(self, weights: Version, timeout: float, *, with_checksums: bool) -> dict[str, int]:
        """Receive one broadcast and commit it. Returns the tensors' checksums with `with_checksums`, else {}.

        Raises WeightGroupError if the broadcast fails, EngineError if the engine is not paused.
        """
        deadline = time.monotonic() + timeout
        checksums: dict[str, int] = {}
        with self._engine.update(weights):
            transfers = [self._start(0, deadline)] if self._buckets else []
            for number in range(len(self._buckets)):
                if number + 1 < len(self._buckets):  # receive the next bucket while this one is copied
                    transfers.append(self._start(number + 1, deadline))
                transfers[number].wait()  # brief: the transfer's deadline
                if not self._stage_all:
                    self._copy(number)
                    checksums |= self._checksums(number) if with_checksums else {}
            if self._stage_all:
                for number in range(len(self._buckets)):
                    self._copy(number)
                for number in range(len(self._buckets)) if with_checksums else ():
                    checksums |= self._checksums(number)
        return checksums

    def _start(self, number: int, deadline: float) -> Transfer:
        buffer = self._buffers[number % len(self._buffers)][: self._buckets[number].nbytes]
        timeout = max(deadline - time.monotonic(), 0.01)
        return self.group.start_broadcast(buffer, self._buckets[number].source_rank, timeout)

    def _received(self, number: int) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        return unpack(self._buckets[number], self._buffers[number % len(self._buffers)])

    def _checksums(self, number: int) -> dict[str, int]:
        """Return the checksums of a bucket's tensors in the model's memory.

        If the model has another dtype, its values are compared with the received tensor: the result is the received
        tensor's checksum if they are equal, else a different number.
        """
        found = {}
        for spec, tensor in self._received(number):
            served = self._parameters[spec.name]
            if served.dtype == tensor.dtype:
                found[spec.name] = checksum(served)
            else:
                equal = torch.equal(served, tensor.to(served.dtype))
                found[spec.name] = checksum(tensor) if equal else checksum(tensor) ^ 1
        return found

    def _copy(self, number: int) -> None:
        self._engine.gate.touch()
        for spec, tensor in self._received(number):
            served = self._parameters[spec.name]
            # Unchanged tensors aren't written, so that cached outputs of untrained towers stay valid.
            if not _same_bits(served, tensor.to(served.dtype)):
                served.copy_(tensor)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if all bits are equal: 0 and -0 differ, and NaN equals itself."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


STAGING_MEMORY = 1.5
"""Free memory above which a whole broadcast is staged, as a multiple of the broadcast's size."""


class TransformersProcess(EngineProcess[TransformersEngine]):
    """Engine process that serves a TransformersEngine to the rollout service."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._groups: dict[str, WeightGroup] = {}
        self._receivers: dict[str, WeightReceiver] = {}

    def load(self, folder: str, config: RolloutConfig, colocate: bool) -> engine_pb2.LoadResponse:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model, vision = load_model(Path(folder), getattr(torch, config.dtype))
        self._engine = TransformersEngine(
            model,
            tokenizer.decode,
            read_model_folder(Path(folder)).end_ids,
            max_running_samples=config.max_running_samples,
            on_output=lambda request_id, outputs: self.outputs.put({request_id: outputs}),
            on_failure=self.outputs.fail,
            threads=config.threads,
            keep_weights=self.frozen,
            vision=vision,
        )
        facts = model.config.get_text_config()
        context = getattr(facts, "max_position_embeddings", 0) or 0
        return engine_pb2.LoadResponse(vocabulary=facts.vocab_size, context=context, device="cpu")

    def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Any
    ) -> rollout_pb2.JoinWeightGroupResponse:
        engine, asked = self._loaded(), request.group
        try:
            buckets = from_proto(request.manifest)
            check_manifest(engine.model, buckets)
        except (ManifestError, ManifestMismatch) as error:
            raise BadManifest(str(error)) from error
        try:
            group = WeightGroup(Rendezvous.from_proto(asked), request.rank)
            self._leave_groups()  # an engine is in only one group; nobody may have asked it to leave the last one
            with self._lock:
                self._groups[asked.name] = group
            size = sum(bucket.nbytes for bucket in buckets)
            stage_all = psutil.virtual_memory().available > STAGING_MEMORY * size
            receiver = WeightReceiver(engine, group, buckets, stage_all=stage_all)
            group.connect(asked.timeout_seconds)
        except WeightGroupError:
            self._forget(asked.name)
            raise
        with self._lock:
            self._receivers[asked.name] = receiver
        return rollout_pb2.JoinWeightGroupResponse()

    def _receive_weights(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        with self._lock:
            receiver = self._receivers.get(request.group_name)
        if receiver is None:
            raise EngineError(f"this engine is not in weight group {request.group_name}")
        version = Version(request.weights.term, request.weights.version)
        started = time.monotonic()
        try:
            checksums = receiver.receive(version, request.timeout_seconds, with_checksums=request.checksum)
        except WeightGroupError:
            self._forget(request.group_name)
            raise
        return rollout_pb2.ReceiveWeightsResponse(seconds=time.monotonic() - started, checksums=checksums)

    def _leave_group(self, name: str) -> bool:
        self._forget(name)
        return False

    def _leave_groups(self) -> None:
        for name in list(self._groups):
            self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            group = self._groups.pop(name, None)
            self._receivers.pop(name, None)
        if group is not None:
            group.abort()

    def _memory_in_use(self) -> int:
        return self._rss_bytes()

    def _rss_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)


def main() -> None:
    """Serve the engine to the parent process until the parent ends."""
    read_arguments()
    transformers_logging.disable_progress_bar()
    TransformersProcess().serve()


if __name__ == "__main__":
    main()
