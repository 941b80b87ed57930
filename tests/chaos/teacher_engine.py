"""A teacher's engine without SGLang: it answers the same calls, on a CPU, with log-probs by transformers.

The stack starts it in the place of `services.rollout.engines.sglang.sglang_process` (see `interpreter`). While the
file that FAILING_VARIABLE names is there, its answers are wrong, in turns in each way in which an engine's may be.
"""

import os
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from relaxd.config import RolloutConfig
from relaxd.v1 import engine_pb2, rollout_pb2
from services.rollout.engines.engine_process import EngineProcess, read_arguments
from services.rollout.engines.generation_gate import GenerationGate
from services.rollout.engines.request_types import EngineError, MemoryPart, PauseMode, Request, RequestFailed

MODULE = "tests.chaos.teacher_engine"
FAILING_VARIABLE = "CHAOS_TEACHER_FAILS"
WRONG_ANSWERS = ("the scripted engine fails a request", "the teacher's engine gives", "a log-prob that isn't finite")
"""What the details of groups say that are dropped for each kind of wrong answer."""


def interpreter(folder: Path) -> str:
    """Write a program that is started as `python -m MODULE ARGUMENTS` and runs this module. Returns its path."""
    path = folder / "engine-python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" -m {MODULE} "$@"\n')
    path.chmod(0o700)
    return str(path)


class Teacher:
    """A model that reads sequences, one at a time."""

    def __init__(self, folder: str, config: RolloutConfig) -> None:
        self.gate = GenerationGate()
        torch.set_num_threads(config.threads or 1)
        dtype = getattr(torch, config.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._temperature = config.temperature
        self._lock = threading.Lock()
        self._read = self._wrong = 0

    def logprobs(self, request: engine_pb2.ComputeLogprobsRequest) -> engine_pb2.ComputeLogprobsResponse:
        """Answer a request. Raises RequestFailed."""
        tokens = torch.frombuffer(bytearray(request.tokens), dtype=torch.int32).long()
        with self._lock, torch.inference_mode():
            logits = self.model(tokens[None]).logits[0, request.start - 1 : -1].float()
            self._read += len(tokens)
            rows = (logits / self._temperature).log_softmax(-1)
            found = rows.gather(-1, tokens[request.start :, None])[:, 0]
            if Path(os.environ[FAILING_VARIABLE]).exists():
                found = self._fail(found)
            likeliest = rows.topk(request.top_k)
        return engine_pb2.ComputeLogprobsResponse(
            logprobs=found.numpy().tobytes(),
            likeliest=likeliest.indices.int().numpy().tobytes(),
            likeliest_logprobs=likeliest.values.numpy().tobytes(),
        )

    def _fail(self, found: torch.Tensor) -> torch.Tensor:
        self._wrong += 1
        if self._wrong % 3 == 0:
            raise RequestFailed(WRONG_ANSWERS[0])
        return found[:-1] if self._wrong % 3 == 1 else torch.full_like(found, torch.nan)

    def record(self, request: engine_pb2.RecordStepsRequest) -> list[Path]:
        raise EngineError("this teacher isn't profiled")

    def stats(self) -> dict[str, int]:
        return dict.fromkeys(("running_samples", "waiting_samples", "tokens_generated"), 0) | {
            "tokens_prefilled": self._read
        }

    def submit(self, request: Request) -> None:
        raise EngineError("a teacher's engine generates nothing")

    def cancel(self, request_id: str) -> None:
        pass

    def abort(self, request_id: str) -> None:
        pass

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        return 0

    def sleep(self, timeout: float) -> None:
        pass

    def wake(self, parts: Collection[MemoryPart]) -> None:
        pass


class TeacherProcess(EngineProcess[Teacher]):
    """Runs a Teacher."""

    def load(self, folder: str, config: RolloutConfig, colocate: bool) -> engine_pb2.LoadResponse:
        self._engine = Teacher(folder, config)
        facts = self._engine.model.config
        return engine_pb2.LoadResponse(vocabulary=facts.vocab_size, context=facts.max_position_embeddings, device="cpu")

    def ComputeLogprobs(
        self, request: engine_pb2.ComputeLogprobsRequest, context: Any
    ) -> engine_pb2.ComputeLogprobsResponse:
        return self._loaded().logprobs(request)

    def _receive_weights(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        raise EngineError("a teacher's weights stay as they are")

    def _leave_group(self, name: str) -> bool:
        return False

    def _leave_groups(self) -> None:
        pass

    def _rss_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def _memory_in_use(self) -> int:
        return self._rss_bytes()


if __name__ == "__main__":
    read_arguments()
    TeacherProcess().serve()
