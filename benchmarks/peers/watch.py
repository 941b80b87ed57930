"""One system's run, watched from outside: when each step ended, and what the GPU did meanwhile."""

import itertools
import json
import math
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

GIB = 2**30


@dataclass(frozen=True)
class Launch:
    """A system's command, and the file to which it adds a line of JSON after each step."""

    argv: Sequence[str]
    folder: Path
    steps: Path
    is_step: Callable[[dict[str, Any]], bool]
    """Tells a step's line from others in the file."""
    environment: Mapping[str, str] = field(default_factory=dict)


class GpuWatch(threading.Thread):
    """Samples memory in use and utilisation of the first GPUs ten times a second; nothing without a GPU."""

    def __init__(self, gpus: int) -> None:
        super().__init__(daemon=True)
        self._gpus = gpus
        self._ended = threading.Event()
        self.samples: list[tuple[float, int, float]] = []
        """Time, bytes in use on the fullest, mean share of the time with a kernel."""

    def run(self) -> None:
        """Sample until `stop`."""
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._gpus)]
        while not self._ended.wait(0.1):
            used = max(int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in gpus)
            busy = statistics.fmean(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100 for gpu in gpus)
            self.samples.append((time.monotonic(), used, busy))

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self.join()


def watch(launch: Launch, *, steps: int, warmup: int, seconds: float, log: Path, gpus: int = 1) -> dict[str, Any]:
    """Run a system, which uses the first `gpus` GPUs, until it has done `steps` steps or `seconds` are over.

    Returns its figures, with all step lines as "lines". Its output goes to `log`.
    """
    gpu = GpuWatch(gpus)
    gpu.start()
    begun = time.monotonic()
    ends: list[float] = []
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.argv,
            cwd=launch.folder,
            env={**os.environ, **launch.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while len(ends) < steps and time.monotonic() - begun < seconds:
                ended = process.poll() is not None
                count, now = len(read_steps(launch)), time.monotonic()
                ends += [now] * (count - len(ends))
                if ended:
                    break
                time.sleep(0.02)  # idle: the system's own file tells of its steps
        finally:
            stop(process)
    gpu.stop()
    lines = read_steps(launch)[: len(ends)]
    return summarise(begun, ends, lines, warmup, gpu) | {"exit_code": process.returncode, "lines": lines}


def read_steps(launch: Launch) -> list[dict[str, Any]]:
    """Read the lines of steps; the last line of the file may be incomplete."""
    if not launch.steps.exists():
        return []
    lines = [json.loads(line) for line in launch.steps.read_text().split("\n")[:-1]]
    return [line for line in lines if launch.is_step(line)]


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a system with all its processes, so that the GPU is free for the next one."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=10)


def summarise(
    begun: float, ends: Sequence[float], lines: Sequence[dict[str, Any]], warmup: int, gpu: GpuWatch
) -> dict[str, Any]:
    """Compute ends of steps, step times after the warm-up, start-up time, and what the GPU did in measured steps."""
    figures: dict[str, Any] = {"steps": len(ends), "warmup": warmup, "ends": [end - begun for end in ends]}
    if ends:
        figures["first_step_seconds"] = ends[0] - begun
    if gpu.samples:
        figures["peak_gpu_gib"] = max(used for _, used, _ in gpu.samples) / GIB
    if len(ends) <= warmup + 1:
        return figures
    measured = ends[max(warmup, 1) - 1 :]
    times = [later - earlier for earlier, later in itertools.pairwise(measured)]
    busy = [share for at, _, share in gpu.samples if measured[0] < at < measured[-1]]
    return figures | {
        "step_seconds": times,
        "step_median": statistics.median(times),
        "step_p90": sorted(times)[math.ceil(0.9 * len(times)) - 1],
        "measured_seconds": measured[-1] - measured[0],
        "gpu_busy": statistics.fmean(busy) if busy else None,
    }
