"""The SGLang engine's process: `python -m services.rollout.engines.sglang.sglang_process`.

Its children are SGLang's scheduler processes, one per tensor-parallel rank. The children end with this process.
It ends if a child ends; then the rollout service starts a new engine process.
"""

import asyncio
import logging
import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from relaxd.config import RolloutConfig
from relaxd.models.folders import EXPERT_COUNTS
from relaxd.replica.gpus import gpu_share
from relaxd.rpc.errors import FailedPrecondition, RpcError
from relaxd.v1 import engine_pb2, rollout_pb2, weights_pb2
from services.rollout.engines.engine_process import EngineProcess, read_arguments
from services.rollout.engines.generation_gate import UpdatePause
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.request_types import PAUSE_MODES, EngineError, Version
from services.rollout.engines.seen_prompts import read_model_vision
from services.rollout.engines.sglang.given_logprobs import ENVIRONMENT, TEMPERATURE_VARIABLE
from services.rollout.engines.sglang.scheduler_launch import launch
from services.rollout.engines.sglang.schedulers import (
    ANSWER_SECONDS,
    END_SECONDS,
    SCHEDULER_MARGIN_SECONDS,
    Late,
    Schedulers,
    Updated,
)
from services.rollout.engines.sglang.sglang_engine import SGLangEngine
from services.rollout.engines.sglang.sglang_options import OptionError, server_args

ABORT_SECONDS = 8.0
"""Maximum time for the scheduler processes to leave a weight group, in seconds."""
PAUSES_WITH_UPDATE = ("in_place", "retract")
"""Pause modes after which weights can be received at once, so that one message requests pause and update."""

logger = logging.getLogger(__name__)


class SGLangProcess(EngineProcess[SGLangEngine]):
    """Engine process that serves an SGLangEngine to the rollout service."""

    def __init__(self) -> None:
        super().__init__()
        self._schedulers: Schedulers | None = None
        self._on_gpus = False
        self._group = ""
        self._left_touched = False
        """True if a broadcast was aborted and may have changed only part of the model."""
        self._process = psutil.Process()
        # SGLang sends this signal when one of its processes fails.
        signal.signal(signal.SIGQUIT, lambda *_: self._scheduler_gone("a scheduler process of SGLang failed"))

    def load(self, folder: str, config: RolloutConfig, colocate: bool) -> engine_pb2.LoadResponse:
        for_logprobs = {TEMPERATURE_VARIABLE: str(config.temperature), **ENVIRONMENT} if self.for_logprobs else {}
        schedulers = Schedulers(
            lambda rank: self._scheduler_gone(f"scheduler process {rank} of SGLang is gone"), for_logprobs
        )
        launched: Future[engine_pb2.LoadResponse] = Future()
        # Linux ends a scheduler process with the thread that started it, so that thread must not end.
        threading.Thread(
            target=self._launch,
            args=(folder, config, colocate, schedulers, launched),
            name="parent of SGLang",
            daemon=True,
        ).start()
        try:
            return launched.result()
        finally:
            schedulers.forget_folder()

    def _launch(
        self,
        folder: str,
        config: RolloutConfig,
        colocate: bool,
        schedulers: Schedulers,
        launched: "Future[engine_pb2.LoadResponse]",
    ) -> None:
        try:
            vision = read_model_vision(Path(folder), "sglang")
            if vision is not None and config.sglang.get("rl_on_policy_target"):
                raise OptionError(
                    "rollout.sglang.rl_on_policy_target is set, but SGLang then gives images the positions of text: "
                    "leave it out for a model that takes media"
                )
            args = server_args(folder, config, colocate=colocate, frozen=self.frozen, share=gpu_share())
            self._on_gpus = args.device == "cuda"
            experts = expert_count(args.get_model_config().hf_text_config) if config.return_routed_experts else 0
            if config.return_routed_experts and not experts:
                raise OptionError("rollout.return_routed_experts is true, but the model has no experts")
            channel, info = launch(args, schedulers)
            model = args.get_model_config()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            end_ids = frozenset(read_model_folder(Path(folder)).end_ids)
            self._schedulers = schedulers
            self._engine = SGLangEngine(
                channel,
                schedulers,
                tokenizer.decode,
                end_ids,
                experts=experts,
                vision=vision,
                on_output=self.outputs.put,
                on_failure=self.outputs.fail,
                on_broken=self._scheduler_gone,
                on_gpus=self._on_gpus,
            )
        except Exception as error:
            refusal = error if isinstance(error, RpcError) else FailedPrecondition(str(error) or type(error).__name__)
            launched.set_exception(refusal)
            return
        # SGLang would truncate answers that don't fit, so requests for longer ones are refused.
        room = info["max_total_num_tokens"] - 2 * (args.page_size or 1) - 1
        if not self.for_logprobs:
            room = min(room, info["max_req_input_len"] + 4)
        context = min(room, model.context_len)
        launched.set_result(engine_pb2.LoadResponse(vocabulary=model.vocab_size, context=context, device=args.device))
        threading.Event().wait()

    async def ComputeLogprobs(
        self, request: engine_pb2.ComputeLogprobsRequest, context: Any
    ) -> engine_pb2.ComputeLogprobsResponse:
        if not self.for_logprobs:
            raise EngineError("the model was loaded to generate: load one with LoadRequest.logprobs")
        return await asyncio.wrap_future(self._loaded().logprobs.submit(request))

    def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Any
    ) -> rollout_pb2.JoinWeightGroupResponse:
        """Join a weight group: tensor-parallel rank t becomes rank `rank` + t of the group."""
        self._loaded()
        group = request.group
        if self._group and self._group != group.name:
            self._end(self._group)  # an engine is in only one group; nobody may have asked it to leave the last one
        self._group = group.name
        try:
            self._ask_all("JoinWeightGroup", request, group.timeout_seconds + SCHEDULER_MARGIN_SECONDS)
        except RpcError:
            self._leave(group.name)
            raise
        return rollout_pb2.JoinWeightGroupResponse()

    def _pause_first(self, request: rollout_pb2.ReceiveWeightsRequest) -> None:
        if PAUSE_MODES[request.pause.mode] not in PAUSES_WITH_UPDATE:
            super()._pause_first(request)

    def _receive_weights(self, request: rollout_pb2.ReceiveWeightsRequest) -> rollout_pb2.ReceiveWeightsResponse:
        engine, name = self._loaded(), request.group_name
        if self._group != name:
            raise EngineError(f"this engine is not in weight group {name}")
        self._left_touched = False
        version = Version(request.weights.term, request.weights.version)
        pause, mode = None, PAUSE_MODES[request.pause.mode]
        if request.HasField("pause") and mode in PAUSES_WITH_UPDATE:
            deadline = time.monotonic() + request.pause_timeout_seconds
            pause = UpdatePause(mode, request.pause.lease_seconds, deadline)
        with engine.control.update(version, request, pause):
            results = self._update_all(engine, name)
            engine.mark_update(version, results[0].held)
        own = results[0].checksums
        different = {name for result in results for name, value in own.items() if result.checksums.get(name) != value}
        # If ranks disagree, one has wrong weights: return a wrong checksum (not 0, the checksum of zeros).
        checksums = {name: value ^ (name in different) for name, value in own.items()}
        seconds = max(result.seconds for result in results)
        return rollout_pb2.ReceiveWeightsResponse(seconds=seconds, checksums=checksums)

    def _update_all(self, engine: SGLangEngine, group_name: str) -> list[Updated]:
        """Wait until all ranks have new weights. On failure, mark the engine as touched if a model may have changed."""
        failure: RpcError
        try:
            if self._group != group_name:  # it was left before `end_update` could find this update
                raise EngineError(f"weight group {group_name} was left")
            results = engine.control.wait_update()
            errors = [result for result in results if isinstance(result, RpcError)]
            if not errors:
                return [result for result in results if isinstance(result, Updated)]
            failure = errors[0]
        except EngineError as error:
            failure = error
        try:
            self._leave(group_name)
        except RpcError:
            engine.gate.touch()  # a rank may be touched: their answers are missing
            raise
        # Ranks that have left the group reported their results before.
        last = engine.control.last_results(END_SECONDS)
        if self._left_touched or any(isinstance(result, Updated | Late) for result in last):
            engine.gate.touch()
        raise failure

    def _leave_group(self, name: str) -> bool:
        self._end(name)
        return self._left_touched

    def _end(self, name: str) -> None:
        """Leave a weight group and wait until its update has ended, so that a resume or another update can follow."""
        if self._group == name:
            self._leave(name)
        self._loaded().control.end_update(name, END_SECONDS)

    def _leave(self, name: str) -> None:
        if self._group == name:
            self._group = ""
        request = rollout_pb2.LeaveWeightGroupRequest(group_name=name)
        answers = self._ask_all("LeaveWeightGroup", request, ABORT_SECONDS)
        self._left_touched = self._left_touched or any(answer.quarantined for answer in answers)

    def _ask_all(self, method: str, request: Any, timeout: float) -> list[Any]:
        assert self._schedulers is not None
        return self._schedulers.ask_all(method, request, timeout)

    def _leave_groups(self) -> None:
        if self._group:
            self._end(self._group)

    def _check_freed(self, memory: weights_pb2.MemoryChange) -> None:
        if self._on_gpus and memory.after_bytes >= memory.before_bytes:
            raise EngineError(
                f"SGLang freed no memory ({memory.before_bytes} bytes were in use, {memory.after_bytes} are now): "
                "torch_memory_saver's library is not loaded in its scheduler processes (LD_PRELOAD)"
            )

    def _memory_in_use(self) -> int:
        answers = self._ask_all("GetSchedulerStats", engine_pb2.GetSchedulerStatsRequest(), ANSWER_SECONDS)
        return sum(answer.memory_bytes for answer in answers)

    def _rss_bytes(self) -> int:
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _scheduler_gone(self, reason: str) -> None:
        if self._engine is None:
            return  # `load` raises
        logger.error("%s: ending the engine", reason)
        for process in self._process.children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        os._exit(1)


def expert_count(config: Any) -> int:
    """Return the number of experts per layer from a model's configuration; 0 if it has none."""
    return max(int(getattr(config, name, None) or 0) for name in EXPERT_COUNTS)


def main() -> None:
    """Serve the engine to the parent process until the parent ends."""
    read_arguments()
    logging.getLogger("sglang").setLevel(logging.WARNING)  # until SGLang sets its own log_level
    SGLangProcess().serve()


if __name__ == "__main__":
    main()
