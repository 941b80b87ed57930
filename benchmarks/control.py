"""Latency of a unary call through relaxd's server and client stack, compared with a bare grpc.aio echo.

`python -m benchmarks.control`. Both servers run in their own processes. relaxd's stack has everything enabled: a token
is checked, every call is within a trace and has a span on both sides, traces, metrics and logs are exported to a
collector that discards them. Calls alternate, so that both run under the same conditions. Goal: p50 <= 2 x and
< 1 ms.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.reporting import report
from relaxd import telemetry
from relaxd.roles import REWARD
from relaxd.rpc.access import AccessTokens
from relaxd.rpc.client import channel
from relaxd.rpc.credentials import ServerSecurity
from relaxd.rpc.server import start_server
from relaxd.v1 import replica_pb2, replica_pb2_grpc

TOKEN = "benchmark"
STATUS = replica_pb2.ReplicaStatus(replica_id="reward-1", role=REWARD, detail="benchmarking")


class Echo(replica_pb2_grpc.ReplicaServicer):
    """Service that answers at once."""

    async def GetStatus(self, request: replica_pb2.GetStatusRequest, context: Any) -> replica_pb2.GetStatusResponse:
        return replica_pb2.GetStatusResponse(status=STATUS)


async def serve(ours: bool) -> None:
    add = replica_pb2_grpc.add_ReplicaServicer_to_server
    if ours:
        telemetry.setup("benchmark", "server")
        running = await start_server(
            [(add, Echo(), "relaxd.v1.Replica")], security=ServerSecurity(AccessTokens(token=TOKEN))
        )
        print(running.port, flush=True)
        await running.server.wait_for_termination()
    else:
        server = grpc.aio.server()
        add(Echo(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()


class _Discard(
    trace_service_pb2_grpc.TraceServiceServicer,
    metrics_service_pb2_grpc.MetricsServiceServicer,
    logs_service_pb2_grpc.LogsServiceServicer,
):
    """Collector that discards everything."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def Export(self, request: Any, context: Any) -> Any:
        return self._response


def collect() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    traces, metrics = trace_service_pb2.ExportTraceServiceResponse(), metrics_service_pb2.ExportMetricsServiceResponse()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Discard(traces), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Discard(metrics), server)
    logs = logs_service_pb2.ExportLogsServiceResponse()
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(_Discard(logs), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


async def measure(stub: replica_pb2_grpc.ReplicaStub, calls: int, concurrency: int) -> list[float]:
    """Return the seconds of each of `calls` calls, `concurrency` of them in flight."""
    seconds = []

    async def caller() -> None:
        for _ in range(calls // concurrency):
            begun = time.perf_counter()
            await stub.GetStatus(replica_pb2.GetStatusRequest())
            seconds.append(time.perf_counter() - begun)

    with telemetry.root_span("benchmark"):
        await asyncio.gather(*(caller() for _ in range(concurrency)))
    return seconds


async def compare(bare_port: int, our_port: int, rounds: int, calls: int) -> None:
    telemetry.setup("benchmark", "client")
    rows = []
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{bare_port}") as bare_channel,
        channel(f"127.0.0.1:{our_port}", token=TOKEN) as our_channel,
    ):
        stubs = {
            "bare grpc.aio": replica_pb2_grpc.ReplicaStub(bare_channel),
            "relaxd": replica_pb2_grpc.ReplicaStub(our_channel),
        }
        for concurrency in (1, 16):
            seconds: dict[str, list[float]] = {name: [] for name in stubs}
            for stub in stubs.values():
                await measure(stub, 200, concurrency)
            for _ in range(rounds):
                for name, stub in stubs.items():
                    seconds[name] += await measure(stub, calls, concurrency)
            bare_p50 = float(np.median(seconds["bare grpc.aio"]))
            for name, values in seconds.items():
                p50, p99 = np.percentile(values, [50, 99])
                rows.append(
                    {
                        "stack": name,
                        "calls at once": concurrency,
                        "calls": len(values),
                        "p50 ms": round(p50 * 1e3, 3),
                        "p99 ms": round(p99 * 1e3, 3),
                        "p50 ratio": round(p50 / bare_p50, 2),
                    }
                )
    ours = rows[1]
    met = bool(ours["p50 ratio"] <= 2 and ours["p50 ms"] < 1)
    report("control", rows, goal="p50 <= 2 x bare and < 1 ms, one call at a time", met=met)
    telemetry.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=400, help="calls per round and stack")
    parser.add_argument("--serve", choices=["bare", "ours", "collector"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "collector":
        return collect()
    if options.serve:
        return asyncio.run(serve(options.serve == "ours"))
    processes = []

    def start(what: str) -> int:
        command = [sys.executable, "-m", "benchmarks.control", "--serve", what]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout
        return int(processes[-1].stdout.readline())

    try:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{start('collector')}"
        asyncio.run(compare(start("bare"), start("ours"), options.rounds, options.calls))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return None


if __name__ == "__main__":
    main()
