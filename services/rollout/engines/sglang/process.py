"""The SGLang engine's process: `python -m services.rollout.engines.sglang.process`.

Its children are SGLang's scheduler processes, one per tensor-parallel rank. They end with it, and it ends when one of
them does; the rollout service starts another.
"""

import logging
import os
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from relaxd.process.json_child_server import HandlerError
from services.rollout.engines.engine_process import EngineProcess, read_arguments
from services.rollout.engines.model_folder import read_model_folder
from services.rollout.engines.sglang.engine import SGLangEngine
from services.rollout.engines.sglang.launch import MessageChannel, launch
from services.rollout.engines.sglang.options import OptionError, server_args
from services.rollout.engines.sglang.schedulers import SchedulerError, Schedulers
from services.rollout.engines.types import EngineError, Version

MARGIN_SECONDS = 3.0
"""Time for an answer beyond a deadline that the scheduler processes enforce themselves."""
ABORT_SECONDS = 8.0
ANSWER_SECONDS = 10.0

logger = logging.getLogger(__name__)


class SGLangProcess(EngineProcess):
    """Runs an SGLangEngine."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: SGLangEngine | None = None
        self._schedulers: Schedulers | None = None
        self._on_gpus = False
        self._group = ""
        self._left_touched = False
        """True if leaving a group in the middle of a broadcast left the model touched."""
        self._process = psutil.Process()
        # SGLang sends it when one of its processes fails.
        signal.signal(signal.SIGQUIT, lambda *_: self._scheduler_gone("a scheduler process of SGLang failed"))

    def load(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess."""
        schedulers = Schedulers(lambda rank: self._scheduler_gone(f"scheduler process {rank} of SGLang is gone"))
        launched: Future[dict[str, Any]] = Future()
        # Linux ends a scheduler process with the thread that started it, so that thread must not end.
        threading.Thread(
            target=self._launch, args=(params, schedulers, launched), name="parent of SGLang", daemon=True
        ).start()
        try:
            return launched.result()
        finally:
            schedulers.stop_listening()

    def _launch(self, params: dict[str, Any], schedulers: Schedulers, launched: "Future[dict[str, Any]]") -> None:
        try:
            args = server_args(params["folder"], params)
            self._on_gpus = args.device == "cuda"
            if params["return_routed_experts"] and not has_experts(args.get_model_config().hf_text_config):
                raise OptionError("rollout.return_routed_experts is true, but the model has no experts")
            channel, info = launch(args, schedulers)
            model = args.get_model_config()
            tokenizer = AutoTokenizer.from_pretrained(params["folder"])
            end_ids = frozenset(read_model_folder(Path(params["folder"])).end_ids)
            self._start(params, schedulers, channel, tokenizer, end_ids)
        except Exception as error:
            kind = "OptionError" if isinstance(error, OptionError) else "LoadError"
            launched.set_exception(HandlerError(str(error) or type(error).__name__, kind=kind))
            return
        # SGLang would truncate answers that don't fit, so requests for longer ones are refused.
        room = min(info["max_req_input_len"] + 4, info["max_total_num_tokens"] - 2 * (args.page_size or 1) - 1)
        launched.set_result(
            {
                "vocabulary": model.vocab_size,
                "context": min(room, model.context_len),
                "end_ids": sorted(end_ids),
                "device": args.device,
            }
        )
        threading.Event().wait()

    def _start(
        self,
        params: dict[str, Any],
        schedulers: Schedulers,
        channel: MessageChannel,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
    ) -> None:
        self._schedulers = schedulers
        self._engine = SGLangEngine(
            channel,
            schedulers,
            tokenizer.decode,
            end_ids,
            routed_experts=params["return_routed_experts"],
            on_output=self._on_output,
            on_failure=self._on_failure,
            on_broken=self._scheduler_gone,
        )
        self._start_stats()

    def join(self, params: dict[str, Any]) -> None:
        """See EngineProcess. Tensor-parallel rank t has rank `rank` + t in the group."""
        self._loaded()
        if self._group and self._group != params["name"]:
            self._leave(self._group)  # an engine is in one group, even if it was not told to leave the last one
        self._group = params["name"]
        try:
            self._ask_all("join", params, params["timeout"] + MARGIN_SECONDS)
        except HandlerError:
            self._leave(params["name"])
            raise

    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess."""
        engine, name = self._loaded(), params["name"]
        if self._group != name:
            raise HandlerError(f"this engine is not in weight group {name}", kind="EngineError")
        self._left_touched = False
        try:
            with engine.update(Version(params["term"], params["version"])):
                results = self._receive_all(engine, params)
        except EngineError as error:
            raise HandlerError(str(error), kind="EngineError") from error
        checksums: dict[str, int] = results[0]["checksums"]
        for result in results[1:]:
            different = sorted(
                tensor for tensor, value in checksums.items() if result["checksums"].get(tensor) != value
            )
            checksums |= dict.fromkeys(different, 0)  # ranks disagree: 0 matches no checksum
        return {"seconds": max(result["seconds"] for result in results), "checksums": checksums}

    def _receive_all(self, engine: SGLangEngine, params: dict[str, Any]) -> list[dict[str, Any]]:
        """Receive on every rank. If one fails, mark the engine as touched when any rank's model has changed."""
        assert self._schedulers is not None
        answers = self._schedulers.ask_each("receive", params, params["timeout"] + MARGIN_SECONDS)
        errors = [answer for answer in answers if isinstance(answer, SchedulerError)]
        if errors:
            self._leave(params["name"])
            if self._left_touched or len(errors) < len(answers):
                engine.touch()
            raise _handler_error(errors[0]) from errors[0]
        return answers

    def leave(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess."""
        if self._engine is None:
            return {"quarantined": False}
        if self._group == params["name"]:
            self._leave(params["name"])
        if params["quarantine"]:
            self._engine.quarantine()
        return {"quarantined": self._engine.quarantined or self._left_touched}

    def _leave(self, name: str) -> None:
        self._group = ""
        touched = self._ask_all("leave", {"name": name}, ABORT_SECONDS)
        self._left_touched = self._left_touched or any(touched)

    def _ask_all(self, method: str, params: dict[str, Any], timeout: float) -> list[Any]:
        assert self._schedulers is not None
        try:
            return self._schedulers.ask_all(method, params, timeout)
        except SchedulerError as error:
            raise _handler_error(error) from error

    def _loaded(self) -> SGLangEngine:
        if self._engine is None:
            raise HandlerError("no model is loaded", kind="EngineError")
        return self._engine

    def sleep(self, params: dict[str, Any]) -> dict[str, Any]:
        """See EngineProcess. Leaves any group, to free its buffers."""
        asleep = self._loaded().asleep
        if self._group:
            self._leave(self._group)
        change = super().sleep(params)
        if self._on_gpus and not asleep and change["after"] >= change["before"]:
            raise HandlerError(
                f"SGLang freed no memory ({change['before']} bytes were in use, {change['after']} are now): "
                "torch_memory_saver's library is not loaded in its scheduler processes (LD_PRELOAD)",
                kind="EngineError",
            )
        return change

    def _memory_in_use(self) -> int:
        return sum(self._ask_all("memory", {}, ANSWER_SECONDS))

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


def _handler_error(error: SchedulerError) -> HandlerError:
    return HandlerError(str(error), kind="WeightGroupError" if error.kind == "Timeout" else error.kind)


def has_experts(config: Any) -> bool:
    """Return whether a model is a mixture of experts, from its configuration."""
    return any(getattr(config, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))


def main() -> None:
    """Serve the parent until it ends."""
    read_arguments()
    logging.getLogger("sglang").setLevel(logging.WARNING)  # until SGLang sets its own log_level
    SGLangProcess().server.serve()


if __name__ == "__main__":
    main()
