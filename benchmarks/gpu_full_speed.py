"""Speed-up by the trainer's kernels: the same micro-batch with and without them, in one run on one GPU.

    python -m benchmarks.gpu_full_speed moe 1.7b 4b

Before: Megatron's SequentialMLP for experts, torch's variable-length attention, full recompute where memory requires
it. Measured as in `benchmarks.gpu_training`: medians of the timed steps, MFU from forward's and backward's seconds.
"""

import argparse
import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_models import count_parameters, make_config, make_learner
from benchmarks.gpu_training import measure
from benchmarks.reporting import report
from benchmarks.sequential_experts import sequential_experts
from tests.kit.megatron_world import leave_layout, shut_down


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    shape: str
    name: str
    tokens: int = 16384
    sequences: int = 8
    attention: str = "auto"
    recompute: str = "none"
    layers: int = 0
    """Layers that recompute; 0: all."""
    offload_gb: float = 0
    """GB of the host's memory for activations."""
    sequential: bool = False
    """Whether the experts are Megatron's."""
    steps: int = 3


CASES = (
    Case("moe", "now"),
    Case("moe", "attention before", attention="varlen"),
    Case(
        "moe", "experts and attention before", attention="varlen", sequential=True
    ),  # last, because Megatron keeps its memory
    Case("1.7b", "attention before", attention="varlen"),
    Case("1.7b", "now"),
    Case("4b", "before", 32768, 1, attention="varlen", recompute="full", steps=1),
    Case("4b", "now, full recompute", 32768, 1, recompute="full", steps=1),
    Case("4b", "now", 32768, 1, recompute="selective", steps=2),
    Case("4b", "full recompute, offload", 32768, 1, recompute="full", offload_gb=16, steps=1),
    Case("4b", "selective, offload", 32768, 1, recompute="selective", offload_gb=60, steps=2),
    Case("4b", "no recompute", recompute="none", steps=1),
    Case("4b", "selective in half the layers", recompute="selective", layers=18, steps=2),
    Case("4b", "selective", recompute="selective", steps=2),
)


def run(case: Case) -> dict[str, Any]:
    """Measure one case."""
    settings: dict[str, object] = {
        "micro_batch_tokens": case.tokens,
        "attention": case.attention,
        "recompute": case.recompute,
        "recompute_layers": case.layers,
        "activation_offload_bytes": int(case.offload_gb * 1e9),
    }
    row: dict[str, Any] = {"model": case.shape, "case": case.name}
    row["batch"] = f"{case.sequences} x {case.tokens // case.sequences}"
    try:
        with sequential_experts() if case.sequential else nullcontext():
            learner = make_learner(case.shape, 1, settings)
        config = make_config(case.shape)
        row["parameters"] = f"{count_parameters(learner) / 1e9:.2f}B"
        options = argparse.Namespace(
            sequences=case.sequences,
            prompt=0,
            steps=case.steps,
            recompute=case.recompute,
            offload_gb=case.offload_gb,
        )
        found = measure(learner, config, "DP1", case.tokens, 1, 0, options)
        names = ("forward_backward_seconds", "mfu", "peak_memory_gb")
        row |= {name: float(f"{found[name]:.4g}") for name in names}
    except torch.OutOfMemoryError:
        row["forward_backward_seconds"] = "out of memory"
    return row


def main() -> None:
    """Measure the cases of the requested shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=sorted({case.shape for case in CASES}))
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if case.shape in options.shapes:
            rows.append(run(case))
            print(rows[-1], flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            leave_layout()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{name: row.get(name, "") for name in columns} for row in rows]
    report(
        f"gpu-full-speed-{'-'.join(options.shapes)}", rows, gpu=torch.cuda.get_device_name(), torch=torch.__version__
    )
    shut_down()


if __name__ == "__main__":
    main()
