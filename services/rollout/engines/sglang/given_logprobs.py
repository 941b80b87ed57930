"""Log-prob requests for given tokens, which SGLang prefills without generating.

SGLang prefills the prompt of a group's answers once. From its prefix cache it takes only tokens before the first
requested log-prob, so no log-prob is missing.
"""

import itertools
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from relaxd.v1 import engine_pb2
from services.rollout.engines.request_types import EngineError, RequestFailed

Answer = engine_pb2.ComputeLogprobsResponse


class LogprobRequests:
    """Sends log-prob requests to SGLang's scheduler, and completes their futures with the scheduler's outputs."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        """`send`: function that sends an SGLang message to the scheduler."""
        self._send = send
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Future[Answer], int]] = {}
        """Future answer and number of likeliest tokens per position, by SGLang's request id."""

    def submit(self, request: engine_pb2.ComputeLogprobsRequest) -> "Future[Answer]":
        """Send a log-prob request to the scheduler, and return the future answer.

        The future fails with RequestFailed; cancelling it ends the scheduler's work. Raises EngineError if `start` is
        outside the sequence.
        """
        tokens = np.frombuffer(request.tokens, dtype=np.int32)
        if not 1 <= request.start < len(tokens):
            raise EngineError(f"start is {request.start}: it must be a place in the sequence of {len(tokens)} tokens")
        answer: Future[Answer] = Future()
        rid = f"logprobs-{next(self._numbers)}:"  # the scheduler's abort matches prefixes
        with self._lock:
            self._waiting[rid] = (answer, request.top_k)
        answer.add_done_callback(lambda ended: self._forget(rid, cancelled=ended.cancelled()))
        params = SamplingParams(max_new_tokens=0)
        params.normalize(None)
        self._send(
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", tokens.tolist()),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=True,
                logprob_start_len=request.start - 1,  # SGLang counts from the token that predicts the first one
                top_logprobs_num=request.top_k,
                token_ids_logprob=None,
                stream=False,
            )
        )
        return answer

    def take_outputs(self, message: BatchTokenIDOutput) -> None:
        """Complete the log-prob requests in an output message of the scheduler. Rows of other requests are ignored."""
        for row, rid in enumerate(message.rids):
            answer, top_k = self._find(rid)
            if answer is None:
                continue
            reason = message.finished_reasons[row] or {}
            if reason.get("type") == "abort":
                _fail(answer, f"SGLang ended a request: {reason.get('message') or 'no reason given'}")
                continue
            try:
                found = _answer(message, row, top_k)
            except (TypeError, ValueError) as error:
                _fail(answer, f"SGLang's log-probs can't be read: {error}")
            else:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(found)

    def take_abort(self, message: AbortReq) -> None:
        """Fail a log-prob request that the scheduler aborted before the request started."""
        answer, _ = self._find(message.rid)
        if answer is not None:
            reason = message.finished_reason or {}
            _fail(answer, f"SGLang refused a request: {reason.get('message') or 'no reason given'}")

    def _find(self, rid: str) -> "tuple[Future[Answer] | None, int]":
        with self._lock:
            return self._waiting.get(rid, (None, 0))

    def _forget(self, rid: str, *, cancelled: bool) -> None:
        with self._lock:
            del self._waiting[rid]
        if cancelled:
            self._send(AbortReq(rid=rid))


def _fail(answer: "Future[Answer]", reason: str) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(RequestFailed(reason))


def _answer(message: BatchTokenIDOutput, row: int, top_k: int) -> Answer:
    """Return the log-probs in one row of an output message. Raises TypeError or ValueError for an invalid row."""
    found = Answer(logprobs=_after_first(message.input_token_logprobs_val[row], np.float32))
    if top_k:
        found.likeliest = _after_first(message.input_top_logprobs_idx[row], np.int32)
        found.likeliest_logprobs = _after_first(message.input_top_logprobs_val[row], np.float32)
    return found


def _after_first(values: Sequence[Any], dtype: type) -> bytes:
    """Return all values except the first, which is None in SGLang because nothing predicts that token."""
    return np.array(values[1:], dtype=dtype).tobytes()


TEMPERATURE_VARIABLE = "RELAXD_SGLANG_LOGPROB_TEMPERATURE"
"""Environment variable with the temperature for log-probs of given tokens; unset for a model that generates."""
ENVIRONMENT = {"SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "true"}
"""Environment variables that make SGLang compute logits of given tokens in chunks, which saves gigabytes."""


def set_temperature(model: Any, temperature: float) -> None:
    """Make a model divide its logits by a temperature. SGLang does so for sampled tokens, not for given ones.

    Raises ValueError if the model has no LogitsProcessor to change.
    """
    if temperature == 1.0:
        return
    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no LogitsProcessor of SGLang's, so its log-probs can't be computed under "
            f"rollout.temperature = {temperature:g}: use another engine, or temperature = 1"
        )
    for module in found:
        module._get_logits = _divided(module._get_logits, temperature)


def _divided(get_logits: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    def divided(*arguments: Any, **named: Any) -> Any:
        return get_logits(*arguments, **named).div_(temperature)  # float32, after any soft cap

    return divided
