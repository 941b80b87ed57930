"""SGLang's scheduler process with a control connection to the engine's process.

Threads of their own answer the engine's requests, so that weights can be received, and a hanging broadcast aborted,
while the scheduler's loop goes on (in a pause it only waits for messages) and its watchdog stays quiet. Work that must
happen between two steps is handed to the loop.
"""

import base64
import multiprocessing
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import psutil
import sglang.srt.managers.scheduler as sglang_scheduler
import torch
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler

from relaxd.process.child_server import die_with_parent
from relaxd.process.json_child_server import HandlerError, JsonChildServer
from relaxd.weights.group import WeightGroupError
from relaxd.weights.manifest import ManifestMismatch
from services.rollout.engines.sglang.schedulers import ADDRESS_VARIABLE
from services.rollout.engines.sglang.weights import SGLangWeights

PAUSED_SECONDS = 0.002
"""Wait of a paused loop between two polls of its messages: spinning would slow down receiving weights."""


def run_scheduler(*args: Any) -> None:
    """Run a scheduler process, in the place of SGLang's run_scheduler_process."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before die_with_parent
    sglang_scheduler.Scheduler = ControlledScheduler
    sglang_scheduler.run_scheduler_process(*args)


class ControlledScheduler(Scheduler):
    """SGLang's scheduler, controlled by the engine's process."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        self._control_server = _ControlServer(self)
        self.changed = threading.Condition()
        self.change = 0
        """The engine's number of the last pause or resume."""
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.generated_tokens = 0
        rank = args[3] if len(args) > 3 else arguments["tp_rank"]
        self._control_server.server.emit("hello", {"rank": rank})
        try:
            super().__init__(*args, **arguments)
            runner = self.tp_worker.model_runner
            # Other threads must name the GPU.
            self.cuda_device = torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else None
            device = self.cuda_device or torch.device("cpu")
            self.weights = SGLangWeights(runner.model, device, self.ps.tp_rank, self.ps.tp_size)
        except Exception as error:
            self._control_server.server.emit("failed", {"reason": f"{type(error).__name__}: {error}"})
            raise
        self.model_config.hf_eos_token_id = None  # each request has its end tokens
        self._control_server.server.emit("ready", {})

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Process messages and jobs. The loop calls this before each step."""
        super().process_input_requests(recv_reqs)
        if self._engine_paused:
            with suppress(queue.Empty):
                self.jobs.get(timeout=PAUSED_SECONDS)()

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Count tokens. The loop calls this after each step."""
        self.generated_tokens += sum(produces_token(req) for req in batch.reqs)
        super().process_batch_result(batch, result)

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        """Pause. Called by the loop."""
        super().pause_generation(recv_req)
        self._note_change(recv_req)

    def continue_generation(self, recv_req: ContinueGenerationReqInput) -> None:
        """Resume. Called by the loop."""
        super().continue_generation(recv_req)
        self._note_change(recv_req)

    def run_between_steps(self, job: Callable[[], Any], timeout: float) -> Any:
        """Have the paused loop run `job`. Returns its result."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(job())
            except Exception as error:
                done.set_exception(error)

        self.jobs.put(work)
        return done.result(timeout)

    def commit(self, key: str) -> dict[str, list[int]]:
        """Take up new weights, whose prefix cache key is `key`.

        Returns for each unfinished request how many tokens the old weights produced, and whether it continues with
        their keys and values (1) or not (0). Requests without any get the new key. The others keep the old key, which
        no new request uses.
        """
        held: dict[str, list[int]] = {}
        for req in self.waiting_queue:
            req.extra_key = key
            held[req.rid] = [len(req.output_ids), 0]
        # With the overlapped loop the last step's tokens are produced, but not yet counted.
        made = {req.rid for batch, _ in getattr(self, "result_queue", ()) for req in batch.reqs if produces_token(req)}
        for req in self._running_requests():
            if not req.finished() and req.rid not in held:
                held[req.rid] = [len(req.output_ids) + (req.rid in made), 1]
        return held

    def end_all(self) -> int:
        """End every request with its tokens so far, in a pause of mode "retract". Returns how many there were."""
        ended = list(self.waiting_queue)
        self.waiting_queue.clear()
        for req in ended:
            req.finished_reason = FINISH_ABORT("relaxd paused in mode abort")
        if ended:
            self.output_streamer.stream_output(ended, any(req.return_logprob for req in ended))
        return len(ended)

    def _note_change(self, message: PauseGenerationReqInput | ContinueGenerationReqInput) -> None:
        with self.changed:
            self.change = int(message.rid or 0)
            self.changed.notify_all()

    def _running_requests(self) -> Iterator[Req]:
        for batch in (self.running_batch, self.last_batch, self.cur_batch):
            if batch is not None:
                yield from batch.reqs
        for batch, _ in getattr(self, "result_queue", ()):
            yield from batch.reqs
        if self.chunked_req is not None:
            yield self.chunked_req


def produces_token(req: Req) -> bool:
    """Return whether a step produces a token for this request: not if it has ended or its prefill continues."""
    return not req.finished() and req.inflight_middle_chunks <= 0 and req.sampling_params.max_new_tokens > 0


class _ControlServer:
    """Answers requests of the engine's process."""

    def __init__(self, scheduler: ControlledScheduler) -> None:
        self._scheduler = scheduler
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(os.environ[ADDRESS_VARIABLE])
        handlers = (self.wait_change, self.commit, self.end_all, self.stats, self.memory)
        weight_handlers = (self.join, self.receive, self.leave)
        self.server = JsonChildServer({each.__name__: each for each in (*handlers, *weight_handlers)}, connection)
        threading.Thread(target=self.server.serve, name="control", daemon=True).start()

    def wait_change(self, params: dict[str, Any]) -> None:
        """Wait until the loop has paused or resumed, and the device has finished its work from before."""
        scheduler, timeout = self._scheduler, params["timeout"]
        with scheduler.changed:
            if not scheduler.changed.wait_for(lambda: scheduler.change >= params["number"], timeout):
                raise HandlerError(f"the scheduler did not pause or resume within {timeout:g} s", kind="Timeout")
        if scheduler.cuda_device is not None:
            torch.cuda.synchronize(scheduler.cuda_device)

    def commit(self, params: dict[str, Any]) -> dict[str, list[int]]:
        """See ControlledScheduler."""
        held: dict[str, list[int]] = self._scheduler.run_between_steps(
            lambda: self._scheduler.commit(params["key"]), params["timeout"]
        )
        return held if self._scheduler.ps.tp_rank == 0 else {}

    def end_all(self, params: dict[str, Any]) -> int:
        """See ControlledScheduler."""
        return int(self._scheduler.run_between_steps(self._scheduler.end_all, params["timeout"]))

    def stats(self, params: dict[str, Any]) -> dict[str, int]:
        """Return the loop's counts. Another thread reads them, so they may be of the step before."""
        scheduler = self._scheduler
        return {
            "running_samples": len(scheduler.running_batch.reqs),
            "waiting_samples": len(scheduler.waiting_queue),
            "tokens_generated": scheduler.generated_tokens,
        }

    def memory(self, params: dict[str, Any]) -> int:
        """Return the bytes in use: on the GPU by all processes; on a CPU by this process."""
        if self._scheduler.cuda_device is None:
            return int(psutil.Process().memory_info().rss)
        free, total = torch.cuda.mem_get_info(self._scheduler.cuda_device)
        return total - free

    def join(self, params: dict[str, Any]) -> None:
        """Connect to a weight group, with rank `rank` + tensor-parallel rank."""
        try:
            self._scheduler.weights.join(
                params["transport"],
                params["store_host"],
                params["store_port"],
                params["name"],
                params["rank"] + self._scheduler.ps.tp_rank,
                params["world_size"],
                base64.b64decode(params["manifest"]),
                params["timeout"],
            )
        except (ManifestMismatch, WeightGroupError) as error:
            raise HandlerError(str(error), kind=type(error).__name__) from error

    def receive(self, params: dict[str, Any]) -> dict[str, Any]:
        """Receive one version into the model."""
        try:
            result = self._scheduler.weights.receive(params["name"], params["timeout"], checksum=params["checksum"])
        except WeightGroupError as error:
            raise HandlerError(str(error), kind=type(error).__name__) from error
        return {"seconds": result.seconds, "checksums": result.checksums}

    def leave(self, params: dict[str, Any]) -> bool:
        """Abort and forget a group. Returns whether a failed broadcast had touched the model."""
        return self._scheduler.weights.leave(params["name"])
