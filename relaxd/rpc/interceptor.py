"""The server interceptor: authentication, stacks, coordinators' terms, default deadlines, spans, mapping of errors.

It is a single interceptor, because each one adds tens of microseconds to a call.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from relaxd import telemetry
from relaxd.rpc.access import AccessTokens
from relaxd.rpc.errors import DeadlineExceeded, InvalidArgument, RpcError, explain
from relaxd.rpc.leader_term import TERM_METADATA, Fence, check_term
from relaxd.rpc.stack_identity import STACK_METADATA, check_stack
from relaxd.telemetry.spans import RpcMethod, ServedCall

DEFAULT_DEADLINE_SECONDS = 120.0
"""Default deadline of unary calls, in seconds, for callers such as grpcurl."""
DEFAULT_STREAM_DEADLINE_SECONDS = 330.0
"""Default deadline of streaming calls, in seconds; the longest WatchRun takes 300."""

HEALTH = "/grpc.health.v1.Health/"
"""Path prefix of gRPC's health service, whose calls need no token and get no default deadline: probes have no token,
and Health/Watch never ends by design."""

ALMOST_SECONDS = 0.1
"""A call that is cancelled less than this many seconds before its deadline counts as having exceeded it."""

_log = logging.getLogger(__name__)


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Server interceptor that checks, times and traces all calls except those of the health service."""

    def __init__(
        self,
        *,
        tokens: AccessTokens | None,
        fence: Fence | None,
        stack: str = "",
        deadline_seconds: float | None,
        stream_deadline_seconds: float | None,
    ) -> None:
        """Create the interceptor of a server.

        Args:
            tokens: access tokens to accept; None: calls need no token.
            fence: refuses calls of replaced coordinators; None: no call is refused for its term.
            stack: identity of the server's stack, whose calls it accepts; "": calls of all stacks.
            deadline_seconds: default deadline of unary calls; None: no deadline.
            stream_deadline_seconds: default deadline of streaming calls; None: no deadline.
        """
        self._tokens = tokens
        self._fence = fence
        self._stack = stack
        self._deadline_seconds = deadline_seconds
        self._stream_deadline_seconds = stream_deadline_seconds
        self._wrapped: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return a method's handler with checks, deadline and span added. Each method's handler is wrapped once."""
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(HEALTH):
            return handler
        self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler:
        kind = "_".join(
            "stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming)
        )
        behavior = getattr(handler, kind)
        streaming = handler.request_streaming or handler.response_streaming
        deadline = self._stream_deadline_seconds if streaming else self._deadline_seconds
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        of_method = RpcMethod(method)

        # gRPC maps errors of the deserializer to UNKNOWN, so single messages are parsed here.
        parse = handler.request_deserializer if not handler.request_streaming else None

        async def call(request: Any, context: Any) -> Any:
            async with self._around(method, of_method, context, deadline):
                return await behavior(_parsed(parse, request), context)

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._around(method, of_method, context, deadline):
                async for response in behavior(_parsed(parse, request), context):
                    yield response

        async def unimplemented(_request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented by this service")

        wrapped: Any = call
        if inspect.isasyncgenfunction(behavior):
            wrapped = generate
        elif not inspect.iscoroutinefunction(behavior):
            # Methods of the generated base class; relaxd's handlers are all asynchronous.
            wrapped = unimplemented
        return make(
            wrapped,
            request_deserializer=None if parse else handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @asynccontextmanager
    async def _around(
        self, method: str, of_method: RpcMethod, context: Any, deadline_seconds: float | None
    ) -> AsyncIterator[None]:
        carrier: dict[str, str] = {}
        authorization = term = stack = None
        for key, value in context.invocation_metadata() or ():
            if key == "authorization":
                authorization = value
            elif key == TERM_METADATA:
                term = value
            elif key == STACK_METADATA:
                stack = value
            elif key in ("traceparent", "tracestate"):
                carrier[key] = value
        observed = ServedCall(of_method, carrier) if telemetry.enabled() else None
        # gRPC itself cancels the handler at the caller's deadline.
        limit = asyncio.timeout(deadline_seconds if context.time_remaining() is None else None)
        try:
            if self._tokens is not None:
                self._tokens.check(method, authorization)
            check_stack(method, self._stack, stack)
            async with limit:
                if self._fence is not None:
                    await check_term(self._fence, method, term)
                yield
        except RpcError as error:
            if observed:
                observed.status = error.code.name
            await _abort(context, error)
        except grpc.aio.AbortError:
            if observed:
                observed.status = grpc.StatusCode.UNKNOWN.name
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                answer: RpcError = DeadlineExceeded(f"{method} took longer than its deadline of {deadline_seconds:g} s")
            else:
                _log.exception("bug in the handler of %s", method)
                answer = _Internal(f"internal error in {method}: {_short(error)}")
            if observed:
                observed.status = answer.code.name
            await _abort(context, answer)
        except (asyncio.CancelledError, GeneratorExit) as cancelled:
            # gRPC cancels the handler when its caller is gone, and closes a stream's generator from another task.
            code = _cancelled_status(context)
            _log.info("%s was cancelled: %s", method, code.name)
            if observed:
                observed.status = code.name
                observed.in_other_task = isinstance(cancelled, GeneratorExit)
            raise
        finally:
            if observed:
                observed.end()


class _Internal(RpcError):
    code = grpc.StatusCode.INTERNAL


def _parsed(parse: Callable[[bytes], Any] | None, request: Any) -> Any:
    """Return the request as a message. `parse` is None if gRPC has parsed it. Raises InvalidArgument."""
    if parse is None:
        return request
    try:
        return parse(request)
    except DecodeError as error:
        raise InvalidArgument(f"the request is not a message of this call's type: {error}") from error


def _cancelled_status(context: Any) -> grpc.StatusCode:
    """Return the status of a call whose handler was cancelled: DEADLINE_EXCEEDED at its deadline, else CANCELLED."""
    remaining = context.time_remaining()
    late = remaining is not None and remaining < ALMOST_SECONDS
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED


async def _abort(context: Any, error: RpcError) -> NoReturn:
    await context.abort(error.code, error.short_message, error.trailing_metadata())
    raise AssertionError("abort returned")


def _short(error: Exception) -> str:
    text = explain(error) if isinstance(error, grpc.RpcError) else str(error)
    return f"{type(error).__name__}: {text[:200]}"
