"""The demo, asynchronous and strictly on-policy (max_staleness = 0): wall time, rewards, memory of each service.

python -m benchmarks.demo [--steps N] [--seeds 0,1,2] [--model NAME_OR_FOLDER] -> benchmarks/results/demo.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reporting import report
from relaxd.cli.preparing.first_steps import example
from relaxd.local.state_folder import StateFolder

MODES = {"asynchronous": 1, "on-policy": 0}


class MemoryWatch(threading.Thread):
    """Records the peak resident memory of each service, including its child processes."""

    def __init__(self, state: StateFolder) -> None:
        super().__init__(daemon=True)
        self._state = state
        self._ended = threading.Event()
        self.peak_mib: dict[str, float] = {}

    def run(self) -> None:
        """Sample twice a second."""
        while not self._ended.wait(0.5):
            state = self._state.read()
            for service in state.services if state else ():
                if service.pid is not None:
                    used = _resident_mib(service.pid)
                    self.peak_mib[service.name] = max(self.peak_mib.get(service.name, 0.0), used)

    def stop(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self.join()


def _resident_mib(pid: int) -> float:
    """Return the proportional set size if available, so that pages shared by parent and child count once."""
    total = 0.0
    try:
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            memory = member.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    except psutil.Error:
        pass  # it has just ended
    return total / 2**20


def run_once(mode: str, seed: int, steps: int, model: str, folder: Path) -> dict[str, Any]:
    """Run the demo's configuration once."""
    state = StateFolder(folder / "state")
    memory = MemoryWatch(state)
    memory.start()
    run_id = f"{mode}-{seed}"
    words = [str(example("addition.toml")), "--run-id", run_id, "--state", str(state.path)]
    words += ["--run.steps", str(steps), "--run.seed", str(seed), "--board.max_staleness", str(MODES[mode])]
    words += ["--run.folder", str(folder), "--model.path", model]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "relaxd.cli", "run", *words], check=True)
    command_seconds = time.monotonic() - started
    memory.stop()
    summary = json.loads((folder / run_id / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / run_id / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line.get("step_seconds")]
    return {
        "mode": mode,
        "seed": seed,
        "steps": summary["steps"],
        "command_s": round(command_seconds, 1),
        "run_s": round(summary["wall_seconds"], 1),
        "step_s": sum(line["step_seconds"] for line in trained) / len(trained),
        "train_s": sum(line["train_seconds"] for line in trained) / len(trained),
        "wait_s": sum(line["wait_seconds"] for line in trained) / len(trained),
        "staleness": sum(line["staleness_mean"] for line in trained) / len(trained),
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "format": summary["format_after"],
        "peak_mib": {name: round(value) for name, value in sorted(memory.peak_mib.items())},
    }


def main() -> None:
    """Run every mode with every seed, alternating. before, after: held-out accuracy; format: held-out, after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="relaxd-demo-") as folder:
        for seed in map(int, options.seeds.split(",")):
            for mode in options.modes.split(","):
                rows.append(run_once(mode, seed, options.steps, options.model, Path(folder)))
    memory = {f"{row['mode']}-{row['seed']}": row.pop("peak_mib") for row in rows}
    report("demo", rows, peak_memory_mib=memory)


if __name__ == "__main__":
    main()
