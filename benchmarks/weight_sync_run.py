"""Weight synchronisation in a whole run on GPUs, as measured by its coordinator.

    python -m benchmarks.weight_sync_run --shape 4b --engines 1
    python -m benchmarks.weight_sync_run --shape 4b --engines 2 --kill

NCCL alone is measured first, on the same GPUs. Then `relaxd run` trains a model of this shape strictly on-policy with
tiny answers, so that engines are idle when a version arrives; seconds are from the coordinator's first call to all
engines serving the version. With --kill, NCCL is slowed down and an engine is killed (-9) during the broadcast; the
result is the time until the others serve that version.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

from benchmarks.gpu_models import SHAPES
from benchmarks.reporting import report
from benchmarks.weight_sync import Member, write_model
from relaxd.local.state_folder import StateFolder
from relaxd.process.ports import free_port
from relaxd.v1.coordinator_pb2 import GetWeightsRequest, GetWeightsResponse
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from tests.kit.models import byte_tokenizer

CONFIG = """
[run]
steps = {steps}
folder = "{folder}"

[model]
path = "{model}"

[data]
source = "addition"
digits = 2
max_prompt_tokens = 128

[reward]
name = "addition"
workers = 1

[rollout]
engine = "sglang"
dtype = "bfloat16"
samples_per_prompt = 4
max_new_tokens = 4
max_running_samples = 16
memory_fraction = 0.3

[rollout.sglang]
attention_backend = "triton"
sampling_backend = "pytorch"
disable_cuda_graph = true

[algorithm]
drop_zero_variance = false

[trainer]
dtype = "bfloat16"
groups_per_step = 2
micro_batch_tokens = 2048

[trainer.checkpoint]
every = 0

[board]
max_staleness = 0

[weights]
transport = "nccl"
bucket_bytes = {bucket_bytes}
timeout_seconds = {timeout}
"""
SYNC = re.compile(r"version (\d+) is on (\d+) engines after ([0-9.]+) s \((.*)\)")
FAILED = re.compile(r"weight synchronisation \d+ failed: (.*)")
TIMEOUT_SECONDS = 10.0


def raw_seconds(nbytes: int, engines: int) -> float:
    """Return the seconds of one broadcast of this many bytes by NCCL alone."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    members = [Member("engine", gpu) for gpu in gpus[: engines + 1]]
    try:
        port = free_port()
        for rank, member in enumerate(members):
            member.send("join_stock", port=port, rank=rank, world_size=len(members))
        for member in members:
            member.answer()
        took = []
        for _ in range(4):
            started = time.monotonic()
            for member in members:
                member.send("raw", nbytes=nbytes, repeat=10)
            for member in members:
                member.answer()
            took.append((time.monotonic() - started) / 10)
        return statistics.median(took[1:])
    finally:
        for member in members:
            member.process.kill()
            member.process.wait()


class Killer(threading.Thread):
    """Kills the newest engine's process and its children when a synchronisation has just started."""

    def __init__(self, state: StateFolder, delay: float) -> None:
        super().__init__(daemon=True)
        self._state, self._delay = state, delay

    def run(self) -> None:
        """Wait until all engines have version 2, then kill one during the next synchronisation."""
        while (stack := self._state.read()) is None:
            time.sleep(0.1)
        with grpc.insecure_channel(stack.coordinator) as channel:
            stub = CoordinatorStub(channel)
            while not (weights := _weights(stub)).engines or min(e.weights.version for e in weights.engines) < 2:
                time.sleep(0.005)
            while _weights(stub).last_sync_id == weights.last_sync_id:
                time.sleep(0.001)
        time.sleep(self._delay)
        engines = [
            p for p in psutil.process_iter(["cmdline"]) if "services.rollout.engines.sglang.sglang_process" in _words(p)
        ]
        victim = max(engines, key=lambda process: process.pid)
        for process in (*victim.children(recursive=True), victim):
            process.kill()
        print(f"killed an engine at {time.strftime('%H:%M:%S')}.{int(time.time() % 1 * 1000):03d}", flush=True)


def _weights(stub: CoordinatorStub) -> GetWeightsResponse:
    try:
        return stub.GetWeights(GetWeightsRequest(), timeout=5)
    except grpc.RpcError:  # it is starting, or has no run yet
        return GetWeightsResponse()


def _words(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []


def run(arguments: argparse.Namespace, place: Path) -> tuple[list[dict[str, Any]], str]:
    """Run once; return its synchronisations and the coordinator's log."""
    model = place / "model"
    write_model(arguments.shape, model)
    byte_tokenizer().save_pretrained(model)
    values = {"steps": arguments.steps, "folder": place / "runs", "model": model, "timeout": TIMEOUT_SECONDS}
    (place / "run.toml").write_text(CONFIG.format(**values, bucket_bytes=arguments.bucket_mb << 20))
    log = place / "runs" / "sync" / "logs" / "coordinator.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    if arguments.kill:
        environment |= {"NCCL_MAX_NCHANNELS": "1", "NCCL_MIN_NCHANNELS": "1"}
        Killer(StateFolder(place / "state"), arguments.kill_after).start()
    command = [sys.executable, "-m", "relaxd.cli", "run", "run.toml", "--run-id", "sync"]
    command += ["--rollout", str(arguments.engines), "--state", str(place / "state")]
    process = subprocess.run(command, cwd=place, env=environment, check=False, timeout=arguments.limit)
    text = log.read_text() if log.exists() else ""
    if process.returncode != 0 or not SYNC.search(text):
        for each in sorted((place / "state").rglob("*.log")):
            print(f"--- {each}\n{each.read_text()[-3000:]}", flush=True)
        raise SystemExit(f"relaxd run ended with {process.returncode}")
    found = [
        {"version": int(v), "engines": int(n), "seconds": float(s), "parts": parts}
        for v, n, s, parts in SYNC.findall(text)
    ]
    return found, text


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="4b")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--kill", action="store_true", help="kill an engine in the middle of a broadcast")
    parser.add_argument("--kill-after", type=float, default=0.1, help="seconds after a synchronisation begins")
    parser.add_argument("--limit", type=float, default=270.0, help="seconds for the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_model(arguments.shape, place / "size")
        nbytes = (place / "size" / "model.safetensors").stat().st_size
        raw = 0.0 if arguments.kill else raw_seconds(nbytes, arguments.engines)
        print(f"NCCL alone: {1e3 * raw:.1f} ms", flush=True)
        syncs, text = run(arguments, place)
    for sync in syncs:
        print(sync, flush=True)
    words = ("version", "failed", "left out", "aborting", "registered", "lease")
    print("\n".join(line for line in text.splitlines() if any(word in line for word in words)), flush=True)
    if arguments.kill:
        return
    warm = [sync["seconds"] for sync in syncs[2:] if sync["engines"] == arguments.engines]
    seconds = statistics.median(warm)
    row = {
        "model": arguments.shape,
        "GB": nbytes / 1e9,
        "engines": arguments.engines,
        "bucket MB": arguments.bucket_mb,
        "raw ms": 1e3 * raw,
        "sync ms": 1e3 * seconds,
        "fastest ms": 1e3 * min(warm),
        "x raw": seconds / raw,
        "first ms": 1e3 * syncs[0]["seconds"],
        "syncs": len(warm),
    }
    report(
        f"weight_sync_run_{arguments.shape}_{arguments.engines}",
        [row],
        gpu=torch.cuda.get_device_name(),
        command="python -m benchmarks." + " ".join(["weight_sync_run", *sys.argv[1:]]),
    )


if __name__ == "__main__":
    main()
