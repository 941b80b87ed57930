"""The SGLang engine: sends requests to its scheduler processes and reports their outputs.

Requests wait in the engine until its gate admits them. So at an update, all requests in the scheduler started with
older weights.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ProfileReq,
    ProfileReqOutput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)

from relaxd.data.vision import VisionModel
from relaxd.rpc.errors import RpcError
from relaxd.v1 import engine_pb2
from services.rollout.engines.generation_gate import GenerationGate
from services.rollout.engines.request_types import (
    EngineError,
    FailureHandler,
    MemoryPart,
    Output,
    PauseMode,
    Request,
    Version,
)
from services.rollout.engines.seen_prompts import see
from services.rollout.engines.sglang.control import SchedulerControl
from services.rollout.engines.sglang.given_logprobs import LogprobRequests
from services.rollout.engines.sglang.scheduler_launch import MessageChannel
from services.rollout.engines.sglang.schedulers import ANSWER_SECONDS, STEP_SECONDS, HeldRequest, Schedulers
from services.rollout.engines.sglang.sglang_samples import SGLangRequest, SGLangSample, aborted_outputs, add_output

MEMORY_PARTS: tuple[MemoryPart, ...] = ("kv_cache", "weights")
"""Parts of GPU memory that a sleeping engine frees, by SGLang's names."""
ENDED_AT_ONCE = 16
"""Maximum number of ended samples that are decoded and reported together. Small batches let new requests start
sooner."""

SEEING_THREADS = 2
"""Number of threads that decode the media of prompts."""

logger = logging.getLogger(__name__)


class SGLangEngine:
    """Generates samples with SGLang. Pauses between model steps, and updates weights in a pause (GenerationGate)."""

    def __init__(
        self,
        channel: MessageChannel,
        schedulers: Schedulers,
        decode: Callable[[list[int]], str],
        end_ids: frozenset[int],
        *,
        experts: int,
        vision: VisionModel | None = None,
        on_output: Callable[[dict[str, list[Output]]], None],
        on_failure: FailureHandler,
        on_broken: Callable[[str], None],
        on_gpus: bool = False,
    ) -> None:
        """`decode` turns token ids into text; `end_ids` are the model's end tokens.

        `experts`: number of experts per layer if the run records routing, else 0. `vision`: the model's media rules;
        None if it takes no media.

        `on_output` is called with the new outputs by request; `on_broken` with the reason if the scheduler processes
        don't respond. `on_gpus`: True if the scheduler processes run on GPUs.
        """
        self.gate = GenerationGate()
        self._channel = channel
        self._schedulers = schedulers
        self._decode = decode
        self._end_ids = end_ids
        self._experts = experts
        self._vision = vision
        self._seeing = ThreadPoolExecutor(SEEING_THREADS, "media")
        self._on_output = on_output
        self._on_failure = on_failure
        self._on_broken = on_broken
        self.logprobs = LogprobRequests(channel.send)
        """Log-prob requests for given tokens. They bypass the gate: an engine for log-probs is never paused."""
        self._groups: dict[str, SGLangRequest] = {}
        self._held: deque[SGLangRequest] = deque()
        self._released: set[MemoryPart] = set()
        """Parts of GPU memory that the engine has freed."""
        self._sent: dict[str, tuple[SGLangRequest, SGLangSample | None]] = {}
        """Request and sample by the scheduler's id; the sample is None for the prefill of a prompt."""
        self.control = SchedulerControl(
            self.gate,
            channel,
            schedulers,
            admit=self._send_held,
            drained=lambda: not self._sent,
            end_all=self._end_all,
        )
        """Controller that pauses the scheduler processes and updates their weights."""
        self._activities = ["CPU", "GPU"] if on_gpus else ["CPU"]
        self._profile_answers: queue.SimpleQueue[ProfileReqOutput] = queue.SimpleQueue()
        self._tokens_prompted = 0
        self._stats = dict.fromkeys(("running_samples", "waiting_samples", "tokens_generated", "tokens_prefilled"), 0)
        for work in (self.control.supervise, self.control.read_news, self._read):
            threading.Thread(target=self._run_thread, args=(work,), name=work.__name__.strip("_"), daemon=True).start()

    def stats(self) -> dict[str, int]:
        try:
            answer = self._schedulers.ask_first(
                "GetSchedulerStats", engine_pb2.GetSchedulerStatsRequest(), ANSWER_SECONDS
            )
            self._stats = {name: getattr(answer, name) for name in self._stats}
        except RpcError as error:
            logger.warning("reporting the last statistics again: %s", error)
        stats = {**self._stats, "tokens_prompted": self._tokens_prompted}
        with self.gate.changed:
            stats["waiting_samples"] += sum(group.unfinished for group in self._held)
        return stats

    def submit(self, request: Request) -> None:
        """Queue a request, whose id must not be in use."""
        group = SGLangRequest.of(request, self._end_ids)
        with self.gate.changed:
            self._groups[request.request_id] = group
            if not request.media:
                self._held.append(group)
                self._send_held()
        if request.media:
            self._seeing.submit(self._see, group)

    def _see(self, group: SGLangRequest) -> None:
        """Decode the media of a request's prompt, then queue the request. Runs in a thread of `_seeing`."""
        request_id, failure, wrong = group.request.request_id, "", False
        try:
            group.take_media(see(group.request, self._vision))
        except Exception as error:  # the others go on
            wrong = isinstance(error, EngineError)
            failure = str(error) if wrong else f"{type(error).__name__}: {error}"
        with self.gate.changed:
            if self._groups.get(request_id) is not group:
                return  # cancelled
            if not failure and not group.aborted:
                self._held.append(group)
                self._send_held()
                return
            del self._groups[request_id]
        if failure:
            self._on_failure(request_id, failure, wrong_media=wrong)
        else:
            self._on_output({request_id: aborted_outputs(group)})

    def cancel(self, request_id: str) -> None:
        """Cancel a request without reporting its end; tokens of the current model step may still be reported."""
        with self.gate.changed:
            self._forget(request_id)
            self.gate.changed.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request's samples, which keep their tokens: at once if not started, else after the current step."""
        with self.gate.changed:
            group = self._groups.get(request_id)
            if group is None:
                return
            group.aborted = True
            if group in self._held:
                self._forget(request_id)
                self._on_output({request_id: aborted_outputs(group)})
            else:
                self._channel.send(AbortReq(rid=f"{request_id}:"))

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation between two model steps. Returns the number of unfinished samples.

        Modes: in_place keeps requests and their key-value cache, retract frees the cache, abort ends all requests,
        drain waits for started requests.
        """
        self.gate.pause(mode, lease_seconds, timeout)
        with self.gate.changed:
            return sum(group.unfinished for group in self._groups.values())

    def record(self, request: engine_pb2.RecordStepsRequest) -> list[Path]:
        """Record model steps with SGLang's profiler; return the trace files. Raises EngineError if one is running."""
        stats = self._schedulers.ask_first("GetSchedulerStats", engine_pb2.GetSchedulerStatsRequest(), ANSWER_SECONDS)
        if stats.recording:
            raise EngineError("this engine is recording steps already: wait until their files are there")
        profile = request.profile
        self._profile_answers = queue.SimpleQueue()  # without a late answer to an earlier request
        self._channel.send(
            ProfileReq(
                output_dir=request.folder,
                profile_id=request.name,
                num_steps=profile.steps + 1,  # SGLang ends before the last step
                activities=self._activities,
                with_stack=profile.stacks,
                record_shapes=True,
            )
        )
        try:
            answer = self._profile_answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise EngineError(f"the schedulers did not begin to record within {ANSWER_SECONDS:g} s") from None
        if not answer.success:
            raise EngineError(f"SGLang does not record: {answer.message}")
        folder, ranks = Path(request.folder), range(self._schedulers.count)
        return [folder / f"{request.name}-TP-{rank}.trace.json.gz" for rank in ranks]

    def sleep(self, timeout: float) -> None:
        """Wait for running samples, then free weights and key-value cache. Raises EngineError."""
        if self.gate.asleep:
            return
        lease = timeout + STEP_SECONDS
        self.gate.pause("drain", lease, timeout)
        self.gate.pause("retract", lease, STEP_SECONDS)  # which also clears the rest of a finished batch
        self.gate.sleep()
        self._released = set(MEMORY_PARTS)
        self.control.change_memory(ReleaseMemoryOccupationReqInput(tags=list(MEMORY_PARTS)))

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Allocate freed memory parts again. Weights are undefined until the next update. Raises EngineError."""
        missing = [part for part in MEMORY_PARTS if part in parts and part in self._released]
        if missing:
            self.control.change_memory(ResumeMemoryOccupationReqInput(tags=missing))
            self._released -= set(missing)
        if self.gate.asleep and not self._released:
            self.gate.wake()

    def mark_update(self, weights: Version, held: Mapping[str, HeldRequest]) -> None:
        """Record in unfinished samples that later tokens come from version `weights`. Call during a weight update."""
        with self.gate.changed:
            for rid, (_, sample) in self._sent.items():
                if sample is not None and rid in held:  # else it has ended; its last output is yet to come
                    sample.marks.append((sample.begun + held[rid].tokens, weights.version))
                    sample.spans_weight_update = sample.spans_weight_update or held[rid].continues

    # --- sending to the scheduler (needs self.gate.changed) ----------------------------------------------------------

    def _send_held(self) -> None:
        weights = self.gate.weights
        while self._held and self.control.running and self.gate.may_admit():
            assert weights is not None
            self._send(self._held.popleft(), weights)

    def _send(self, group: SGLangRequest, weights: Version) -> None:
        samples: list[SGLangSample | None] = [None] if group.shares_prefix else list(group.samples)
        messages = group.messages(self.control.prefix_key(weights), routed_experts=self._experts > 0)
        for sample, (rid, message) in zip(samples, messages, strict=True):
            if sample is not None:
                sample.marks.append((sample.begun, weights.version))
                self._tokens_prompted += len(group.request.prompt_tokens) + sample.begun
            self._sent[rid] = (group, sample)
            self._channel.send(message)
        if not group.shares_prefix:
            group.mm_inputs = None  # all of its messages are sent

    def _forget(self, request_id: str) -> None:
        group = self._groups.pop(request_id, None)
        if group is None:
            return
        if group in self._held:
            self._held.remove(group)
        rids = [rid for rid, (of, _) in self._sent.items() if of is group]
        for rid in rids:
            del self._sent[rid]
        if rids:
            self._channel.send(AbortReq(rid=f"{request_id}:"))  # SGLang matches prefixes of ids

    def _end_all(self) -> None:
        """End all requests, both in the paused scheduler and waiting in the engine."""
        self._schedulers.ask_all("EndAll", engine_pb2.EndAllRequest(), 2 * ANSWER_SECONDS)
        gate = self.gate
        with gate.changed:
            if not gate.changed.wait_for(lambda: not self._sent, ANSWER_SECONDS):
                raise EngineError(f"the scheduler did not end {len(self._sent)} requests within {ANSWER_SECONDS:g} s")
            ended = list(self._held)
            self._held.clear()
            outputs = {}
            for group in ended:
                del self._groups[group.request.request_id]
                outputs[group.request.request_id] = aborted_outputs(group)
        if outputs:
            self._on_output(outputs)

    # --- reports of the scheduler -------------------------------------------------------------------------------------

    def _read(self) -> None:
        while True:
            message = self._channel.receive()
            if isinstance(message, BatchTokenIDOutput):
                self.logprobs.take_outputs(message)
                self._take_outputs(message)
            elif isinstance(message, AbortReq):
                self.logprobs.take_abort(message)
                self._take_abort(message)
            elif isinstance(message, ProfileReqOutput):
                self._profile_answers.put(message)

    def _take_outputs(self, message: BatchTokenIDOutput) -> None:
        outputs: dict[str, list[Output]] = {}
        failures: dict[str, str] = {}
        ended: list[tuple[str, Output, SGLangSample]] = []
        with self.gate.changed:
            for row, rid in enumerate(message.rids):
                if rid not in self._sent:
                    continue  # cancelled
                group, sample = self._sent[rid]
                request_id = group.request.request_id
                if sample is None:
                    reason = message.finished_reasons[row] or {}
                    self._take_prefix(rid, group, reason, outputs, failures)
                    continue
                sampling = group.request.sampling
                failure = add_output(sample, message, row, sampling, self._decode, experts=self._experts)
                if failure:
                    failures[request_id] = failure
                    continue
                if sample.finish_reason is not None and message.finished_reasons[row] is None:
                    self._channel.send(AbortReq(rid=rid))  # the scheduler doesn't know that the sample has ended
                output = self._output(rid, group, sample)
                if output.finish_reason is None:
                    outputs.setdefault(request_id, []).append(output)
                else:
                    ended.append((request_id, output, sample))
            self._finish(outputs, failures)
        self._emit(outputs, failures)
        for start in range(0, len(ended), ENDED_AT_ONCE):
            decoded: dict[str, list[Output]] = {}
            for request_id, output, sample in ended[start : start + ENDED_AT_ONCE]:
                output.text = sample.text(self._decode)
                decoded.setdefault(request_id, []).append(output)
            self._on_output(decoded)

    def _take_prefix(
        self,
        rid: str,
        group: SGLangRequest,
        reason: Mapping[str, Any],
        outputs: dict[str, list[Output]],
        failures: dict[str, str],
    ) -> None:
        """Start a request's samples after the prefill of its prompt, or end the request if the prefill failed."""
        del self._sent[rid]
        request_id = group.request.request_id
        if reason.get("type") != "abort" and not group.aborted:
            group.shares_prefix = False
            self._held.appendleft(group)
            self._send_held()
        elif reason.get("status_code"):
            failures[request_id] = str(reason.get("message"))
        else:
            del self._groups[request_id]
            outputs[request_id] = aborted_outputs(group)

    def _take_abort(self, message: AbortReq) -> None:
        """Report the end of a request that the scheduler aborted before the request started."""
        outputs: dict[str, list[Output]] = {}
        failures: dict[str, str] = {}
        reason = message.finished_reason or {"type": "abort"}
        with self.gate.changed:
            if message.rid not in self._sent:
                return  # cancelled
            group, sample = self._sent[message.rid]
            if sample is None:
                self._take_prefix(message.rid, group, reason, outputs, failures)
            elif reason.get("status_code"):
                failures[group.request.request_id] = str(reason.get("message"))
            else:
                sample.finish_reason = "abort"
                outputs[group.request.request_id] = [self._output(message.rid, group, sample)]
            self._finish(outputs, failures)
        self._emit(outputs, failures)

    def _output(self, rid: str, group: SGLangRequest, sample: SGLangSample) -> Output:
        start, sample.reported = sample.reported, len(sample.tokens)
        new = start - sample.begun
        output = Output(sample.index, sample.tokens[start:], sample.logprobs[new:], sample.versions(start))
        output.likeliest, output.spans_weight_update = sample.likeliest[new:], sample.spans_weight_update
        if sample.finish_reason is not None:
            output.finish_reason = sample.finish_reason
            output.routed_experts = sample.routed_experts
            del self._sent[rid]
            group.unfinished -= 1
            if not group.unfinished:
                del self._groups[group.request.request_id]
        return output

    def _finish(self, outputs: dict[str, list[Output]], failures: dict[str, str]) -> None:
        """Forget failed requests, and notify threads that wait for requests to end."""
        for request_id in failures:
            outputs.pop(request_id, None)
            self._forget(request_id)
        self.gate.changed.notify_all()

    def _emit(self, outputs: dict[str, list[Output]], failures: dict[str, str]) -> None:
        if outputs:
            self._on_output(outputs)
        for request_id, failure in failures.items():
            self._on_failure(request_id, failure)

    def _run_thread(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            logger.exception("the engine failed")
            self._on_broken(f"{type(error).__name__}: {error}")
