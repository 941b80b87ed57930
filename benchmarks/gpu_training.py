"""Training speed on GPUs: the trainer's learner on a model of a given shape with random weights.

    torchrun --nproc-per-node 1 -m benchmarks.gpu_training --shape 1.7b --tokens 8192 16384
    torchrun --nproc-per-node 4 -m benchmarks.gpu_training --shape 1.7b --tokens 16384 --micro-batches 8
    torchrun --nproc-per-node 2 -m benchmarks.gpu_training --layouts PP2 --micro-batches 16 40 --schedule 0 20
    torchrun --nproc-per-node 2 -m benchmarks.gpu_training --layouts PP2 --micro-batches 2 4 8 20 --chunks 1 2 7
    torchrun --nproc-per-node 2 -m benchmarks.gpu_training --layouts DP2 --micro-batches 2 8 --overlap 0 1
    torchrun --nproc-per-node 2 -m benchmarks.gpu_training --layouts DP2 --micro-batches 2 8 --shard 0 1
    torchrun --nproc-per-node 1 -m benchmarks.gpu_training --largest
    torchrun --nproc-per-node 1 -m benchmarks.gpu_training --tokens 8192 --moments float32 bfloat16 float8
    torchrun --nproc-per-node 1 -m benchmarks.gpu_training --profile
    torchrun --nproc-per-node 1 -m benchmarks.gpu_training --shape moe --experts sequential --attention varlen
    torchrun --nproc-per-node 2 -m benchmarks.gpu_training --shape 4b --layouts CP2 --tokens 131072 --sequences 1 \
        --micro-batches 1 --steps 1 --recompute full --offload-gb 16

Every layout of LAYOUTS for this number of GPUs is measured (or those named with --layouts), each on the same
micro-batches, divided among data-parallel ranks. The results are medians over the timed steps: seconds of forward and
backward of all micro-batches, seconds of the optimizer with the gradients' reduction, tokens/s of both together, and
MFU: `gpu_models.flops` relative to the GPUs' dense bf16 peak during forward and backward. All tokens but prompts and
the first of a sequence are trained, so all logits are computed. Recomputation isn't counted in FLOPs.

Of a pipeline the stages' own computing times are measured, too, in the same run. `of_ideal` is `ideal_seconds`, the
time of its schedules if the stages shared that work equally and nothing else took time, relative to the measured
seconds; `of_slowest` is the same with stages that all take as long as the slowest. `--schedule` divides a step into
schedules of at most so many micro-batches, as training does while a step fills; 0: it is one schedule. `--chunks`
divides stages into so many chunks (`trainer.pipeline_chunks`). A stage's computing time is then that of all its chunks.

`--overlap 0 1` measures with and without `trainer.overlap_grad_reduce`, which moves the gradients' reduction from the
optimizer's time into that of forward and backward. `--shard 0 1` measures with and without `trainer.shard_gradients`;
`gradient_gb` is what a rank has of gradients between micro-batches, and `peak_memory_gb` is what it has of everything.
`--moments` are values of `trainer.optimizer.moments`, `--offload-gb` of `trainer.activation_offload_bytes`.
"""

import argparse
import gc
import os
import statistics
import time
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from benchmarks.gpu_memory import largest
from benchmarks.gpu_models import SHAPES, count_parameters, flops, make_batch, make_config, make_learner, peak_flops
from benchmarks.gpu_profile import profile
from benchmarks.reporting import report
from benchmarks.sequential_experts import sequential_experts
from benchmarks.stage_times import divided, ideal_seconds, stage_seconds
from services.trainer.batch.micro_batch import PackedMicroBatch, empty_micro_batch
from services.trainer.batch.step_plan import MicroBatchRound, bubble_share
from services.trainer.learner.learner import Learner
from services.trainer.transformer.kernels import fused_kernels
from tests.kit.megatron_world import leave_layout, shut_down

SIZES = {"TP": "tensor_parallel", "PP": "pipeline_parallel", "CP": "context_parallel"}
LAYOUTS = {
    1: ["DP1"],
    2: ["DP2", "TP2", "CP2", "PP2"],
    4: ["DP4", "TP2xDP2", "CP2xDP2", "PP2xDP2", "PP2xTP2", "TP4"],
}
"""Layouts by number of GPUs; the remaining factor is DP."""


def parse_layout(name: str) -> dict[str, int]:
    """Convert a layout such as TP2xDP2 to the trainer's settings."""
    return {SIZES[part[:2]]: int(part[2:]) for part in name.split("x") if part[:2] in SIZES}


def measure(
    learner: Learner,
    config: PretrainedConfig,
    layout: str,
    tokens: int,
    micro_batches: int,
    schedule: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Time steps of `micro_batches` micro-batches of `tokens` tokens over all ranks, `schedule` in each schedule."""
    world = learner.world
    batches = [
        make_batch(config.vocab_size, tokens, options.sequences, seed, options.prompt)
        for seed in range(micro_batches)
        if seed % world.dp_size == world.dp_rank
    ]
    lengths = divided(len(batches), schedule)
    ends = list(accumulate(lengths))
    trained = micro_batches * int(batches[0].loss_mask.sum())
    torch.cuda.reset_peak_memory_stats()
    passes, updates = [], []
    for _ in range(options.steps + 1):
        _synchronize()
        began = time.perf_counter()
        for begin, end in zip([0, *ends], ends, strict=False):
            learner.accumulate(batches[begin:end], last=end == ends[-1])
        _synchronize()
        passed = time.perf_counter()
        learner.finish(float(trained))
        torch.cuda.synchronize()
        passes.append(passed - began)
        updates.append(time.perf_counter() - passed)
    seconds, update = statistics.median(passes[1:]), statistics.median(updates[1:])
    work = micro_batches * flops(config, count_parameters(learner), batches[0])
    return {
        "layout": layout,
        "overlap": learner._model.ddp_config.overlap_grad_reduce and learner._config.overlap_grad_reduce,
        "shard": learner._model.sharded is not None,
        "gradient_gb": sum(tensor.nbytes for tensor in learner._model.gradient_tensors) / 1e9,
        "recompute": options.recompute,
        "offload_gb": learner._config.activation_offload_bytes / 1e9,
        "moments": learner._config.optimizer.moments,
        "tokens": tokens,
        "sequences": options.sequences,
        "shared_prompt": options.prompt,
        "micro_batches": micro_batches,
        "forward_backward_seconds": seconds,
        "optimizer_seconds": update,
        "tokens_per_second": micro_batches * len(batches[0].tokens) / (seconds + update),
        "mfu": work / seconds / peak_flops() / world.size,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        **(_pipeline(learner, batches[0], lengths, seconds) if world.pp_size > 1 else {}),
    }


def _pipeline(learner: Learner, batch: PackedMicroBatch, lengths: list[int], seconds: float) -> dict[str, Any]:
    """Compare the time of a pipeline's schedules with that of its stages alone."""
    chunks = learner.world.layout.pipeline_chunks
    stages = stage_seconds(partial(learner.accumulate, [batch]))
    if chunks > 1:  # empty micro-batches fill up the schedule: one for each other stage
        empty = stage_seconds(partial(learner.accumulate, [empty_micro_batch(batch.columns)]))
        stages = [one - other * (1 - 1 / len(stages)) for one, other in zip(stages, empty, strict=True)]
    learner.discard()
    ideal, slowest = (ideal_seconds(times, lengths, chunks) for times in (stages, [max(stages)] * len(stages)))
    return {
        "layers": learner.world.layout.pipeline_layers,
        "chunks": chunks,
        "bubble_share": bubble_share([MicroBatchRound((((),) * length,)) for length in lengths], len(stages), chunks),
        "schedules": lengths,
        "stage_seconds": stages,
        "ideal_seconds": ideal,
        "of_ideal": ideal / seconds,
        "of_slowest": slowest / seconds,
    }


def _synchronize() -> None:
    torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier(device_ids=[torch.cuda.current_device()])


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=(*SHAPES, "moe"), default="1.7b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="tokens of one micro-batch")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of one micro-batch")
    parser.add_argument("--prompt", type=int, default=0, help="tokens that the sequences of a micro-batch share")
    parser.add_argument("--micro-batches", type=int, nargs="+", help="of a step, over all ranks; default: GPUs")
    parser.add_argument(
        "--schedule", type=int, nargs="+", default=[0], help="micro-batches of a schedule; 0: the step's"
    )
    parser.add_argument("--layouts", nargs="+", help="such as TP2xDP2; default: all of LAYOUTS for these GPUs")
    parser.add_argument(
        "--overlap", type=int, nargs="+", choices=(0, 1), default=[0], help="whether gradients are reduced meanwhile"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[1], help="chunks of a pipeline's stages")
    parser.add_argument(
        "--shard", type=int, nargs="+", choices=(0, 1), default=[0], help="whether gradients are sharded"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps; one more is for warming up")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--recompute-layers", type=int, default=0, help="layers that recompute; 0: all")
    parser.add_argument(
        "--offload-gb", type=float, nargs="+", default=[0], help="GB of host memory of a rank for activations"
    )
    parser.add_argument(
        "--moments", nargs="+", choices=("float32", "bfloat16", "float8"), default=["float32"], help="of AdamW"
    )
    parser.add_argument("--attention", choices=("auto", "cudnn", "varlen"), default="auto")
    parser.add_argument("--experts", choices=("together", "sequential"), default="together", help="ours or Megatron's")
    parser.add_argument("--cpu-offload", action="store_true", help="keep the optimizer in the host's memory")
    parser.add_argument("--profile", action="store_true", help="say which kernels the time of the largest went to")
    parser.add_argument("--largest", action="store_true", help="find the largest micro-batches that fit instead")
    parser.add_argument(
        "--pipeline-layers", type=int, nargs="+", default=[], help="layers of each stage; default: equal"
    )
    options = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    options.micro_batches = options.micro_batches or [size]
    config = make_config(options.shape)
    settings = {
        "micro_batch_tokens": max(options.tokens),
        "recompute": options.recompute,
        "recompute_layers": options.recompute_layers,
        "attention": options.attention,
        "pipeline_layers": options.pipeline_layers,
    }
    rows: list[dict[str, Any]] = []
    parameters = 0
    for layout, overlap, chunks, shard, offload_gb, moments in product(
        options.layouts or LAYOUTS[size],
        options.overlap,
        options.chunks,
        options.shard,
        options.offload_gb,
        options.moments,
    ):
        if chunks > 1 and ("PP" not in layout or shard):
            continue
        with sequential_experts() if options.experts == "sequential" else nullcontext():
            own = {
                "overlap_grad_reduce": bool(overlap),
                "pipeline_chunks": chunks,
                "shard_gradients": bool(shard),
                "activation_offload_bytes": int(offload_gb * 1e9),
                "optimizer": {"cpu_offload": options.cpu_offload, "moments": moments},
                **parse_layout(layout),
            }
            learner = make_learner(options.shape, size, {**settings, **own})
        parameters = count_parameters(learner)
        if options.largest:
            for chunked in (False, True):
                found = largest(learner, config.vocab_size, chunked=chunked)
                rows.append({"logits": "in chunks" if chunked else "whole", "recompute": options.recompute, **found})
                if rank == 0:
                    print(rows[-1], flush=True)
        else:
            for tokens, count, schedule in product(options.tokens, options.micro_batches, options.schedule):
                rows.append(measure(learner, config, layout, tokens, count, schedule, options))
                if rank == 0:
                    print(rows[-1], flush=True)
            if options.profile:
                batch = make_batch(config.vocab_size, max(options.tokens), options.sequences, 0, options.prompt)
                learner.accumulate([batch])
                table = profile(partial(learner.accumulate, [batch]))
                learner.discard()
                if rank == 0:
                    print(table, flush=True)
        del learner
        gc.collect()
        torch.cuda.empty_cache()
        leave_layout()
    if rank == 0:
        kind = "memory" if options.largest else "training"
        report(
            f"gpu-{kind}-{options.shape}-{size}" + ("-recompute" if options.recompute == "full" else ""),
            rows,
            gpu=torch.cuda.get_device_name(),
            gpus=size,
            parameters=f"{parameters / 1e9:.2f}B",
            torch=torch.__version__,
            fused_kernels=fused_kernels(),
        )
    shut_down()


if __name__ == "__main__":
    main()
