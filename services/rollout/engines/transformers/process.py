"""The transformers engine's process: `python -m services.rollout.engines.transformers.process`."""

import base64
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from relaxd.process.json_child_server import HandlerError
from relaxd.v1 import weights_pb2
from relaxd.weights.group import WeightGroup, WeightGroupError
from relaxd.weights.manifest import ManifestError, ManifestMismatch, from_proto
from services.rollout.engines.engine_process import EngineProcess, read_arguments
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.engines.transformers.weights import WeightReceiver, check_manifest
from services.rollout.engines.types import EngineError, Version

STAGING_MEMORY = 1.5
"""A broadcast is staged as a whole if this many times its size is free memory."""


class TransformersProcess(EngineProcess):
    """Runs a TransformersEngine."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: TransformersEngine | None = None
        self._lock = threading.Lock()
        self._groups: dict[str, WeightGroup] = {}
        self._receivers: dict[str, WeightReceiver] = {}

    def load(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess."""
        if params["return_routed_experts"]:
            raise HandlerError(
                "rollout.return_routed_experts is true, but the transformers engine does not return them"
            )
        folder = Path(params["folder"])
        dtype = getattr(torch, params["dtype"])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        end_ids = read_model_folder(folder).end_ids
        self._engine = TransformersEngine(
            model,
            tokenizer.decode,
            end_ids,
            max_running_samples=params["max_running_samples"],
            on_output=lambda request_id, outputs: self._on_output({request_id: outputs}),
            on_failure=self._on_failure,
            threads=params["threads"],
        )
        self._start_stats()
        config = model.config.get_text_config()
        return {
            "vocabulary": config.vocab_size,
            "context": getattr(config, "max_position_embeddings", 0) or 0,
            "end_ids": list(end_ids),
            "device": "cpu",
        }

    def join(self, params: dict[str, Any]) -> None:
        """See EngineProcess."""
        engine = self._loaded()
        try:
            buckets = from_proto(weights_pb2.WeightManifest.FromString(base64.b64decode(params["manifest"])))
            check_manifest(engine.model, buckets)
        except (ManifestError, ManifestMismatch) as error:
            raise HandlerError(str(error), kind="ManifestMismatch") from error
        name = params["name"]
        try:
            address = (params["store_host"], params["store_port"])
            group = WeightGroup(params["transport"], *address, name, params["rank"], params["world_size"])
            for old in list(self._groups):  # an engine is in one group, even if it was not told to leave the last one
                self._forget(old)
            with self._lock:
                self._groups[name] = group
            size = sum(bucket.nbytes for bucket in buckets)
            stage_all = psutil.virtual_memory().available > STAGING_MEMORY * size
            receiver = WeightReceiver(engine, group, buckets, stage_all=stage_all)
            group.connect(params["timeout"])
        except WeightGroupError as error:
            self._forget(name)
            raise HandlerError(str(error), kind="WeightGroupError") from error
        with self._lock:
            self._receivers[name] = receiver

    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess."""
        with self._lock:
            receiver = self._receivers.get(params["name"])
        if receiver is None:
            raise HandlerError(f"this engine is not in weight group {params['name']}", kind="EngineError")
        version = Version(params["term"], params["version"])
        started = time.monotonic()
        try:
            checksums = receiver.receive(version, params["timeout"], with_checksums=params["checksum"])
        except WeightGroupError as error:
            self._forget(params["name"])
            raise HandlerError(str(error), kind="WeightGroupError") from error
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error
        return {"seconds": time.monotonic() - started, "checksums": checksums}

    def leave(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess."""
        self._forget(params["name"])
        if params["quarantine"] and self._engine is not None:
            self._engine.quarantine()
        return {"quarantined": self._engine is not None and self._engine.quarantined}

    def sleep(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess. Leaves any group, because its broadcasts would write into freed memory."""
        for name in list(self._groups):
            self._forget(name)
        return super().sleep(params)

    def _forget(self, name: str) -> None:
        with self._lock:
            group = self._groups.pop(name, None)
            self._receivers.pop(name, None)
        if group is not None:
            group.abort()

    def _loaded(self) -> TransformersEngine:
        if self._engine is None:
            raise HandlerError("no model is loaded", kind="EngineError")
        return self._engine

    def _memory_in_use(self) -> int:
        return self._rss_bytes()

    def _rss_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)


def main() -> None:
    """Serve the parent until it ends."""
    read_arguments()
    transformers_logging.disable_progress_bar()
    TransformersProcess().server.serve()


if __name__ == "__main__":
    main()
