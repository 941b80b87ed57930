"""The transformers engine: one model, and one thread that decodes all running samples together.

Samples join the running batch at any step (their prompt is prefilled once for all samples of a request) and leave it
when they end, so no request waits for a longer one.
"""

import ctypes
import ctypes.util
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from relaxd.data.towers import TowerOutputs
from relaxd.data.vision import VisionModel
from relaxd.process.torch_profile import StepRecording
from relaxd.v1.engine_pb2 import RecordStepsRequest
from services.rollout.engines.generation_gate import GenerationGate
from services.rollout.engines.request_types import (
    EngineError,
    FailureHandler,
    MemoryPart,
    Output,
    OutputHandler,
    PauseMode,
    Request,
    Version,
    cut_at_stop,
)
from services.rollout.engines.seen_prompts import see
from services.rollout.engines.transformers.batch import Batch, RunningSample, choose_tokens, likeliest_tokens
from services.rollout.engines.transformers.vision import KEPT_BYTES, TOWERS

logger = logging.getLogger(__name__)


class ParameterMemory:
    """Frees and reallocates the memory of a model's parameters. Tied parameters stay tied.

    Tower parameters keep their memory, because a trainer that doesn't train towers never sends them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes: list[tuple[torch.nn.Parameter, torch.Size]] = []

    @property
    def released(self) -> bool:
        """True while the parameters' memory is freed."""
        return bool(self._shapes)

    def release(self) -> None:
        """Free the parameters' memory and their values. The model is unusable until `restore`."""
        if self.released:
            return
        towers = {id(parameter) for name, parameter in self._model.named_parameters() if name.startswith(TOWERS)}
        for parameter in self._model.parameters():
            if id(parameter) in towers:
                continue
            self._shapes.append((parameter, parameter.shape))
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        _trim()

    def restore(self) -> None:
        """Allocate the parameters' memory again, with undefined values."""
        for parameter, shape in self._shapes:
            parameter.data = torch.empty(shape, dtype=parameter.dtype)
        self._shapes.clear()


def _trim() -> None:
    """Make the C library return free heap memory, left by small tensors, to the system."""
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
    if trim is not None:
        trim(0)


PREFILL_TOKENS = 1024
"""Maximum size of one prefill, in tokens with padding; a pause waits for it. Longer prompts are prefilled alone."""
SLEEP_LEASE_SECONDS = 10.0
"""Lease of the pause before a sleep, in seconds beyond the time allowed for running samples to end."""


class TransformersEngine:
    """Generates samples with a model. Pauses between tokens, and updates weights in a pause (see GenerationGate)."""

    def __init__(
        self,
        model: PreTrainedModel,
        decode: Callable[[list[int]], str],
        end_ids: Sequence[int],
        *,
        max_running_samples: int,
        on_output: OutputHandler,
        on_failure: FailureHandler,
        threads: int = 0,
        keep_weights: bool = False,
        vision: VisionModel | None = None,
    ) -> None:
        """`decode` turns token ids into text; `end_ids` are the model's end tokens; `threads`: 0 for torch's default;
        `vision`: the model's media rules, None if it takes no media.

        With `keep_weights` a sleep frees no parameters; for models whose weights nobody sends.
        """
        self.gate = GenerationGate()
        self.model = model
        self.tower_outputs = TowerOutputs(KEPT_BYTES)
        self._decode = decode
        self._end_ids = frozenset(end_ids)
        self._max_running_samples = max_running_samples
        self._on_output = on_output
        self._on_failure = on_failure
        self._threads = threads
        self._vision = vision
        self._memory = ParameterMemory(model)
        self._keep_weights = keep_weights
        self._waiting: deque[list[RunningSample]] = deque()
        self._batch: Batch | None = None
        self._cancelled: set[str] = set()
        self._aborted: set[str] = set()
        self._recording: StepRecording | None = None
        self._stopping = False
        self._tokens_generated = self._tokens_prefilled = self._tokens_prompted = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        batch = self._batch
        with self.gate.changed:
            waiting = sum(map(len, self._waiting))
        return {
            "running_samples": len(batch.samples) if batch else 0,
            "waiting_samples": waiting,
            "tokens_generated": self._tokens_generated,
            "tokens_prefilled": self._tokens_prefilled,
            "tokens_prompted": self._tokens_prompted,
        }

    def submit(self, request: Request) -> None:
        """Queue a request, whose id must not be in use. Raises EngineError."""
        if request.likeliest > (vocabulary := self.model.config.get_text_config().vocab_size):
            raise EngineError(f"the {request.likeliest} likeliest tokens are asked for, but there are {vocabulary}")
        samples = [RunningSample.of(request, index, self._end_ids) for index in request.samples]
        with self.gate.changed:
            self._waiting += [[sample] for sample in samples] if request.begun else [samples]
            self.gate.changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Cancel a request without reporting its end; at most one more token of each sample may be reported."""
        with self.gate.changed:
            self._cancelled.add(request_id)
            self.gate.changed.notify_all()

    def abort(self, request_id: str) -> None:
        """End a request's samples, which keep their tokens so far; works in a pause too."""
        with self.gate.changed:
            self._aborted.add(request_id)
            self.gate.changed.notify_all()

    def pause(self, mode: PauseMode, lease_seconds: float, timeout: float) -> int:
        """Pause generation between two tokens. Returns the number of unfinished samples.

        Modes: in_place keeps requests; abort ends all requests; drain waits for running samples. Raises EngineError
        for retract, because this engine can't keep samples without their keys and values.
        """
        if mode == "retract":
            raise EngineError(
                'rollout.engine = "transformers" cannot pause in mode retract: use in_place, abort or drain'
            )
        self.gate.pause(mode, lease_seconds, timeout)
        with self.gate.changed:
            return sum(1 for _ in self._samples())

    def record(self, request: RecordStepsRequest) -> list[Path]:
        if self._recording is not None and not self._recording.ended:
            raise EngineError("this engine is recording steps already: wait until their file is there")
        path = Path(request.folder) / f"{request.name}-TP-0.trace.json.gz"  # SGLang's naming scheme
        self._recording = StepRecording(path, request.profile.steps, stacks=request.profile.stacks)
        return [path]

    def sleep(self, timeout: float) -> None:
        """Wait for running samples, then free the weights' memory. Raises EngineError."""
        if self._memory.released or self.gate.asleep:
            return
        self.gate.pause("drain", timeout + SLEEP_LEASE_SECONDS, timeout)
        self.gate.sleep()
        if not self._keep_weights:
            self._memory.release()

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Allocate the weights' memory again; values are undefined until an update. Key-value caches grow as needed."""
        if "weights" in parts:
            self._memory.restore()
        if "kv_cache" in parts and not self._memory.released:
            self.gate.wake()

    @contextmanager
    def update(self, weights: Version) -> Iterator[None]:
        """Let the block change the model's weights, after a call of `touch`, and then serve version `weights`."""
        with self.gate.update(weights):
            yield
            for sample in self._samples():
                # A sample that has not started has no keys and values of the old weights.
                sample.spans_weight_update = sample.spans_weight_update or bool(sample.logprobs)

    def stop(self) -> None:
        """End the engine's thread after its current token."""
        with self.gate.changed:
            self._stopping = True
            self.gate.changed.notify_all()
        self._thread.join()

    def _samples(self) -> Iterator[RunningSample]:
        if self._batch is not None:
            yield from self._batch.samples
        for samples in self._waiting:
            yield from samples

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)  # applies to the calling thread only
        while self._wait_for_work():
            if self._recording is not None:
                self._recording.at_step()
            groups = self._take_waiting()
            if groups:
                starting = [sample for group in groups for sample in group]
                self._run_or_fail(starting, partial(self._start, groups))
            if self._batch is not None:
                self._run_or_fail(self._batch.samples, self._step)

    def _wait_for_work(self) -> bool:
        """Wait until samples can run: there are some and the gate admits them. Returns False if the engine stops."""
        gate = self.gate
        with gate.changed:
            while not self._stopping:
                gate.end_lease()
                self._take_out(self._cancelled)
                self._end(self._take_out(self._aborted))
                if gate.take_abort():
                    self._end(self._take_out({sample.request.request_id for sample in self._samples()}))
                if (self._batch is not None and gate.may_run()) or (self._waiting and gate.may_admit()):
                    gate.leave_rest()
                    return True
                gate.rest()
        return False

    def _take_waiting(self) -> list[list[RunningSample]]:
        """Remove and return the next queued requests that fit into the batch, in order of arrival."""
        groups: list[list[RunningSample]] = []
        longest = 0
        with self.gate.changed:
            free = self._max_running_samples - (len(self._batch.samples) if self._batch else 0)
            while self._waiting and self.gate.may_admit():
                samples = self._waiting[0]
                # A request larger than max_running_samples starts in parts; all others start as a whole.
                wanted = min(len(samples), self._max_running_samples)
                longest = max(longest, len(samples[0].request.prompt_tokens) + samples[0].begun)
                if wanted > free or (groups and longest * (len(groups) + 1) > PREFILL_TOKENS):
                    break
                groups.append(samples[:wanted])
                free -= wanted
                if wanted < len(samples):
                    self._waiting[0] = samples[wanted:]
                else:
                    self._waiting.popleft()
        return groups

    def _start(self, groups: list[list[RunningSample]]) -> None:
        groups = [group for group in groups if self._see(group)]
        if not groups:
            return
        batch, logits = Batch.prefill(self.model, self.tower_outputs, groups)
        lengths = [len(group[0].prefix) for group in groups]
        self._tokens_prefilled += sum(lengths)
        self._tokens_prompted += sum(length * len(group) for length, group in zip(lengths, groups, strict=True))
        begun = self._advance(batch, logits)
        if self._batch is not None and begun is not None:
            self._batch.extend(begun)
        else:
            self._batch = self._batch or begun

    def _see(self, group: list[RunningSample]) -> bool:
        """Decode the media of a request's prompt for its samples. On an error, fail this request and return False."""
        try:
            seen = see(group[0].request, self._vision)
        except EngineError as error:
            request_id = group[0].request.request_id
            self.cancel(request_id)
            self._on_failure(request_id, str(error), wrong_media=True)
            return False
        for sample in group:
            sample.seen = seen
        return True

    def _step(self) -> None:
        assert self._batch is not None
        self._batch = self._advance(self._batch, self._batch.step(self.model))

    def _advance(self, batch: Batch, logits: torch.Tensor) -> Batch | None:
        """Choose each sample's next token. Returns the batch without ended samples; None if all have ended."""
        weights = self.gate.weights
        assert weights is not None
        samples = batch.samples
        chosen = choose_tokens(
            logits,
            [sample.request.sampling for sample in samples],
            [sample.generator for sample in samples],
            [sample.forbidden for sample in samples],
        )
        likeliest = likeliest_tokens(logits, [sample.request.likeliest for sample in samples])
        for sample, token, logprob, ids in zip(samples, *chosen, likeliest, strict=True):
            sample.append(token, logprob, ids, weights.version)
            if sample.finish_reason != "stop" and self._has_stop_string(sample):
                sample.finish_reason, sample.at_stop_string = "stop", True
        self._tokens_generated += len(samples)
        self._report(samples)
        rows = [row for row, sample in enumerate(samples) if sample.finish_reason is None]
        if rows:
            batch.keep(rows)
        return batch if rows else None

    def _report(self, samples: Sequence[RunningSample]) -> None:
        outputs: dict[str, list[Output]] = {}
        for sample in samples:
            request, new = sample.request, len(sample.logprobs) - sample.reported
            if sample.finish_reason is not None or (request.stream and new >= request.report_every):
                outputs.setdefault(request.request_id, []).append(self._output(sample))
        for request_id, of_request in outputs.items():
            self._on_output(request_id, of_request)

    def _output(self, sample: RunningSample) -> Output:
        start, sample.reported = sample.reported, len(sample.logprobs)
        output = Output(
            sample.index,
            sample.tokens[sample.begun + start :],
            sample.logprobs[start:],
            sample.versions[start:],
            likeliest=sample.likeliest[start:],
            spans_weight_update=sample.spans_weight_update,
        )
        if sample.finish_reason is not None:
            output.finish_reason = sample.finish_reason
            output.text = self._text(sample)
        return output

    def _has_stop_string(self, sample: RunningSample) -> bool:
        sampling = sample.request.sampling
        if not sampling.stop or len(sample.tokens) < sampling.min_new_tokens:
            return False
        # A token has at least one byte, so these tokens contain any stop string that ends in the last token.
        tail = self._decode(sample.tokens[-max(len(each.encode()) for each in sampling.stop) :])
        return any(each in tail for each in sampling.stop)

    def _text(self, sample: RunningSample) -> str:
        if sample.at_stop_string:
            return cut_at_stop(self._decode(sample.tokens), sample.request.sampling.stop)
        return self._decode(sample.tokens[:-1] if sample.finish_reason == "stop" else sample.tokens)

    def _take_out(self, request_ids: set[str]) -> list[RunningSample]:
        """Remove requests from the batch and the queue, and return their samples. Clears `request_ids`."""
        if not request_ids:
            return []
        removed = [sample for sample in self._samples() if sample.request.request_id in request_ids]
        self._waiting = deque(samples for samples in self._waiting if samples[0].request.request_id not in request_ids)
        if self._batch is not None:
            samples = self._batch.samples
            rows = [row for row, each in enumerate(samples) if each.request.request_id not in request_ids]
            if rows:
                self._batch.keep(rows)
            else:
                self._batch = None
        request_ids.clear()
        return removed

    def _end(self, samples: list[RunningSample]) -> None:
        for sample in samples:
            sample.finish_reason = "abort"
        self._report(samples)

    def _run_or_fail(self, samples: list[RunningSample], work: Callable[[], None]) -> None:
        """Run `work`; if it raises, fail the requests of `samples`. Other requests continue."""
        try:
            work()
        except Exception as error:
            reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            logger.exception("generation failed")
            for request_id in {sample.request.request_id for sample in samples}:
                self.cancel(request_id)
                self._on_failure(request_id, reason)
