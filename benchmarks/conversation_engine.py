"""Prefix-cache hits of conversations on two engines, beside those of one, and the speed of a run of conversations.

`python -m benchmarks.conversation_engine`: three GPUs, 0.6B, in less than 200 s. A whole run of the real stack on a
Qwen3 of random weights: conversations of 6 turns, replies of geometric lengths (benchmarks/long_tail.py), observations
of 500 tokens, an agent replica, two SGLang engines and the trainer. Within the run, the requests of all conversations
take turns in going

- to one of the engines only (one),
- to another engine than that of the conversation's last turn (elsewhere),
- where the agent service sends them (sticky).

Steps that lie in two of these windows aren't counted. "prefix hits" is engine_prefix_hit_share of metrics.jsonl, the
mean of the window's steps; "outside" is a conversation's time outside requests to engines as a share of its group's
time. Goal: the hits of sticky are at least 0.95 of those of one. --cpu tries the script on a tiny model, without prefix
cache. --one-gpu has engines and trainer share a GPU: the hits are the same, the speed isn't.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.conversation_engine_parts import ELSEWHERE, ONE, ROUTING, STICKY
from benchmarks.modes import read_steps, services, sglang_options
from benchmarks.reporting import report
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.local.supervisor import StackPlan
from relaxd.replica.gpus import visible_gpus
from relaxd.roles import AGENT, ROLLOUT, TRAINER

START_SECONDS = 150.0
"""Deadline for services, engines and the first steps."""
SETTLE_STEPS = 2
"""First steps of a window that aren't counted: the engines' counters come with heartbeats."""
CONFIG = """
[run]
steps = 1000000
folder = "{folder}/runs"

[model]
path = "{folder}/model"

[data]
source = "addition"
max_prompt_tokens = 96

[agent]
environment = "benchmarks.conversation_environments:Talk"
settings = {{turns = {turns}, letters = {letters}, seconds = {tool_seconds}}}
max_turns = {turns}
turn_tokens = {longest}
max_sessions = {sessions}

[reward]
name = "benchmarks.rewards:coin"
workers = 2

[rollout]
engine = "{engine}"
dtype = "{dtype}"
samples_per_prompt = {samples}
max_new_tokens = {tokens}
max_running_samples = {sessions}
memory_fraction = {memory}
threads = {threads}

[rollout.sglang]
{options}

[algorithm]
name = "grpo"
drop_zero_variance = false

[trainer]
dtype = "{dtype}"
groups_per_step = {groups}
micro_batch_tokens = {micro_batch}
threads = {threads}

[trainer.optimizer]
lr = 1e-12

[trainer.checkpoint]
every = 0

[weights]
transport = "{transport}"
verify = "never"

[eval]
prompts = 0

[telemetry]
sample_ratio = 0
"""


def make_config(folder: Path, options: argparse.Namespace) -> str:
    """Return the run's TOML. `folder` has the model."""
    tokens = options.turns * (options.longest + options.letters + 40)
    return CONFIG.format(
        folder=folder,
        turns=options.turns,
        letters=options.letters,
        tool_seconds=options.tool_seconds,
        longest=options.longest,
        sessions=options.sessions,
        engine="transformers" if options.cpu else "sglang",
        dtype="float32" if options.cpu else "bfloat16",
        samples=options.samples,
        tokens=tokens,
        transport="gloo" if options.cpu else "nccl",
        memory=0 if options.cpu else options.memory_fraction,
        threads=1 if options.cpu else 0,
        options="" if options.cpu else engine_options(options),
        groups=options.groups,
        micro_batch=max(options.micro_batch, tokens + 96),
    )


def engine_options(options: argparse.Namespace) -> str:
    """Return SGLang's options, with a cache of fixed size if engines share a GPU."""
    cache = f"\nmax_total_tokens = {options.cache_tokens}" if options.one_gpu else ""
    return sglang_options(options.sessions) + cache


def change_plan(plan: StackPlan, routing: Path, one_gpu: bool) -> None:
    """Have the agent replica send requests where a file says, and engines and trainer share a GPU if wanted."""
    for spec in plan.services:
        if one_gpu and spec.role in (ROLLOUT, TRAINER):
            module = spec.command.index("-m") + 1
            spec.command[module:module] = ["benchmarks.one_gpu", spec.name]
        if spec.role == AGENT:
            spec.command = [sys.executable, "-m", "benchmarks.conversation_engine_parts"]
            spec.environment[ROUTING] = str(routing)


class Run:
    """The run, as it goes on."""

    def __init__(self, coordinator: CoordinatorClient, config: str) -> None:
        self._coordinator = coordinator
        self._file = Path(coordinator.start_run(config, "talks").folder) / "metrics.jsonl"
        self._said = time.monotonic()

    def until(self, steps: int, least: float, deadline: float) -> list[dict[str, Any]]:
        """Wait for `steps` steps, at least `least` seconds; return all metrics. Raises TimeoutError, SystemExit."""
        begun = time.monotonic()
        while True:
            time.sleep(0.2)
            now, lines = time.monotonic(), read_steps(self._file)
            if len(lines) >= steps and now - begun >= least:
                return lines
            if now > deadline:
                raise TimeoutError(f"{len(lines)} steps, where {steps} should be")
            if now - self._said > 15:
                state = self._coordinator.run()
                print(f"  step {len(lines)} {state.reason or state.waiting_for}", flush=True)
                if state.state in ENDED:
                    raise SystemExit(f"the run has ended: {state.reason}")
                self._said = now


def measure(folder: Path, options: argparse.Namespace, deadline: float) -> dict[str, list[dict[str, Any]]]:
    """Hold the run; return the metrics of the counted steps of each route. `folder` has the model."""
    counted: dict[str, list[dict[str, Any]]] = {route: [] for route in (ONE, ELSEWHERE, STICKY)}
    routing = folder / "routing"
    routing.write_text(STICKY)

    def change(plan: StackPlan) -> None:
        change_plan(plan, routing, options.one_gpu)

    begun = time.monotonic()
    with services(StateFolder(folder / "state"), {ROLLOUT: 2, AGENT: 1}, change) as coordinator:
        run = Run(coordinator, make_config(folder, options))
        lines = run.until(options.warmup, 0.0, begun + START_SECONDS)
        before = len(lines)
        print(f"  measuring after {time.monotonic() - begun:.0f} s", flush=True)
        try:
            for _ in range(options.rounds):
                for route, found in counted.items():
                    routing.with_suffix(".new").write_text(route)
                    routing.with_suffix(".new").replace(routing)
                    lines = run.until(before + SETTLE_STEPS + 1, options.seconds, deadline)
                    found += lines[before + SETTLE_STEPS :]
                    print(f"  {route}: {json.dumps(hits(found))} in {len(found)} steps so far", flush=True)
                    before = len(lines)
        except TimeoutError as error:
            print(f"  no time is left: {error}", flush=True)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / "conversation-engine.jsonl").write_text("".join(map(line, lines)))
    return {route: found for route, found in counted.items() if found}


def line(metrics: dict[str, Any]) -> str:
    """Return a line in JSON."""
    return json.dumps(metrics) + "\n"


def hits(lines: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean share of prefix-cache hits; None if no engine counts them."""
    found = [one["engine_prefix_hit_share"] for one in lines if "engine_prefix_hit_share" in one]
    return statistics.fmean(found) if found else None


def figures(route: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a route."""
    seconds = sum(one["step_seconds"] for one in lines)

    def total(name: str) -> float:
        return float(sum(one[name] for one in lines))

    samples = [one["samples"] * one["turns_mean"] for one in lines]
    return {
        "requests": route,
        "steps": len(lines),
        "prefix hits": hits(lines),
        "tokens/s": total("tokens") / seconds,
        "written tokens/s": sum(one["samples"] * one["model_tokens_mean"] for one in lines) / seconds,
        "turns/s": sum(samples) / seconds,
        "turns": total("turns_mean") / len(lines),
        "observed tokens": total("observation_tokens_mean") / len(lines),
        "group s": total("generate_seconds") / len(lines),
        "outside": total("outside_generation_seconds_mean") / total("generate_seconds"),
        "step s": seconds / len(lines),
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--letters", type=int, default=500, help="tokens of an observation")
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="time that the environment takes for a message")
    parser.add_argument("--mean", type=float, default=64.0, help="mean reply, in tokens")
    parser.add_argument("--longest", type=int, default=384, help="replies are cut there")
    parser.add_argument("--groups", type=int, default=4, help="per step")
    parser.add_argument("--samples", type=int, default=8, help="per group")
    parser.add_argument("--sessions", type=int, default=64, help="conversations at once")
    parser.add_argument("--micro-batch", type=int, default=8192, help="tokens")
    parser.add_argument("--memory-fraction", type=float, default=0.8, help="of an engine's GPU, for weights and cache")
    parser.add_argument("--warmup", type=int, default=3, help="first steps, not measured")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="shortest window of a route in a round")
    parser.add_argument("--limit", type=float, default=190.0, help="seconds for everything")
    parser.add_argument("--keep", type=Path, help="a folder for metrics.jsonl")
    parser.add_argument("--one-gpu", action="store_true", help="engines and trainer share a GPU")
    parser.add_argument("--cache-tokens", type=int, default=300_000, help="an engine's cache with --one-gpu")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, without GPUs")
    return parser.parse_args(words)


def main() -> None:
    """Measure all routes and report them."""
    deadline = time.monotonic()
    options = parse()
    deadline += options.limit - 10
    if (seen := len(visible_gpus())) < 3 and not options.cpu and not options.one_gpu:
        raise SystemExit(f"{seen} GPUs are to be seen here: trainer and engines need one each; --one-gpu shares one")
    with tempfile.TemporaryDirectory(prefix="relaxd-conversations-") as temporary:
        folder = Path(temporary)
        command = [sys.executable, "-m", "benchmarks.long_tail", str(folder / "model"), "--shape", options.shape]
        subprocess.run([*command, "--mean", str(options.mean)], check=True, timeout=120)
        counted = measure(folder, options, deadline)
    rows = [figures(route, lines) for route, lines in counted.items()]
    by_route = {row["requests"]: row["prefix hits"] for row in rows}
    ratio = by_route[STICKY] / by_route[ONE] if by_route.get(STICKY) and by_route.get(ONE) else None
    facts = {key: value for key, value in vars(options).items() if key not in ("keep", "cpu", "limit")}
    name = "conversation_engine" + ("_cpu" if options.cpu else "")
    report(name, rows, settings=facts, sticky_of_one=ratio, met=ratio is not None and ratio >= 0.95)


if __name__ == "__main__":
    main()
