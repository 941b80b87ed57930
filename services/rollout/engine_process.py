"""The engine's process: `python -m services.rollout.engine_process`, started by `services.rollout.engine`."""

import argparse
import base64
import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from relaxd.rpc.child_server import ChildServer, HandlerError
from relaxd.telemetry import setup_logging
from relaxd.v1 import weights_pb2
from relaxd.weights.group import WeightGroup, WeightGroupError
from relaxd.weights.manifest import ManifestError, from_proto
from services.rollout.engines.base import EngineError, Output, Request, Sampling, Version
from services.rollout.engines.parameters import ManifestMismatch, WeightReceiver, check_manifest
from services.rollout.engines.transformers_engine import TransformersEngine

STATS_SECONDS = 1.0
SPARE_MEMORY = 1.5
"""Everything is received before the model is touched where this many times its size is free."""

logger = logging.getLogger(__name__)


class EngineProcess:
    """Answers the parent's requests; the methods below are their handlers."""

    def __init__(self) -> None:
        self.server = ChildServer(
            {
                "load": self.load,
                "generate": self.generate,
                "cancel": self.cancel,
                "pause": self.pause,
                "resume": self.resume,
                "join": self.join,
                "receive": self.receive,
                "leave": self.leave,
            }
        )
        self._engine: TransformersEngine | None = None
        self._lock = threading.Lock()
        self._groups: dict[str, WeightGroup] = {}
        self._receivers: dict[str, WeightReceiver] = {}

    def load(self, params: dict[str, Any]) -> dict[str, Any]:
        """Load a model; nothing is generated before its weights came. Returns what requests are checked against."""
        folder = Path(params["folder"])
        dtype = getattr(torch, params["dtype"])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        end_ids = end_token_ids(folder, model, tokenizer.eos_token_id)
        self._engine = TransformersEngine(
            model,
            tokenizer.decode,
            end_ids,
            max_running_samples=params["max_running_samples"],
            on_output=self._on_output,
            on_failure=lambda request_id, reason: self.server.emit(
                "failed", {"request_id": request_id, "reason": reason}
            ),
            threads=params["threads"],
        )
        threading.Thread(target=self._tell_stats, name="stats", daemon=True).start()
        config = model.config.get_text_config()
        return {
            "vocabulary": config.vocab_size,
            "context": getattr(config, "max_position_embeddings", 0) or 0,
            "end_ids": end_ids,
        }

    def generate(self, params: dict[str, Any]) -> None:
        """Queue a request; its tokens come as events."""
        sampling = params.pop("sampling")
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        params["prompt_tokens"] = tuple(params["prompt_tokens"])
        self._loaded().submit(Request(sampling=Sampling(**sampling), **params))

    def cancel(self, params: dict[str, Any]) -> None:
        """Forget a request."""
        self._loaded().cancel(params["request_id"])

    def pause(self, params: dict[str, Any]) -> dict[str, Any]:
        """Pause generation."""
        try:
            return {"paused_samples": self._loaded().pause(params["mode"], params["lease_seconds"], params["timeout"])}
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error

    def resume(self, params: dict[str, Any]) -> None:
        """End the pause."""
        try:
            self._loaded().resume()
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error

    def join(self, params: dict[str, Any]) -> None:
        """Connect with a weight group, after checking what it will send."""
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
            for old in list(self._groups):  # an engine is in one group, also when nobody told it to leave the last
                self._forget(old)
            with self._lock:
                self._groups[name] = group
            size = sum(bucket.nbytes for bucket in buckets)
            stage_all = psutil.virtual_memory().available > SPARE_MEMORY * size
            receiver = WeightReceiver(engine, group, buckets, stage_all=stage_all)
            group.connect(params["timeout"])
        except WeightGroupError as error:
            self._forget(name)
            raise HandlerError(str(error), kind="WeightGroupError") from error
        with self._lock:
            self._receivers[name] = receiver

    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """Receive and commit one version."""
        with self._lock:
            receiver = self._receivers.get(params["name"])
        if receiver is None:
            raise HandlerError(f"this engine is not in weight group {params['name']}", kind="EngineError")
        version = Version(params["epoch"], params["version"])
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
        """Abort and forget a group; one that is not there is left already."""
        self._forget(params["name"])
        return {"quarantined": self._engine is not None and self._engine.quarantined}

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

    def _on_output(self, request_id: str, outputs: list[Output]) -> None:
        self.server.emit("output", {"request_id": request_id, "outputs": [asdict(output) for output in outputs]})

    def _tell_stats(self) -> None:
        process = psutil.Process()
        while True:
            engine = self._loaded()
            self.server.emit(
                "stats",
                {**engine.stats(), "quarantined": engine.quarantined, "rss_bytes": process.memory_info().rss},
            )
            time.sleep(STATS_SECONDS)


def end_token_ids(folder: Path, model: PreTrainedModel, eos_token_id: int | None) -> list[int]:
    """The tokens that end an answer: those of the model's generation configuration and of its tokenizer."""
    found: set[int] = set() if eos_token_id is None else {eos_token_id}
    generation: GenerationConfig | None = model.generation_config
    configured = generation.eos_token_id if generation is not None else model.config.eos_token_id
    if configured is not None:
        found |= set(configured) if isinstance(configured, list) else {configured}
    return sorted(found)


def main() -> None:
    """Serve the parent until it is gone."""
    parser = argparse.ArgumentParser(description="The engine of a rollout service; started by the service.")
    parser.add_argument("--name", default="engine", help="name in the logs")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    setup_logging(arguments.name, arguments.log_level)
    transformers_logging.disable_progress_bar()
    EngineProcess().server.serve()


if __name__ == "__main__":
    main()
