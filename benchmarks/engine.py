"""Tokens per second of SGLang in relaxd, compared with the bare sglang.Engine under the same settings.

    python -m benchmarks.engine --shape 4b

Three interfaces to the same model (random weights), with the same prompts, lengths and number of requests in flight:
bare: sglang.Engine, asked with async_generate. relaxd: ChildEngine of the rollout service, as the stage calls it: whole
answers. grpc: the Generate call of a rollout service, token by token, from one client in its own process: the naive
case. Each request is one prompt and one answer of a forced length, with log-probabilities. Both engines stay on the
same GPU, and rounds take turns, so that they run under the same conditions. With --spread answers end one by one, as
real ones do; without, all that are in flight end in the same step, which shows the time until the next ones begin.

With --report-every 1024 also relaxd, reporting: ChildEngine as the stage calls it with rollout.partial.enabled, so that
an answer comes in parts of so many tokens. A run asks for parts of an eighth of rollout.partial.save_tokens: 128.
"""

import argparse
import asyncio
import importlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from benchmarks.reporting import report
from tests.kit.engines import receive_request
from tests.kit.models import byte_tokenizer

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": 4},
    "0.2b": {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "heads": 16},
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "heads": 16,
    },
    "4b": {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "heads": 32},
}
"""Shapes of Qwen3 models; 0.6b and 4b are those of Qwen3-0.6B and Qwen3-4B."""
PROMPT_TOKENS = 32
REPORTING = "relaxd, reporting"
ADDRESS_FILE = "relaxd-address"
"""File in the model's folder with the address of relaxd's rollout service."""

Ask = Callable[[list[int], int], Awaitable[int]]
"""Sends a prompt, waits for an answer of the given length, and returns its number of tokens."""


def write_model(folder: Path, shape: str) -> None:
    """Write a model's configuration and a tokenizer; SGLang generates random weights."""
    values = dict(SHAPES[shape])
    heads = values.pop("heads")
    small = shape == "tiny"
    config = Qwen3Config(
        **values,
        num_attention_heads=heads,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 128,
        max_position_embeddings=8192,
        tie_word_embeddings=shape != "0.2b",
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def default_options(concurrent: int) -> dict[str, Any]:
    """Return SGLang's options for this machine: its defaults, unless their kernels aren't installed."""
    options: dict[str, Any] = {"load_format": "dummy"}
    if not torch.cuda.is_available():
        options |= {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
        return options | {"max_total_tokens": 1 << 17, "chunked_prefill_size": -1}
    options |= {"cuda_graph_max_bs_decode": concurrent, "cuda_graph_backend_prefill": "disabled"}
    kernels = importlib.util.find_spec("sgl_kernel")
    places = (kernels.submodule_search_locations or []) if kernels else []
    if not any(list(Path(place).glob("flash_ops*")) for place in places):
        options |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
    return options


async def serve_rounds(asks: dict[str, Ask], arguments: argparse.Namespace, ready: float) -> None:
    """Warm up, print the seconds to ready, and then the tokens per second of a round for each line of stdin.

    The line names the way to ask.
    """
    numbers = random.Random(0)
    vocabulary = SHAPES[arguments.shape]["vocab_size"]
    free = asyncio.Semaphore(arguments.concurrent)

    async def one(ask: Ask, new: int) -> int:
        prompt = [numbers.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)]
        async with free:
            return await ask(prompt, new)

    def lengths() -> list[int]:
        """Return the answers' lengths, the same in each round and way."""
        drawn = random.Random(1)
        most, spread = arguments.new_tokens, arguments.spread
        return [round(most * drawn.uniform(1 - spread, 1 + spread)) for _ in range(arguments.requests)]

    for ask in asks.values():
        await asyncio.gather(*(one(ask, min(32, arguments.new_tokens)) for _ in range(arguments.concurrent)))
    print(ready, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        ask = asks[line.strip()]
        started = time.perf_counter()
        counts = await asyncio.gather(*(one(ask, new) for new in lengths()))
        print(sum(counts) / (time.perf_counter() - started), flush=True)
        assert counts == lengths(), "an answer has another length than it was forced to have"


async def serve_bare(arguments: argparse.Namespace) -> None:
    import sglang

    started = time.perf_counter()
    engine = sglang.Engine(
        model_path=arguments.model,
        dtype="bfloat16",
        tp_size=arguments.tensor_parallel,
        max_running_requests=arguments.concurrent,
        skip_tokenizer_init=True,
        grammar_backend="none",
        mem_fraction_static=arguments.memory_fraction,
        **json.loads(arguments.options),
    )
    ready = time.perf_counter() - started

    async def ask(prompt: list[int], new: int) -> int:
        params = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
        answer = await engine.async_generate(input_ids=prompt, sampling_params=params, return_logprob=True)
        assert len(answer["meta_info"]["output_token_logprobs"]) == new
        return len(answer["output_ids"])

    await serve_rounds({"bare": ask}, arguments, ready)
    engine.shutdown()


class _Service:
    """The part of a rollout service that Generate needs."""

    def __init__(self, engine: Any) -> None:
        from services.rollout.service.group_generator import Occupancy

        self.engine = engine
        self.occupancy = Occupancy()
        self.max_queued_samples = 1 << 30


async def serve_relaxd(arguments: argparse.Namespace) -> None:
    from relaxd.config import RolloutConfig
    from relaxd.engines import ENGINES
    from relaxd.replica.replica_service import SyncIds
    from relaxd.rpc.server import start_server
    from relaxd.v1 import rollout_pb2, rollout_pb2_grpc
    from services.rollout.engines.request_types import Sampling, Version
    from services.rollout.service.child_engine import ChildEngine
    from services.rollout.service.server import RolloutServicer

    ENGINES["sglang"] = replace(ENGINES["sglang"], process="benchmarks.engine_process")
    config = RolloutConfig(
        engine="sglang",
        dtype="bfloat16",
        max_running_samples=arguments.concurrent,
        tensor_parallel=arguments.tensor_parallel,
        memory_fraction=arguments.memory_fraction,
        sglang=json.loads(arguments.options),
    )
    started = time.perf_counter()
    engine = await ChildEngine.start(
        Path(arguments.model),
        config,
        environment={},
        name="benchmark",
        log_level="warning",
        on_exit=lambda ended: print("the engine ended", ended, file=sys.stderr),
        on_tokens=lambda count, per_second: None,
    )
    ready = time.perf_counter() - started
    await engine.pause("in_place", 60, 60)
    await engine.join(rollout_pb2.JoinWeightGroupRequest(group={"name": "none", "timeout_seconds": 10}))
    await engine.receive(receive_request("none", Version(1, 0), 10))
    await engine.resume(Version(1, 0))

    async def ask(prompt: list[int], new: int, report_every: int = 0) -> int:
        count = parts = 0
        sampling, streamed = Sampling(new, ignore_eos=True), bool(report_every)
        async for output in engine.generate(
            tuple(prompt), 1, sampling, stream=streamed, report_every=report_every or 1
        ):
            assert len(output.logprobs) == len(output.tokens)
            count += len(output.tokens)
            parts += 1
        assert not report_every or parts > 1 or new < 2 * report_every, f"{count} tokens came in one part"
        return count

    asks: dict[str, Ask] = {"relaxd": ask}
    if arguments.report_every:
        asks[REPORTING] = partial(ask, report_every=arguments.report_every)

    servicer = RolloutServicer(_Service(engine), SyncIds())  # type: ignore[arg-type]
    registration = (rollout_pb2_grpc.add_RolloutServicer_to_server, servicer, "relaxd.v1.Rollout")
    server = await start_server([registration], serving=True)
    Path(arguments.model, ADDRESS_FILE).write_text(f"127.0.0.1:{server.port}")
    await serve_rounds(asks, arguments, ready)
    await server.stop()
    await engine.stop()


async def serve_client(arguments: argparse.Namespace) -> None:
    from relaxd.rpc.client import channel
    from relaxd.v1 import rollout_pb2, rollout_pb2_grpc

    async with channel(Path(arguments.model, ADDRESS_FILE).read_text()) as connection:
        stub = rollout_pb2_grpc.RolloutStub(connection)

        async def ask(prompt: list[int], new: int) -> int:
            sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
            request = rollout_pb2.GenerateRequest(prompt_tokens=prompt, n=1, sampling=sampling)
            parts: AsyncIterator[Any] = stub.Generate(request, timeout=300)
            return sum([len(part.tokens) async for part in parts])

        await serve_rounds({"grpc": ask}, arguments, 0.0)


class Part:
    """A process that runs one round at a time."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        values = {**vars(arguments), "part": name}
        del values["whole_only"]
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in values.items() if value != ""]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.ready = 0.0

    def wait_ready(self) -> None:
        self.ready = self._number()

    def run_round(self, way: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{way}\n")
        return self._number()

    def end(self) -> None:
        self.process.communicate(timeout=60)

    def _number(self) -> float:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                return float(line)
        raise RuntimeError(f"the benchmark's process ended with {self.process.wait()}")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="0.5: answers of 0.5 to 1.5 x new-tokens; 0: all end at once",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole-only", action="store_true", help="without the gRPC client, which is slow")
    parser.add_argument(
        "--report-every", type=int, default=0, help="also with reports of every so many tokens, as partial rollout has"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--memory-fraction", type=float, default=0.35, help="of the GPU's memory, for each engine")
    parser.add_argument("--options", default="", help="SGLang's options as JSON, instead of what fits this machine")
    parser.add_argument("--part", choices=("all", "bare", "relaxd", "grpc"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part != "all":
        if arguments.part == "bare":
            importlib.import_module("sglang.srt.entrypoints.engine")  # it selects its event loop
        asyncio.run({"bare": serve_bare, "relaxd": serve_relaxd, "grpc": serve_client}[arguments.part](arguments))
        return
    arguments.options = arguments.options or json.dumps(default_options(arguments.concurrent))
    with tempfile.TemporaryDirectory(prefix="relaxd-benchmark-") as folder:
        write_model(Path(folder), arguments.shape)
        arguments.model = folder
        parts = {name: Part(name, arguments) for name in ("bare", "relaxd")}
        for part in parts.values():
            part.wait_ready()
        if not arguments.whole_only:
            parts["grpc"] = Part("grpc", arguments)
            parts["grpc"].wait_ready()
        ways = dict(parts)
        if arguments.report_every:
            ways[REPORTING] = parts["relaxd"]
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, part in ways.items():
                speeds[way].append(part.run_round(way))
                print(f"{way}: {speeds[way][-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
        for part in reversed(parts.values()):
            part.end()
    bare = statistics.median(speeds["bare"])
    rows = [
        {
            "way": way,
            "tokens/s": statistics.median(speeds[way]),
            "x bare": statistics.median(speeds[way]) / bare,
            "rounds": " ".join(f"{speed:,.0f}" for speed in speeds[way]),
            "seconds to ready": part.ready,
        }
        for way, part in ways.items()
    ]
    report(
        "engine",
        rows,
        shape=arguments.shape,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        load=f"{arguments.concurrent} in flight, {arguments.requests} requests of {PROMPT_TOKENS} prompt tokens and "
        f"{arguments.new_tokens} new ones, bfloat16, temperature 1, log-probs",
        options=arguments.options,
        report_every=arguments.report_every,
        goal="relaxd >= 0.95 x bare at shape 4b",
    )


if __name__ == "__main__":
    main()
