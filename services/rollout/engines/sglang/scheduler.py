"""SGLang's scheduler process with a control connection to the engine's process.

The scheduler's loop pauses and begins to receive weights. Other threads receive the rest and answer the engine's
requests. So a hanging broadcast can be aborted, and the loop continues (in a pause it only waits for messages), which
keeps its watchdog quiet. Work that must run between two steps is queued for the loop.
"""

import asyncio
import logging
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import sglang.srt.managers.scheduler as sglang_scheduler
import torch
import zmq
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.penaltylib.min_new_tokens import BatchedMinNewTokensPenalizer
from sglang.srt.utils.network import get_zmq_socket
from transformers import AutoTokenizer

from relaxd.process.child_server import die_with_parent, serve_socket
from relaxd.process.upkeep import IdleThreads
from relaxd.replica.gpus import gpu_share
from relaxd.rpc.errors import Aborted, RpcError
from relaxd.v1 import engine_pb2, engine_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from relaxd.weights.buckets import ManifestMismatch
from relaxd.weights.weight_group import Rendezvous
from services.rollout.engines.request_types import BadManifest, EngineError
from services.rollout.engines.seen_prompts import read_model_vision
from services.rollout.engines.sglang.given_logprobs import TEMPERATURE_VARIABLE, set_temperature
from services.rollout.engines.sglang.gpu_share import memory_of_all, show_share
from services.rollout.engines.sglang.schedulers import (
    ANSWER_SECONDS,
    END_SECONDS,
    FOLDER_VARIABLE,
    TOKEN_VARIABLE,
    ChangeMade,
    GroupLeft,
    HeldRequest,
    News,
    PauseForUpdate,
    Updated,
    UpdateEnded,
    news_address,
    socket_path,
    with_weights,
    write_failure,
)
from services.rollout.engines.sglang.sglang_samples import forget_features, take_media
from services.rollout.engines.sglang.sglang_weights import Reception, SGLangWeights

logger = logging.getLogger(__name__)


class NewsSender:
    """Sends reports to the engine's process, in order, from any thread."""

    def __init__(self, address: str) -> None:
        """`address`: ZeroMQ address at which the engine's process receives reports (`schedulers.news_address`)."""
        self._socket: Any = get_zmq_socket(zmq.Context(1), zmq.PUSH, address, False)
        self._lock = threading.Lock()

    def tell(self, news: News) -> None:
        """Send a report to the engine's process."""
        with self._lock:
            self._socket.send_pyobj(news)


class WeightUpdates:
    """Installs weights while the loop is paused, and reports to the engine's process."""

    def __init__(
        self, weights: SGLangWeights, rank: int, news: NewsSender, commit: Callable[[str], dict[str, HeldRequest]]
    ) -> None:
        """`commit`: function that switches to received weights, given their prefix-cache key."""
        self._weights = weights
        self._rank = rank
        self._news = news
        self._commit = commit
        self._threads = IdleThreads()
        self._receiving: list[str] = []
        """Names of weight groups whose update is under way."""
        self._ended = threading.Condition()
        """Lock of `_receiving`; notified at the end of an update."""

    def begin(self, message: PauseForUpdate) -> None:
        """Begin to receive new weights. The loop calls this in the pause, which lasts until the end of the update."""
        if time.monotonic() > message.deadline:
            self._weights.leave(message.group_name)  # ends the update for ranks that have begun to receive
            self._news.tell(UpdateEnded(message.number, self._rank, EngineError("the scheduler paused too late")))
            return
        with self._ended:
            self._receiving.append(message.group_name)
        try:
            begun = self._weights.begin(message.group_name, message.timeout)
        except Exception as error:
            self._end(message, _told(error))
        else:
            self._threads.run("update", partial(self._finish, message, begun))

    @property
    def receiving(self) -> bool:
        """True while new weights are being received."""
        return bool(self._receiving)

    def leave(self, name: str) -> bool:
        """Leave a weight group, even during a reception, and report when the reception has ended.

        Returns True if the model is unusable because a failed broadcast touched it.
        """
        self._weights.leave(name)
        with self._ended:
            ended = self._ended.wait_for(lambda: name not in self._receiving, END_SECONDS)
        if ended:
            self._news.tell(GroupLeft(name, self._rank))
        return self._weights.unusable

    def _finish(self, message: PauseForUpdate, begun: Reception) -> None:
        held: dict[str, HeldRequest] = {}
        try:
            received = self._weights.finish(
                begun, checksum=message.checksum, commit=lambda: held.update(self._commit(message.key))
            )
        except Exception as error:
            self._end(message, _told(error))
        else:
            if message.after_failure or received.towers_changed:
                forget_features()
            self._end(message, Updated(received.seconds, received.checksums, held if self._rank == 0 else {}))

    def _end(self, message: PauseForUpdate, result: Updated | RpcError) -> None:
        self._news.tell(UpdateEnded(message.number, self._rank, result))
        with self._ended:
            self._receiving.remove(message.group_name)
            self._ended.notify_all()


def _told(error: Exception) -> RpcError:
    """Convert an error to an RpcError for the engine's process."""
    if isinstance(error, RpcError):
        return error
    logger.error("an update failed", exc_info=error)
    return Aborted(f"{type(error).__name__}: {error}")


PAUSED_SECONDS = 0.002
"""Seconds that a paused loop waits between two polls for messages; spinning would slow down receiving weights."""


def run_scheduler(*args: Any) -> None:
    """Run a scheduler process; replaces SGLang's run_scheduler_process."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before die_with_parent
    show_share(gpu_share())
    count_begun_tokens()
    sglang_scheduler.Scheduler = ControlledScheduler
    sglang_scheduler.run_scheduler_process(*args)


def count_begun_tokens() -> None:
    """Make earlier tokens of a retracted request count towards its minimum length; SGLang restarts at 0."""
    prepare = BatchedMinNewTokensPenalizer._prepare

    def prepare_with_begun(penalizer: Any) -> None:
        prepare(penalizer)
        begun = [[len(req.output_ids)] for req in penalizer.orchestrator.reqs()]
        penalizer.len_output_tokens += torch.tensor(begun, dtype=torch.int32, device=penalizer.orchestrator.device)

    BatchedMinNewTokensPenalizer._prepare = prepare_with_begun


class ControlledScheduler(Scheduler):
    """SGLang's scheduler, controlled by the engine's process."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        self.news = NewsSender(news_address(os.environ[FOLDER_VARIABLE]))
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.generated_tokens = self.prefilled_tokens = 0
        rank = args[3] if len(args) > 3 else arguments["tp_rank"]
        try:
            super().__init__(*args, **arguments)
            runner = self.tp_worker.model_runner
            # Other threads must name the GPU.
            self.cuda_device = torch.device("cuda", torch.cuda.current_device()) if self.device == "cuda" else None
            device = self.cuda_device or torch.device("cpu")
            self.weights = SGLangWeights(runner.model, device, self.ps.tp_size)
            self.updates = WeightUpdates(
                self.weights,
                self.ps.tp_rank,
                self.news,
                lambda key: self.run_between_steps(partial(self.commit, key), ANSWER_SECONDS),
            )
            self.model_config.hf_eos_token_id = None  # each request has its end tokens
            if temperature := os.environ.get(TEMPERATURE_VARIABLE):
                set_temperature(runner.model, float(temperature))
                # SGLang accepts only inputs shorter than this, and its default keeps room for generated tokens.
                self.max_req_input_len = self.model_config.context_len + 1
            self.tokenizer = RequestTokenizer(self.server_args.tokenizer_path, self.model_config.vocab_size)
            if (vision := read_model_vision(Path(self.server_args.model_path), "sglang")) is not None:
                take_media(runner.model, vision, device)
            ControlHandlers(self).serve()
        except Exception as error:
            write_failure(os.environ[FOLDER_VARIABLE], rank, f"{type(error).__name__}: {error}")
            raise

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Process SGLang's messages and, in a pause, a queued job. The loop calls this before each step."""
        super().process_input_requests(recv_reqs)
        if self._engine_paused:
            with suppress(queue.Empty):
                self.jobs.get(timeout=PAUSED_SECONDS)()

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Count generated and prefilled tokens, then process the step's result. The loop calls this after each step."""
        self.generated_tokens += sum(produces_token(req) for req in batch.reqs)
        self.prefilled_tokens += sum(batch.extend_lens or ()) if batch.forward_mode.is_extend() else 0
        super().process_batch_result(batch, result)

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        """Pause generation, and begin to receive weights if the message asks for it. Called by the loop."""
        super().pause_generation(recv_req)
        if isinstance(recv_req, PauseForUpdate):
            self.updates.begin(recv_req)
        elif self.cuda_device is not None and not self.updates.receiving:  # else it would wait for the reception
            torch.cuda.synchronize(self.cuda_device)  # the last step's work
        self._tell_change(recv_req)

    def continue_generation(self, recv_req: ContinueGenerationReqInput) -> None:
        """Resume generation. Called by the loop."""
        super().continue_generation(recv_req)
        self._tell_change(recv_req)

    def run_between_steps(self, job: Callable[[], Any], timeout: float) -> Any:
        """Run `job` in the paused loop. Returns its result; raises TimeoutError after `timeout` seconds."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(job())
            except Exception as error:
                done.set_exception(error)

        self.jobs.put(work)
        return done.result(timeout)

    def commit(self, key: str) -> dict[str, HeldRequest]:
        """Switch to new weights, whose prefix-cache key is `key`.

        Returns the unfinished requests. Waiting requests, which have no keys and values of the old weights, get the new
        key. Running requests keep the old key, which no new request uses.
        """
        held: dict[str, HeldRequest] = {}
        for req in self.waiting_queue:
            req.extra_key = with_weights(req.extra_key, key)
            held[req.rid] = HeldRequest(tokens=len(req.output_ids))
        # With the overlapped loop the last step's tokens are produced, but not yet counted.
        made = {req.rid for batch, _ in getattr(self, "result_queue", ()) for req in batch.reqs if produces_token(req)}
        for req in self._running_requests():
            if not req.finished() and req.rid not in held:
                tokens = len(req.output_ids) + (req.rid in made)
                held[req.rid] = HeldRequest(tokens=tokens, continues=True)
        return held

    def end_all(self) -> int:
        """End every request in a pause of mode "retract"; samples keep their tokens. Returns the number of requests."""
        ended = list(self.waiting_queue)
        self.waiting_queue.clear()
        for req in ended:
            req.finished_reason = FINISH_ABORT("relaxd paused in mode abort")
        if ended:
            self.output_streamer.stream_output(ended, any(req.return_logprob for req in ended))
        return len(ended)

    def _tell_change(self, message: PauseGenerationReqInput | ContinueGenerationReqInput) -> None:
        self.news.tell(ChangeMade(int(message.rid or 0), self.ps.tp_rank))

    def _running_requests(self) -> Iterator[Req]:
        for batch in (self.running_batch, self.last_batch, self.cur_batch):
            if batch is not None:
                yield from batch.reqs
        for batch, _ in getattr(self, "result_queue", ()):
            yield from batch.reqs
        if self.chunked_req is not None:
            yield self.chunked_req


def produces_token(req: Req) -> bool:
    """Return True if a step produces a token for this request: it has not ended, and its prefill is complete."""
    return not req.finished() and req.inflight_middle_chunks <= 0 and req.sampling_params.max_new_tokens > 0


class RequestTokenizer:
    """Tokenizer interface that SGLang needs for requests with stop strings or min_new_tokens.

    Requests list their end tokens, so this tokenizer has none: its eos_token_id is the vocabulary size, which SGLang
    ignores.
    """

    additional_stop_token_ids = None

    def __init__(self, folder: str, vocabulary: int) -> None:
        self.decode = AutoTokenizer.from_pretrained(folder).decode
        self.eos_token_id = vocabulary


class ControlHandlers(engine_pb2_grpc.SchedulerServicer, rollout_pb2_grpc.RolloutServicer):
    """Serves the scheduler's gRPC calls from the engine's process."""

    def __init__(self, scheduler: ControlledScheduler) -> None:
        self._scheduler = scheduler

    def serve(self) -> None:
        """Start the gRPC server on the scheduler's Unix socket. Returns once it accepts calls."""
        path = socket_path(os.environ[FOLDER_VARIABLE], self._scheduler.ps.tp_rank)
        add_all = engine_pb2_grpc.add_SchedulerServicer_to_server, rollout_pb2_grpc.add_RolloutServicer_to_server
        services = tuple((add, self) for add in add_all)
        listening = threading.Event()
        serving = serve_socket(path, os.environ[TOKEN_VARIABLE], services, listening.set)
        threading.Thread(target=lambda: asyncio.run(serving), name="control", daemon=True).start()
        if not listening.wait(ANSWER_SECONDS):
            raise EngineError(f"no calls are taken at {path} after {ANSWER_SECONDS:g} s")

    def EndAll(self, request: engine_pb2.EndAllRequest, context: Any) -> engine_pb2.EndAllResponse:
        ended = self._scheduler.run_between_steps(self._scheduler.end_all, ANSWER_SECONDS)
        return engine_pb2.EndAllResponse(ended=ended)

    def GetSchedulerStats(
        self, request: engine_pb2.GetSchedulerStatsRequest, context: Any
    ) -> engine_pb2.GetSchedulerStatsResponse:
        scheduler = self._scheduler
        if scheduler.cuda_device is None:
            memory = int(psutil.Process().memory_info().rss)
        else:
            free, total = memory_of_all(scheduler.cuda_device)
            memory = total - free
        return engine_pb2.GetSchedulerStatsResponse(
            running_samples=len(scheduler.running_batch.reqs),
            waiting_samples=len(scheduler.waiting_queue),
            tokens_generated=scheduler.generated_tokens,
            memory_bytes=memory,
            tokens_prefilled=scheduler.prefilled_tokens,
            recording=scheduler.profiler_manager.profile_in_progress,
        )

    async def WatchEnd(self, request: engine_pb2.WatchEndRequest, context: Any) -> engine_pb2.WatchEndResponse:
        await asyncio.Event().wait()
        return engine_pb2.WatchEndResponse()

    def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: Any
    ) -> rollout_pb2.JoinWeightGroupResponse:
        """Join a weight group as rank `rank` + the scheduler's tensor-parallel rank."""
        group = request.group
        try:
            self._scheduler.weights.join(
                Rendezvous.from_proto(group),
                request.rank + self._scheduler.ps.tp_rank,
                request.manifest,
                group.timeout_seconds,
            )
        except ManifestMismatch as error:
            raise BadManifest(str(error)) from error
        return rollout_pb2.JoinWeightGroupResponse()

    def LeaveWeightGroup(
        self, request: rollout_pb2.LeaveWeightGroupRequest, context: Any
    ) -> rollout_pb2.LeaveWeightGroupResponse:
        """Leave a weight group; the response tells whether a failed broadcast may have changed the model."""
        unusable = self._scheduler.updates.leave(request.group_name)
        return rollout_pb2.LeaveWeightGroupResponse(quarantined=unusable)
