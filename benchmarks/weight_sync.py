"""Weight synchronisation on GPUs: one trainer, one or more SGLang models, each on its own GPU.

    python -m benchmarks.weight_sync --shapes 0.2b 1.7b 4b --engines 1
    python -m benchmarks.weight_sync --shapes 4b --engines 3

Compared in one run: NCCL alone (torch's broadcast of one buffer of the same bytes), relaxd's way (the trainer's
WeightBroadcaster to SGLangWeights, all but the services' calls), and SGLang's stock way (init_custom_process_group,
flattened buckets, update_weights_from_distributed's own code, without its HTTP). Seconds are medians of warm repeats,
from the command to all processes until all have answered with their GPUs done.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from benchmarks.gpu_models import SHAPES
from benchmarks.reporting import report
from relaxd.process.ports import free_port
from services.trainer.model.architectures import read_architecture
from services.trainer.model.hf_weights import hf_tensor_specs


def write_model(shape: str, folder: Path) -> None:
    """Write a Qwen3 of this shape with zero weights, in a sparse file that takes no time or space."""
    heads = {"num_key_value_heads": 8 if shape != "0.2b" else 4, "head_dim": 128}
    config = Qwen3Config(
        **SHAPES[shape], **heads, vocab_size=151936, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"]
    )
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    header: dict[str, Any] = {}
    size = 0
    for spec in hf_tensor_specs(read_architecture(folder), torch.bfloat16):
        end = size + 2 * torch.Size(spec.shape).numel()
        header[spec.name] = {"dtype": "BF16", "shape": spec.shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)


class Member:
    """A member process."""

    def __init__(self, kind: str, gpu: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weight_sync_member", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "4"},
        )  # fmt: skip

    def send(self, do: str, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last command."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with {self.process.wait()}")
        return dict(json.loads(line))


class Fleet:
    """A trainer and engines with one model."""

    def __init__(self, shape: str, engines: int, bucket_bytes: int) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
        gpus = visible.split(",")
        self.names = 0
        with tempfile.TemporaryDirectory() as place:
            write_model(shape, Path(place))
            self.trainer = Member("trainer", gpus[0])
            self.engines = [Member("engine", gpu) for gpu in gpus[1 : 1 + engines]]
            if len(self.engines) < engines:
                raise SystemExit(f"{engines} engines and a trainer need {engines + 1} GPUs, there are {len(gpus)}")
            self.trainer.send("load", folder=place, bucket_bytes=bucket_bytes)
            for engine in self.engines:
                engine.send("load", folder=place, port=free_port())
            self.loaded = self.trainer.answer()
            print(f"{shape}: the trainer is up after {self.loaded['seconds']:.1f} s", flush=True)
            for engine in self.engines:
                print(f"{shape}: an engine is up after {engine.answer()['seconds']:.1f} s", flush=True)
        self.bytes = self.loaded["bytes"]

    def run_on_all(self, count: int, do: str, **command: Any) -> tuple[float, list[dict[str, Any]]]:
        """Send a command to the trainer and `count` engines; return the seconds until all answered, and the answers."""
        members = [self.trainer, *self.engines[:count]]
        started = time.monotonic()
        for member in members:
            member.send(do, **command)
        answers = [member.answer() for member in members]
        return time.monotonic() - started, answers

    def join(self, count: int) -> float:
        """Connect a new weight group; return the seconds."""
        self.names += 1
        place = {"port": self.loaded["port"], "name": f"group-{self.names}", "world_size": count + 1}
        started = time.monotonic()
        self.trainer.send("join", rank=0, **place)
        for rank, engine in enumerate(self.engines[:count], start=1):
            engine.send("join", rank=rank, manifest=self.loaded["manifest"], **place)
        for member in (self.trainer, *self.engines[:count]):
            member.answer()
        return time.monotonic() - started

    def plan(self, bucket_bytes: int) -> None:
        """Change the buckets."""
        self.trainer.send("plan", bucket_bytes=bucket_bytes)
        self.loaded |= self.trainer.answer()

    def close(self) -> None:
        """Stop the processes."""
        for member in (self.trainer, *self.engines):
            member.process.kill()
            member.process.wait()


def measure(shape: str, engines: int, bucket_sizes: list[int], repeat: int) -> list[dict[str, Any]]:
    """Return all rows of one model size."""
    fleet = Fleet(shape, engines, bucket_sizes[0])
    rows: list[dict[str, Any]] = []
    try:
        for count in sorted({1, engines}):
            port = free_port()
            for rank, member in enumerate((fleet.trainer, *fleet.engines[:count])):
                member.send("join_stock", port=port, rank=rank, world_size=count + 1)
            for member in (fleet.trainer, *fleet.engines[:count]):
                member.answer()
            fleet.run_on_all(count, "raw", nbytes=fleet.bytes, repeat=2)
            raw = (
                statistics.median(fleet.run_on_all(count, "raw", nbytes=fleet.bytes, repeat=10)[0] for _ in range(3))
                / 10
            )
            fleet.run_on_all(count, "forget")
            for bucket_bytes in bucket_sizes:
                fleet.plan(bucket_bytes)
                joined = fleet.join(count)
                name = f"group-{fleet.names}"
                first, _ = fleet.run_on_all(count, "sync", name=name, checksum=False)
                runs = [fleet.run_on_all(count, "sync", name=name, checksum=False) for _ in range(repeat)]
                warm = statistics.median(seconds for seconds, _ in runs)
                inside = statistics.median(max(a["seconds"] for a in answers) for _, answers in runs)
                verified, answers = fleet.run_on_all(count, "sync", name=name, checksum=True)
                sums = [answer["checksums"] for answer in answers]
                if any(each != sums[0] for each in sums):
                    wrong = sorted(n for n in sums[0] if any(each.get(n) != sums[0][n] for each in sums))
                    raise SystemExit(f"checksums differ: {wrong[:5]} and others, {len(wrong)} of {len(sums[0])}")
                fleet.run_on_all(count, "sync_stock")
                stock = statistics.median(fleet.run_on_all(count, "sync_stock")[0] for _ in range(repeat))
                rows.append(
                    {
                        "model": shape,
                        "GB": fleet.bytes / 1e9,
                        "engines": count,
                        "bucket MB": bucket_bytes >> 20,
                        "raw ms": 1e3 * raw,
                        "raw GB/s": fleet.bytes / raw / 1e9,
                        "sync ms": 1e3 * warm,
                        "members ms": 1e3 * inside,
                        "sync GB/s": fleet.bytes / warm / 1e9,
                        "x raw": warm / raw,
                        "stock ms": 1e3 * stock,
                        "stock x raw": stock / raw,
                        "join s": joined,
                        "first ms": 1e3 * first,
                        "verify ms": 1e3 * verified,
                    }
                )
                print({name: round(v, 2) if isinstance(v, float) else v for name, v in rows[-1].items()}, flush=True)
                fleet.run_on_all(count, "forget")
    finally:
        fleet.close()
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["0.2b", "1.7b", "4b"])
    parser.add_argument("--engines", type=int, default=1, help="measured with one, and with this many")
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[64, 256, 1024], help="bucket sizes, MiB")
    parser.add_argument("--repeat", type=int, default=7, help="warm repeats")
    arguments = parser.parse_args()
    rows = []
    for shape in arguments.shapes:
        rows += measure(shape, arguments.engines, [size << 20 for size in arguments.bucket_mb], arguments.repeat)
    report(
        f"weight_sync_{arguments.engines}_engines", rows, gpu=torch.cuda.get_device_name(),
        command="python -m benchmarks." + " ".join(["weight_sync", *sys.argv[1:]]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
