"""Training speed on GPUs: the trainer's own learner on a model of a given shape with random weights.

    torchrun --nproc-per-node 1 -m benchmarks.gpu_training --shape 1.7b --tokens 16384 --sequences 8

Reported are medians over the timed steps: seconds of forward and backward, of the optimizer, tokens/s, and MFU:
model FLOPs (6 per parameter and token, 12 per layer, head, head size and attended pair of tokens, halved for causality)
over the GPU's dense bf16 peak. Every token but the first of a sequence is trained, so all logits are computed.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu_profile import profile
from benchmarks.reporting import report
from relaxd.config import AlgorithmConfig, TrainerConfig
from services.trainer.learner import Learner
from services.trainer.packing import TrainSample, pack

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense bf16 peak by a word in the GPU's name."""
SHAPES = {
    "0.2b": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def write_model(shape: str, folder: Path) -> Qwen3Config:
    """Write a Qwen3 of this shape with random bf16 weights as a Hugging Face folder."""
    config = Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=8 if shape != "0.2b" else 4,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_theta=1e6,
    )
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return config


def make_samples(vocab: int, tokens: int, sequences: int) -> list[TrainSample]:
    """Random sequences of equal length, all of whose tokens but the first are trained."""
    rng = np.random.default_rng(0)
    length = tokens // sequences
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    ones = np.ones(length, np.float32)
    return [
        TrainSample(rng.integers(0, vocab, length), mask, -12 * ones, ones, ones * mask, mask) for _ in range(sequences)
    ]


def flops(config: Qwen3Config, parameters: int, lengths: Sequence[int]) -> float:
    """Model FLOPs of forward and backward."""
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6 * parameters * sum(lengths) + attention * sum(length**2 for length in lengths) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384], help="tokens of one micro-batch")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="timed steps; one more is for warming up")
    parser.add_argument("--folder", type=Path, help="where the model is, or is written")
    parser.add_argument("--profile", action="store_true", help="say which kernels the time of the largest went to")
    options = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    folder = options.folder or Path(tempfile.gettempdir()) / f"relaxd-bench-{options.shape}"
    if rank == 0 and not (folder / "config.json").is_file():
        write_model(options.shape, folder)
    while not (folder / "config.json").is_file():
        time.sleep(0.5)
    config = Qwen3Config.from_pretrained(folder)
    trainer = TrainerConfig.model_validate(
        {
            "dtype": "bfloat16",
            "ranks": size,
            "tensor_parallel": options.tensor,
            "pipeline_parallel": options.pipeline,
            "micro_batch_tokens": max(options.tokens),
        }
    )
    learner = Learner(folder, trainer, AlgorithmConfig(), steps=1000)
    parameters = sum(int(np.prod(spec.shape)) for spec in learner.hf_tensor_specs())
    name = torch.cuda.get_device_name()
    peak = next((value for word, value in PEAK_FLOPS.items() if word in name), float("nan"))
    rows = []
    for tokens in options.tokens:
        batch = pack(make_samples(config.vocab_size, tokens, options.sequences))
        torch.cuda.reset_peak_memory_stats()
        passes, updates = [], []
        for _ in range(options.steps + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            learner.accumulate([batch])
            torch.cuda.synchronize()
            passed = time.perf_counter()
            learner.finish(float(batch.loss_mask.sum()))
            torch.cuda.synchronize()
            passes.append(passed - began)
            updates.append(time.perf_counter() - passed)
        seconds, update = statistics.median(passes[1:]), statistics.median(updates[1:])
        work = flops(config, parameters, [tokens // options.sequences] * options.sequences)
        replicas = size // (options.tensor * options.pipeline)
        rows.append(
            {
                "layout": f"TP{options.tensor} PP{options.pipeline} DP{replicas}",
                "tokens": tokens,
                "sequences": options.sequences,
                "forward_backward_seconds": seconds,
                "optimizer_seconds": update,
                "tokens_per_second": replicas * tokens / (seconds + update),
                "mfu": work * replicas / seconds / peak / size,
                "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            }
        )
        if options.profile and tokens == max(options.tokens):
            learner.accumulate([batch])
            table = profile(partial(learner.accumulate, [batch]))
            learner.discard()
            if rank == 0:
                print(table, flush=True)
    if rank == 0:
        report(
            f"gpu-training-{options.shape}",
            rows,
            gpu=name,
            parameters=f"{parameters / 1e9:.2f}B",
            torch=torch.__version__,
        )


if __name__ == "__main__":
    main()
