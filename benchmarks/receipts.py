"""Price of receipts (weights.verify = "always") for a step, without services.

    python -m benchmarks.receipts --shapes 0.2b
    python -m benchmarks.receipts --shapes 1.7b 4b --device cuda

A synchronisation takes the checksums of all tensors, on the trainer and on the engines at the same time, and their
digest; the trainer compares the receipts of each group of the step. Seconds are medians. The model's tensors are
random, in bfloat16, in buckets of weights.bucket_bytes. A step has 64 groups of 16 samples of 2,000 tokens and takes
15 s.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_models import SHAPES
from benchmarks.reporting import report
from benchmarks.weight_sync import write_model
from relaxd.board import WEIGHT_RECEIPTS
from relaxd.config.operation import WeightsConfig
from relaxd.weights.buckets import TensorSpec, checksums, plan_buckets
from relaxd.weights.receipts import digest_of
from services.trainer.batch.groups import TrainGroup
from services.trainer.loop.training_queue import ReceiptCheck
from services.trainer.model.architectures import read_architecture
from services.trainer.model.hf_weights import hf_tensor_specs

GROUPS, SAMPLES, TOKENS, STEP_SECONDS = 64, 16, 2000, 15.0


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of some calls after a first one."""
    work()
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def measure(shape: str, device: str, repeats: int) -> dict[str, Any]:
    """Measure one model."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        sent = hf_tensor_specs(read_architecture(Path(folder)), torch.bfloat16)
    specs = [TensorSpec(spec.name, torch.bfloat16, tuple(spec.shape)) for spec in sent]
    tensors = {spec.name: torch.randn(spec.shape, device=device, dtype=spec.dtype) for spec in specs}
    buckets = plan_buckets(specs, WeightsConfig().bucket_bytes, source_rank=0)

    def take() -> dict[str, int]:
        return {n: v for one in buckets for n, v in checksums({s.name: tensors[s.name] for s in one.tensors}).items()}

    found = take()
    digest = digest_of(found)
    total = SAMPLES * TOKENS
    columns = {
        "sample_of_sequence": np.arange(SAMPLES, dtype=np.int32),
        "lengths": np.full(SAMPLES, TOKENS, np.int32),
        "loss_mask": np.ones(total, np.uint8),
        "versions": np.repeat(np.arange(2), total // 2),
        WEIGHT_RECEIPTS: [[[version, digest, "rollout-0"] for version in range(2)]] * SAMPLES,
    }
    group, check = TrainGroup("g", columns), ReceiptCheck(lambda: {0: [digest], 1: [digest]}, may_be_unknown=False)
    assert check.problem(group, 0) == ""
    parts = {
        "checksums ms": median_seconds(take, repeats),
        "digest ms": median_seconds(lambda: digest_of(found), repeats),
        "groups of a step ms": GROUPS * median_seconds(lambda: check.problem(group, 0), repeats),
    }
    size = sum(tensor.nbytes for tensor in tensors.values())
    share = {"% of a step of 15 s": 100 * sum(parts.values()) / STEP_SECONDS}
    return {"model": shape, "GB": size / 1e9, "device": device, **{n: 1e3 * s for n, s in parts.items()}, **share}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["0.2b"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    rows = [measure(shape, arguments.device, arguments.repeat) for shape in arguments.shapes]
    for row in rows:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    report(
        f"receipts_{arguments.device}",
        rows,
        gpu=torch.cuda.get_device_name() if arguments.device == "cuda" else "",
        command="python -m benchmarks." + " ".join(["receipts", *sys.argv[1:]]),
    )


if __name__ == "__main__":
    main()
