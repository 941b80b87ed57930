"""Milliseconds that Redis serves nobody else while a group with long answers is committed and closed.

`python -m benchmarks.board_commit`: one group of 8 samples of 256k tokens goes through rollout, reward, advantage and a
step. For each of these: the time in scripts, by Redis's own count, and the longest time that another client waited for
the answer to a PING meanwhile. `--routed-experts` adds 48 layers x top 8.

The last row is the commit of a step of 128 small groups of 16 samples, of which 8 (the default of
telemetry.samples_per_step; `--shown`) are shown, with 20k tokens each. `step_bytes` are those of the script's command.
"""

import argparse
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import redis

from benchmarks.board import redis_server
from benchmarks.made_answers import answers
from benchmarks.reporting import report
from relaxd.board import STAGES, Board, Column, NewGroup, Stage
from relaxd.config import BoardConfig

SAMPLES, TOKENS = 8, 256 * 1024
GROUPS = 128
TEXT_BYTES = 4
"""Bytes of a token's text."""


def rollout_columns(experts: bool) -> dict[str, Column]:
    columns = answers(SAMPLES, TOKENS, text="word" * (TOKENS * TEXT_BYTES // 4))
    if experts:
        columns["routed_experts"] = np.zeros((SAMPLES * TOKENS, 48, 8), np.uint8)
    return columns


def step_of_many(groups: int, samples: int) -> dict[str, Any]:
    """Return the plan of a step with one update, a micro-batch for each group, as the trainer writes it."""
    ids = [f"{number:06d}-{number:06d}" for number in range(groups)]
    rounds = [[[number, sample] for sample in range(samples)] for number in range(groups)]
    return {"groups": ids, "mini_batches": [{"rounds": rounds}]}


def measure_step(url: str, shown: int) -> tuple[tuple[float, float, float], int]:
    """Commit a step of 128 groups. Return its milliseconds, as `measure` does, and the bytes of its script."""
    redis.Redis.from_url(url).flushall()
    stages = [Stage("train", ("prompt",), ())]
    board = Board(url, "benchmark", stages, BoardConfig(high_water_bytes=64 << 30), timeout_seconds=30)
    board.create(term=1, groups_per_step=GROUPS, steps=1)
    board.set_gate(term=1, oldest_version=0, open=True)
    plan = step_of_many(GROUPS, 16)
    board.publish(term=1, groups=[NewGroup(group_id, {"prompt": "?"}) for group_id in plan["groups"]])
    text = "word" * (20_000 * TEXT_BYTES // 4)
    samples = [{"group_id": "0-0", "response": text, "reward": 1.0} for _ in range(shown)]
    term, sent = board.new_trainer_term(), Counter[str]()
    packer = board._connection.client.connection_pool.connection_kwargs["command_packer"]
    pack = packer.pack

    def counting(*command: Any) -> Any:
        parts = pack(*command)
        sent[str(command[0])] += sum(memoryview(part).nbytes for part in parts)
        return parts

    packer.pack = counting
    metrics = {f"metric_{number}": 0.123456 for number in range(60)}
    step = partial(board.commit_step, term=term, step=1, plan=plan, metrics=metrics, samples=samples)
    found = measure(url, step)
    assert board.counts().trained == GROUPS
    return found, sent["EVALSHA"]


def ping(url: str, stop: Event, longest: Any) -> None:
    """Ping until told to stop; keep the longest wait, in seconds."""
    client = redis.Redis.from_url(url)
    while not stop.is_set():
        begun = time.perf_counter()
        client.ping()
        longest.value = max(longest.value, time.perf_counter() - begun)


def measure(url: str, work: Callable[[], object]) -> tuple[float, float, float]:
    """Return the milliseconds in scripts, of the longest PING, and of the work."""
    client = redis.Redis.from_url(url)
    context = multiprocessing.get_context("spawn")
    stop, longest = context.Event(), context.Value("d", 0.0)
    pinger = context.Process(target=ping, args=(url, stop, longest), daemon=True)
    pinger.start()
    while not longest.value:
        time.sleep(0.01)
    client.config_resetstat()
    longest.value = 0.0
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    stop.set()
    pinger.join()
    scripts = client.info("commandstats").get("cmdstat_evalsha", {"usec": 0})["usec"]
    return scripts / 1000, 1000 * longest.value, 1000 * seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often; the median counts")
    parser.add_argument("--routed-experts", action="store_true", help="commit them, too")
    parser.add_argument("--shown", type=int, default=8, help="samples of the last row's step that are shown")
    options = parser.parse_args()
    columns = rollout_columns(options.routed_experts)
    stages = [
        Stage(name, STAGES[name].needs, tuple(columns) if name == "rollout" else STAGES[name].writes)
        for name in ("rollout", "reward", "advantage", "train")
    ]
    found: dict[str, list[tuple[float, float, float]]] = {}
    with redis_server(False) as url:
        for _ in range(options.rounds + 1):
            redis.Redis.from_url(url).flushall()
            most = 1 << (30 if options.routed_experts else 28)
            limits = BoardConfig(lease_seconds=300, high_water_bytes=64 << 30, max_group_bytes=most)
            board = Board(url, "benchmark", stages, limits, timeout_seconds=30)
            board.create(term=1, groups_per_step=1, steps=1)
            board.set_gate(term=1, oldest_version=0, open=True)
            board.publish(term=1, groups=[NewGroup("a", {"prompt_tokens": np.zeros(9, np.int32), "prompt": "?"})])
            outputs: dict[str, dict[str, Column]] = {
                "rollout": columns,
                "reward": {"reward": np.ones(SAMPLES), "reward_parts": {}},
                "advantage": {"advantages": np.zeros(SAMPLES * TOKENS, np.float32)},
            }
            for stage in stages[:-1]:
                (delivery,) = board.take(stage.name, "worker", count=1, block_seconds=1)
                if stage.name == "advantage":
                    measured = measure(url, partial(board.load, [delivery], ["tokens", "rollout_logprobs", "text"]))
                    found.setdefault("load 24 MB", []).append(measured)
                items = [(delivery, outputs[stage.name])]
                found.setdefault(f"commit of {stage.name}", []).append(measure(url, partial(board.commit, items)))
            term = board.new_trainer_term()
            step = partial(board.commit_step, term=term, step=1, plan={"groups": ["a"]}, metrics={})
            found.setdefault("commit of the step", []).append(measure(url, step))
            found.setdefault("sweep", []).append(measure(url, partial(board.sweep, term=1)))
            measured_step, bytes_sent = measure_step(url, options.shown)
            found.setdefault(f"commit of 128 groups, {options.shown} samples shown", []).append(measured_step)
    rows = []
    for what, measured in found.items():
        scripts, longest, seconds = (statistics.median(column) for column in zip(*measured[1:], strict=True))
        rows.append(
            {
                "what": what,
                "scripts, ms": round(scripts, 2),
                "longest wait of others, ms": round(longest, 2),
                "takes, ms": round(seconds, 1),
            }
        )
    report("board_commit", rows, rounds=options.rounds, routed_experts=options.routed_experts, step_bytes=bytes_sent)


if __name__ == "__main__":
    main()
