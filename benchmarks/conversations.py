"""Conversations on two cores: the overhead of a turn, idle sessions, and episodes with slow tools by agent replicas.

`python -m benchmarks.conversations [turns] [sessions] [episodes] --cores 2`. A real coordinator, Redis, board, agent
replicas, environment's host, reward and advantage; a scripted engine, whose answers are calls of a tool of about
`--generate-seconds`, and a scripted trainer (benchmarks/conversation_parts.py). Qwen3's chat template, a token a byte.

- turns: conversations of 10 turns, and bare calls of Rollout.Generate with the prompt of the sixth turn, take turns. A
  turn lasts from one request of its conversation to the next. The time that the engine takes to generate is subtracted
  from it and from a bare call; its overhead is what is left of it, less what is left of a bare call. Turns 5 to 7
  count, which have 8 to 12 messages before them. Goal: p50 at most 5 ms at 330 turns/s.
- sessions: memory and processor time of an agent replica and of the environment's host with 8 conversations that wait
  for a tool, and with --sessions. Goals: 2,000 in a process, and 256 for a core.
- episodes: conversations of a call and an answer, with tools of 0, 1 and 5 s, at 1, 2 and 4 agent replicas of
  --per-agent conversations at once. In the ideal, all of them generate or wait for a tool all the time. Goal: 0.95.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.conversation_parts import BARE_TURN, CORES, ENGINE, ORDERS, TIMES, call_tokens
from benchmarks.modes import services
from benchmarks.reporting import report
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.local.supervisor import StackPlan
from relaxd.roles import AGENT, COORDINATOR, ROLLOUT, TRAINER
from tests.kit.models import make_tiny_model

HOST = "host"
"""Name of the environment's host among processes."""
START_SECONDS = 120.0
"""Deadline for what a run needs to begin."""
SAMPLES = 4
"""Conversations of a group."""
TURNS, COUNTED = 10, range(5, 8)
"""Turns of a conversation, and those that count."""
SPREAD = 0.3
"""Standard deviation of the logarithm of answers' lengths."""
CONFIG = """
[run]
steps = 1000000
folder = "{folder}/runs"

[model]
path = "{folder}/model"
chat_template = "{template}"

[data]
source = "addition"
max_prompt_tokens = 4096

[agent]
environment = "benchmarks.conversation_environments:Search"
settings = {{turns = {turns}, letters = 200, seconds = {tool_seconds}}}
max_turns = {turns}
max_sessions = {sessions}
call_seconds = 600

[reward]
name = "environment"
workers = 1

[rollout]
engine = "{engine}"
samples_per_prompt = {samples}
max_new_tokens = 8192
max_running_samples = 4096
threads = 1

[algorithm]
name = "grpo"
drop_zero_variance = false

[trainer]
groups_per_step = {groups}
micro_batch_tokens = 16384
threads = 1

[trainer.checkpoint]
every = 0

[eval]
prompts = 0

[telemetry]
sample_ratio = 0
samples_per_step = 0

[rehearsal]
median_tokens = {tokens}
spread = {spread}
tokens_per_second = 1e9
sample_tokens_per_second = {speed}
train_tokens_per_second = 1e9
update_seconds = 0.0
sync_seconds = 0.0
"""


@dataclass(frozen=True)
class Times:
    """Times that agent replicas recorded, by time.monotonic() of all processes."""

    asked: dict[tuple[str, int], float]
    """Time at which a conversation asked for a turn's message, by session and turn."""
    replies: dict[tuple[str, int], tuple[float, float, int]]
    """Begin, end and tokens of a message."""
    bare: list[tuple[float, float, int]]
    """The same of bare calls."""


class Work:
    """The stack, its orders and its times."""

    def __init__(self, folder: Path, coordinator: CoordinatorClient, options: argparse.Namespace) -> None:
        self.folder, self.coordinator, self.options = folder, coordinator, options
        self.tokens = round(1.3 * len(call_tokens()))
        self.speed = self.tokens / options.generate_seconds
        """Tokens per second of a message."""
        self._runs = 0

    def order(self, agents: int, bare: int = 0) -> None:
        """Set the number of agent replicas that work, and of bare calls at once in place of conversations."""
        give_orders(self.folder, agents, bare)

    def start(self, *, turns: int, sessions: int, agents: int, tool_seconds: float = 0.0) -> str:
        """Start a run, with `sessions` conversations of each of `agents` replicas at once; return its id."""
        self._runs += 1
        (self.folder / "times").write_text("")
        run = f"run-{self._runs}"
        self.coordinator.start_run(
            CONFIG.format(
                folder=self.folder,
                template=Path("tests/kit/chat_templates/qwen3.jinja").resolve(),
                turns=turns,
                tool_seconds=tool_seconds,
                sessions=sessions,
                engine=ENGINE,
                samples=SAMPLES,
                groups=max(1, agents * sessions // SAMPLES),
                tokens=self.tokens,
                spread=SPREAD,
                speed=self.speed,
            ),
            run,
        )
        return run

    def stop(self, run: str) -> None:
        """Cancel a run, and wait until it has ended."""
        self.coordinator.stop_run(run, "measured")
        deadline = time.monotonic() + START_SECONDS
        while self.coordinator.run(run).state not in ENDED:
            if time.monotonic() > deadline:
                raise CliError(f"{run} doesn't end")
            time.sleep(0.1)

    def until(self, run: str, ready: Callable[[Times], bool], what: str) -> None:
        """Wait until the times are so. Raises CliError, which says `what` isn't there."""
        deadline = time.monotonic() + START_SECONDS
        while not ready(self.times()):
            state = self.coordinator.run(run)
            if state.state in ENDED or time.monotonic() > deadline:
                raise CliError(f"{run} has no {what}: {state.reason or state.waiting_for}")
            time.sleep(0.2)

    def until_held(self, run: str, count: int, turns: int) -> None:
        """Wait until most of `count` conversations of `turns` turns are held at once. Raises CliError."""

        def held(times: Times) -> bool:
            begun = {session for session, _ in times.replies}
            return len(begun) - sum(turn == turns for _, turn in times.replies) >= 0.6 * count

        self.until(run, held, f"{count} conversations at once")

    def processes(self) -> dict[str, psutil.Process]:
        """Return the processes whose use is stated: the first agent replica, its environment's host, and others."""
        state = StateFolder(self.folder / "state").read()
        assert state is not None
        pids = {service.name.removesuffix("-1"): service.pid for service in state.services if service.pid}
        found = {name: psutil.Process(pids[name]) for name in (AGENT, ROLLOUT, COORDINATOR, "redis")}
        (host,) = found[AGENT].children()
        return {AGENT: found.pop(AGENT), HOST: host, **found}

    def times(self) -> Times:
        """Read the times so far."""
        times = Times({}, {}, [])
        for line in (self.folder / "times").read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # it is being written
            match json.loads(line):
                case ["asked", session, turn, at]:
                    times.asked[session, turn] = at
                case ["reply", session, turn, begun, ended, tokens]:
                    times.replies[session, turn] = begun, ended, tokens
                case ["bare", begun, ended, tokens]:
                    times.bare.append((begun, ended, tokens))
        return times


def give_orders(folder: Path, agents: int, bare: int = 0) -> None:
    """Write the file with the agent replicas' orders."""
    (folder / "orders.new").write_text(json.dumps({"agents": agents, "bare": bare}))
    (folder / "orders.new").replace(folder / "orders")


def measure_turns(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the overhead of a turn, and the time of a bare call."""
    sessions = round(options.rate * options.generate_seconds * np.exp(SPREAD**2 / 2) / SAMPLES) * SAMPLES
    work.order(1)
    run = work.start(turns=TURNS, sessions=sessions, agents=1)
    work.until_held(run, sessions, TURNS)
    work.until(run, lambda times: any(turn > BARE_TURN for _, turn in times.replies), "long conversations")
    windows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    spent = {bare: dict.fromkeys(work.processes(), 0.0) for bare in windows}
    for _ in range(options.rounds):
        for bare, found in windows.items():
            work.order(1, sessions if bare else 0)
            time.sleep(1.5)  # until requests are spread over time again
            begun, before = time.monotonic(), processor_seconds(work.processes())
            time.sleep(options.seconds)
            found.append((begun, time.monotonic()))
            for name, seconds in processor_seconds(work.processes()).items():
                spent[bare][name] += seconds - before[name]
    times = work.times()
    work.stop(run)

    def inside(begun: float, ended: float, bare: bool) -> bool:
        return any(since <= begun and ended <= until for since, until in windows[bare])

    calls = [one for one in times.bare if inside(*one[:2], True)]
    turns = [
        (begun, times.asked[session, turn + 1], tokens, turn)
        for (session, turn), (begun, _, tokens) in times.replies.items()
        if (session, turn + 1) in times.asked and inside(begun, times.asked[session, turn + 1], False)
    ]
    alone = [ended - begun - tokens / work.speed for begun, ended, tokens in calls]
    whole = [ended - begun - tokens / work.speed for begun, ended, tokens, turn in turns if turn in COUNTED]
    rows = [
        {
            "what": what,
            "a second": len(all_of) / options.rounds / options.seconds,
            "counted": len(counted),
            "p50 ms": float(np.percentile(counted, 50)) * 1e3,
            "p99 ms": float(np.percentile(counted, 99)) * 1e3,
            **{f"{name} ms": seconds / len(all_of) * 1e3 for name, seconds in spent[bare].items()},
        }
        for what, bare, all_of, counted in (("bare Generate", True, calls, alone), ("turn", False, turns, whole))
    ]
    more = {name: rows[1][name] - rows[0][name] for name in rows[0] if name.endswith(" ms")}
    return [*rows, {"what": "overhead", "a second": "", "counted": "", **more}]


def measure_sessions(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return memory and processor time with few idle sessions, with many, and of each."""
    rows = []
    work.order(1)
    for sessions in (2 * SAMPLES, options.sessions):
        run = work.start(turns=2, sessions=sessions, agents=1, tool_seconds=500.0)
        work.until_held(run, sessions, 2)
        time.sleep(3.0)  # until what began with the last one is done
        processes = work.processes()
        begun, before = time.monotonic(), processor_seconds(processes)
        time.sleep(options.seconds)
        seconds, after = time.monotonic() - begun, processor_seconds(processes)
        rows.append(
            {
                "sessions": sessions,
                **{f"{name} MB": processes[name].memory_info().rss / 1e6 for name in (AGENT, HOST)},
                **{f"{name}, cores": (after[name] - before[name]) / seconds for name in processes},
            }
        )
        work.stop(run)
    few, many = rows
    count = many["sessions"] - few["sessions"]
    each = {name: (many[name] - few[name]) / count for name in few if name != "sessions"}
    return [few, many, {"sessions": "each more", **each}]


def processor_seconds(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Return the processor time of processes so far."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def measure_episodes(work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return episodes a second beside the ideal, by the tool's time and the number of agent replicas."""
    rows = []
    for tool in options.tools:
        cycle = 2 * options.generate_seconds + tool
        work.order(options.replicas[0])
        run = work.start(turns=2, sessions=options.per_agent, agents=max(options.replicas), tool_seconds=tool)
        windows = []
        for replicas in options.replicas:
            work.order(replicas)
            work.until_held(run, replicas * options.per_agent, 2)
            time.sleep(1.0)
            begun = time.monotonic()
            time.sleep(max(options.seconds, 1.5 * cycle))
            windows.append((replicas, begun, time.monotonic()))
        times = work.times()
        work.stop(run)
        for replicas, begun, ended in windows:
            rows.append(episodes_row(times, tool, work.speed, replicas * options.per_agent, begun, ended))
            rows[-1] = {"tool s": tool, "agents": replicas} | rows[-1]
    return rows


def episodes_row(times: Times, tool: float, speed: float, sessions: int, begun: float, ended: float) -> dict[str, Any]:
    """Return the figures of a window, in which `sessions` conversations are held at once.

    The ideal time of an episode is that of its tokens and its tool; the ideal has no other time.
    """
    useful, ideal, over = 0.0, 0.0, 0
    for (_, turn), (since, until, tokens) in times.replies.items():
        spans = [(since, since + tokens / speed)] + ([(until, until + tool)] if turn == 1 else [])
        useful += sum(max(0.0, min(end, ended) - max(start, begun)) for start, end in spans)
        ideal += sum(end - start for start, end in spans)
        over += turn == 2
    share = useful / (ended - begun) / sessions
    best = sessions / (ideal / over)
    return {"episodes/s": share * best, "ideal": best, "of the ideal": share}


def change_plan(plan: StackPlan, folder: Path, cores: Sequence[int]) -> None:
    """Start trainer, engine and agents as the benchmark's parts, the last on these cores."""
    for spec in plan.services:
        if spec.role in (TRAINER, ROLLOUT, AGENT):
            spec.command = [sys.executable, "-m", "benchmarks.conversation_parts", spec.role]
        spec.environment |= {"CUDA_VISIBLE_DEVICES": ""}
        if spec.role == AGENT:
            spec.environment |= {ORDERS: str(folder / "orders"), TIMES: str(folder / "times")}
            spec.environment |= {CORES: ",".join(map(str, cores))}


PARTS = {"turns": measure_turns, "sessions": measure_sessions, "episodes": measure_episodes}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--cores", type=int, default=0, help="use only the first so many; 0: all")
    parser.add_argument("--apart", action="store_true", help="only agents and their environments are on these cores")
    parser.add_argument("--generate-seconds", type=float, default=0.8, help="of a message, the median")
    parser.add_argument("--rate", type=float, default=330.0, help="turns a second")
    parser.add_argument("--rounds", type=int, default=3, help="of turns and bare calls")
    parser.add_argument("--sessions", type=int, default=2048, help="idle conversations")
    parser.add_argument("--tools", type=lambda text: list(map(float, text.split(","))), default=[0.0, 1.0, 5.0])
    parser.add_argument("--replicas", type=lambda text: list(map(int, text.split(","))), default=[1, 2, 4])
    parser.add_argument("--per-agent", type=int, default=16, help="conversations of an agent replica at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    options = parser.parse_args(words)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(unknown)}: {', '.join(PARTS)} are known")
    return options


def main() -> None:
    """Measure the parts and report them."""
    options = parse()
    cores = sorted(os.sched_getaffinity(0))
    if options.cores:
        os.sched_setaffinity(0, cores[options.cores :] if options.apart else cores[: options.cores])
    facts = {key: value for key, value in vars(options).items() if key != "parts"}
    with tempfile.TemporaryDirectory(prefix="relaxd-conversations-") as temporary:
        folder = Path(temporary)
        make_tiny_model(folder / "model", architecture="qwen3", max_position_embeddings=32768)
        (folder / "times").touch()
        give_orders(folder, 1)
        agents = max(options.replicas) if "episodes" in options.parts else 1
        begun = time.monotonic()
        with services(
            StateFolder(folder / "state"),
            {ROLLOUT: 1, AGENT: agents},
            lambda plan: change_plan(plan, folder, cores[: options.cores or None]),
        ) as coordinator:
            work = Work(folder, coordinator, options)
            for part in options.parts:
                rows = PARTS[part](work, options)
                print(f"{part}: after {time.monotonic() - begun:.0f} s", flush=True)
                report(f"conversations-{part}", rows, settings=facts)


if __name__ == "__main__":
    main()
