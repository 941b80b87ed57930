"""A launcher process exports its traces, metrics and logs, and its spans are part of the scaling that asked for it."""

import asyncio
import signal
from collections.abc import Iterator

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from relaxd.rpc.client import channel
from relaxd.v1 import launcher_pb2 as pb
from relaxd.v1.launcher_pb2_grpc import LauncherStub
from services.coordinator.state.store import Store
from tests.kit.otlp import OtlpReceiver, otlp_receiver
from tests.kit.ports import free_port
from tests.kit.processes import kill, start_python

CALLER = SpanContext(0xA, 0xB, is_remote=False, trace_flags=TraceFlags(1))


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


async def launch(port: int, term: int) -> None:
    """Launch a replica, as a coordinator within a span does."""
    traceparent = f"00-{CALLER.trace_id:032x}-{CALLER.span_id:016x}-01"
    async with channel(f"127.0.0.1:{port}", term=term) as to:
        request = pb.LaunchRequest(launch_id="a", role="rollout")
        metadata = [("traceparent", traceparent)]
        await LauncherStub(to).Launch(request, timeout=30, wait_for_ready=True, metadata=metadata)


def test_a_launcher_exports(receiver: OtlpReceiver, redis_url: str) -> None:
    term, port = Store(redis_url).take_over(), free_port()
    words = ("--redis", redis_url, "--port", str(port), "--replica-id", "launcher-1")
    process = start_python("-m", "tests.fuzz.launcher", *words, environment=receiver.environment())
    try:
        asyncio.run(launch(port, term))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        kill(process)
    (span,) = receiver.wait_for(lambda r: r.spans(), 20)
    assert (span.service, span.instance, span.kind) == ("relaxd-launcher", "launcher-1", "SERVER")
    assert (span.name, span.parent_id) == ("relaxd.v1.Launcher/Launch", f"{CALLER.span_id:016x}")
    told = [log for log in receiver.logs() if log.body.startswith("launched a")]
    assert [(log.trace_id, log.span_id) for log in told] == [(span.trace_id, span.span_id)]
    assert receiver.points("rpc.server.call.duration")
