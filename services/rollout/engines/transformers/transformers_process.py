"""The transformers engine's process: `python -m services.rollout.engines.transformers.transformers_process`."""

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from relaxd.config import RolloutConfig
from relaxd.v1 import engine_pb2, rollout_pb2
from relaxd.weights.buckets import ManifestError, ManifestMismatch, from_proto
from relaxd.weights.weight_group import Rendezvous, WeightGroup, WeightGroupError
from services.rollout.engines.engine_process import EngineProcess, read_arguments
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.request_types import BadManifest, EngineError, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.engines.transformers.transformers_weights import WeightReceiver, check_manifest
from services.rollout.engines.transformers.vision import load_model

STAGING_MEMORY = 1.5
"""Minimum ratio of free memory to a broadcast's size at which the whole broadcast is staged."""


class TransformersProcess(EngineProcess[TransformersEngine]):
    """Runs a TransformersEngine."""

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
    """Serve the parent until it ends."""
    read_arguments()
    transformers_logging.disable_progress_bar()
    TransformersProcess().serve()


if __name__ == "__main__":
    main()
