"""Whole runs on the same GPUs: async, strictly on-policy (sync) and colocate, with long-tailed answers.

`python -m benchmarks.modes [--gpus 2] [--modes async,sync,colocate] [--replicas 1,2,3] [--minutes 9]`. The real stack,
as `relaxd run` brings it up, on a Qwen3 with random weights whose answers have geometric lengths
(benchmarks/long_tail.py), rewards at random and a learning rate that changes nothing. async and sync have half of the
GPUs for the trainer and an engine on each of the others; colocate has a rank and an engine on every GPU. async@3 is
async with max_staleness 3; --replicas adds async runs of a one-rank trainer with so many engines. Runs for which there
are too few GPUs or minutes are skipped with a note. --cpu tries the script on a tiny model.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.reporting import report
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.local import stack
from relaxd.local.state_folder import StateFolder
from relaxd.local.supervisor import StackPlan
from relaxd.replica.gpus import visible_gpus
from relaxd.v1 import coordinator_pb2 as pb

START_SECONDS = 240.0
"""Deadline for services, engines and the first steps."""
LEFT_SECONDS = 130.0
"""Shortest remaining time in which another run is started."""
CONFIG = """
[run]
steps = 1000000
folder = "{folder}/runs"
colocate = {colocate}

[model]
path = "{folder}/model"

[data]
source = "addition"
max_prompt_tokens = 96

[reward]
name = "benchmarks.rewards:coin"
workers = 2

[rollout]
engine = "{engine}"
dtype = "{dtype}"
samples_per_prompt = {samples}
max_new_tokens = {longest}
max_running_samples = {running}
memory_fraction = {memory}
threads = {threads}

[rollout.sglang]
{options}

[algorithm]
name = "grpo"
drop_zero_variance = false

[trainer]
dtype = "{dtype}"
ranks = {ranks}
groups_per_step = {groups}
micro_batch_tokens = {micro_batch}
threads = {threads}

[trainer.optimizer]
lr = 1e-12

[trainer.checkpoint]
every = 0

[weights]
transport = "{transport}"

[board]
max_staleness = {staleness}

[telemetry]
sample_ratio = 0
"""


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    ranks: int
    engines: int
    staleness: int
    colocate: bool = False

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name)

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.ranks if self.colocate else self.ranks + self.engines


def make_cases(modes: Sequence[str], replicas: Sequence[int], gpus: int, ranks: int) -> list[Case]:
    """Return the requested runs; those of --modes use all GPUs, `ranks` of them for the trainer."""
    cases = []
    for mode in modes:
        kind, _, staleness = mode.partition("@")
        if kind == "colocate":
            cases.append(Case("colocate", gpus, gpus, 0, colocate=True))
        elif kind in ("async", "sync"):
            cases.append(Case(mode, ranks, gpus - ranks, int(staleness or 1) if kind == "async" else 0))
        else:
            raise SystemExit(f"--modes has {mode!r}: async, async@STALENESS, sync and colocate are known")
    return cases + [Case(f"async, replicas {count}", 1, count, 1) for count in replicas]


def sglang_options(running: int) -> str:
    """Return the section rollout.sglang, in TOML, for engines that work on at most `running` samples at once."""
    sglang = {"cuda_graph_max_bs_decode": running, "cuda_graph_backend_prefill": "disabled"}
    kernels = find_spec("sgl_kernel")
    places = (kernels.submodule_search_locations or []) if kernels else []
    if not any(list(Path(place).glob("flash_ops*")) for place in places):  # not SGLang's default
        sglang |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in sglang.items())


def make_config(case: Case, folder: Path, options: argparse.Namespace) -> str:
    """Return the run's TOML."""
    return CONFIG.format(
        folder=folder,
        colocate=str(case.colocate).lower(),
        engine="transformers" if options.cpu else "sglang",
        dtype="float32" if options.cpu else "bfloat16",
        transport="gloo" if options.cpu else "cuda_ipc" if case.colocate else "nccl",
        samples=options.samples,
        longest=options.longest,
        running=options.running,
        memory=0 if options.cpu else options.memory_fraction,
        threads=1 if options.cpu else 0,
        options="" if options.cpu else sglang_options(options.running),
        ranks=case.ranks,
        groups=options.groups,
        micro_batch=max(options.micro_batch, options.longest + 96),
        staleness=case.staleness,
    )


class UtilisationWatch(threading.Thread):
    """Samples NVML's utilisation of the replicas' GPUs, the share of time with a kernel, five times a second."""

    def __init__(self, replicas: Sequence[pb.RegisteredReplica]) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._users: dict[str, list[str]] = {}
        for replica in replicas:
            for uuid in replica.leased_gpu_uuids:
                role = replica.registration.role
                self._users.setdefault(uuid, []).append(role)
        self._busy: dict[str, list[float]] = {uuid: [] for uuid in self._users}

    def run(self) -> None:
        """Sample until `stop`."""
        if not self._users:
            return
        import pynvml

        pynvml.nvmlInit()
        handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in self._users}
        while not self._ended.wait(0.2):
            for uuid, handle in handles.items():
                self._busy[uuid].append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)

    def stop(self) -> list[tuple[str, float]]:
        """Stop the thread; return each GPU's user and idle share."""
        self._ended.set()
        self.join()
        shares = [
            ("+".join(self._users[uuid]), 1 - statistics.fmean(busy)) for uuid, busy in self._busy.items() if busy
        ]
        return sorted(shares)


@contextlib.contextmanager
def services(
    state: StateFolder, replicas: Mapping[str, int], change: Callable[[StackPlan], None] = lambda plan: None
) -> Iterator[CoordinatorClient]:
    """Run the stack of one run, planned otherwise by `change`; print its logs if the run fails."""
    plan = stack.make_plan(state, port=0, replicas=replicas, stop_with_parent=True, grace_seconds=2)
    change(plan)
    stack.up(state, plan, lambda text: print(f"  {text}", flush=True))
    try:
        with CoordinatorClient(plan.coordinator) as coordinator:
            yield coordinator
    except BaseException:
        for log in sorted(state.logs.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}", flush=True)
        raise
    finally:
        stack.down(state)


def run_case(case: Case, folder: Path, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Start a run and measure it for long enough; return its figures.

    `folder` has the model; `deadline` is a time.monotonic() value. Raises CliError, TimeoutError.
    """
    begun = time.monotonic()
    with services(StateFolder(folder / f"state-{case.run_id}"), {"rollout": case.engines}) as coordinator:
        run = coordinator.start_run(make_config(case, folder, options), case.run_id)
        metrics = Path(run.folder) / "metrics.jsonl"
        watch: UtilisationWatch | None = None
        measured_from, said = 0.0, 0.0
        while True:
            time.sleep(0.2)
            now, lines = time.monotonic(), read_steps(metrics)
            if now - said > 15:
                state = coordinator.run()
                print(f"  {now - begun:.0f} s: step {len(lines)} {state.reason}", flush=True)
                if state.state in ENDED:
                    raise CliError(f"the run has ended: {state.reason}")
                said = now
            if not measured_from and len(lines) >= options.warmup:
                watch = UtilisationWatch(coordinator.replicas())
                watch.start()
                measured_from, started = now, now - begun
                print(f"  measuring after {started:.0f} s", flush=True)
            done = len(lines) - options.warmup
            if measured_from and done >= 3 and (now - measured_from > options.seconds or done >= options.steps):
                break
            if now > deadline or (not measured_from and now - begun > START_SECONDS):
                if done < 3:
                    raise TimeoutError(f"only {len(lines)} steps after {now - begun:.0f} s")
                break
        idle = watch.stop() if watch else []
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{run.run_id}.jsonl").write_text(metrics.read_text())
    return summarise(case, lines[options.warmup :], idle) | {"start s": round(started)}


def summarise(case: Case, lines: Sequence[dict[str, Any]], gpu_idle: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Compute a run's figures from the metrics of the measured steps and the idle shares of its GPUs."""
    seconds = sum(line["step_seconds"] for line in lines)

    def total(name: str) -> float | None:
        values = [line[name] for line in lines if line.get(name) is not None]
        return sum(values) if values else None

    def share(name: str) -> float | str:
        """Return a share of all steps' time."""
        value = total(name)
        return "" if value is None else value / seconds

    def mean(name: str, most: bool = False) -> float | str:
        values = [line[name] for line in lines if line.get(name) is not None]
        return "" if not values else max(values) if most else statistics.fmean(values)

    return {
        "mode": case.name,
        "GPUs": case.gpus,
        "ranks+engines": f"{case.ranks}+{case.engines}",
        "steps": len(lines),
        "samples/s": (total("samples") or 0.0) / seconds,
        "tokens/s": (total("tokens") or 0.0) / seconds,
        "step s": seconds / len(lines),
        "median s": statistics.median(line["step_seconds"] for line in lines),
        "train share": share("train_seconds"),
        "wait share": share("wait_seconds"),
        "sync share": share("sync_seconds"),
        "sync wait": share("sync_wait_seconds"),
        "paused": mean("engine_paused_share"),
        "switch share": share("switch_seconds"),
        "trainer idle": mean("trainer_idle_share"),
        "engine idle": mean("engine_idle_share"),
        "GPU idle": statistics.fmean(share for _, share in gpu_idle) if gpu_idle else "",
        "of each": "\n".join(f"{users} {share:.2f}" for users, share in gpu_idle),
        "staleness": mean("staleness_mean"),
        "most stale": mean("staleness_max", most=True),
        "length": mean("response_length_mean"),
    }


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Read the trained steps of metrics.jsonl, whose last line may be incomplete."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    return [line for line in map(json.loads, lines) if line.get("step_seconds")]


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row the ratio of its samples/s to those of sync and colocate."""
    speeds = {row["mode"]: row["samples/s"] for row in rows}
    bases = [base for base in ("sync", "colocate") if base in speeds]
    return [row | {f"x {base}": row["samples/s"] / speeds[base] for base in bases} for row in rows]


def show(name: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Print a column per run and write the results as JSON."""
    columns = with_ratios(rows)
    figures = [figure for figure in columns[0] if figure != "mode"]
    report(name, [{"": figure} | {row["mode"]: row[figure] for row in columns} for figure in figures], **facts)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="0: all that are visible")
    parser.add_argument("--ranks", type=int, default=0, help="trainer's GPUs in async and sync; 0: half of them")
    parser.add_argument("--modes", default="async,sync,colocate,async@3")
    parser.add_argument("--replicas", default="", help="such as 1,2,3: async, one rank, so many engines")
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--mean", type=float, default=256.0, help="mean answer, in tokens")
    parser.add_argument("--longest", type=int, default=2048, help="answers are cut there")
    parser.add_argument("--groups", type=int, default=32, help="per step")
    parser.add_argument("--samples", type=int, default=8, help="per group")
    parser.add_argument("--running", type=int, default=512, help="most samples that an engine works on at once")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens")
    parser.add_argument("--memory-fraction", type=float, default=0.5)
    parser.add_argument("--warmup", type=int, default=4, help="first steps, not measured")
    parser.add_argument("--steps", type=int, default=60, help="most steps to measure")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure a run")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--keep", type=Path, help="a folder for each run's metrics.jsonl")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, without GPUs")
    return parser.parse_args(words)


def main() -> None:
    begun = time.monotonic()
    options = parse()
    gpus = options.gpus or (2 if options.cpu else len(visible_gpus()))
    if not gpus:
        raise SystemExit("no GPU to be seen here; --cpu tries the script without")
    modes = [mode for mode in options.modes.split(",") if mode]
    replicas = [int(count) for count in options.replicas.split(",") if count]
    cases = make_cases(modes, replicas, gpus, options.ranks or max(1, gpus // 2))
    name = "modes-cpu" if options.cpu else "modes"
    facts = {key: value for key, value in vars(options).items() if key not in ("keep", "cpu", "minutes")}
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="relaxd-modes-") as temporary:
        folder = Path(temporary)
        command = [sys.executable, "-m", "benchmarks.long_tail", str(folder / "model"), "--shape", options.shape]
        subprocess.run([*command, "--mean", str(options.mean)], check=True, timeout=300)
        for case in cases:
            left = options.minutes * 60 - (time.monotonic() - begun)
            if case.gpus > gpus or case.engines < 1:
                left_out[case.name] = f"it needs {case.ranks} + {max(case.engines, 1)} GPUs, there are {gpus}"
                continue
            if left < (0 if options.cpu else LEFT_SECONDS):
                left_out[case.name] = f"{left:.0f} s are left"
                continue
            print(f"{case.name}: {case.ranks} ranks, {case.engines} engines, {left:.0f} s left", flush=True)
            try:
                rows.append(run_case(case, folder, options, time.monotonic() + left - 20))
            except (CliError, TimeoutError) as error:
                left_out[case.name] = f"{type(error).__name__}: {error}"[:500]
                print(f"  {left_out[case.name]}", flush=True)
                continue
            print(f"  {json.dumps(rows[-1])}", flush=True)
            show(name, rows, settings=facts, left_out=left_out)  # after each run, in case the next one is interrupted
    if not rows:
        print(f"nothing was measured: {left_out}")
        sys.exit(1)


if __name__ == "__main__":
    main()
