"""Models of known shapes with random weights, and samples to train them on, for benchmarks on GPUs."""

import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig

from relaxd.config import GRPOConfig, TrainerConfig
from relaxd.models.flops import peak_flops as peak_of
from services.trainer.batch.micro_batch import PackedMicroBatch, TrainSequence, pack
from services.trainer.learner import forward
from services.trainer.learner.learner import Learner

SHAPES = {
    "0.2b": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
MIXTURE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
"""Six layers of Qwen3-30B-A3B."""
COMMON = {
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}


def make_config(shape: str) -> PretrainedConfig:
    """Return the configuration of a shape: one of SHAPES, or "moe" or "moe-untied" for MIXTURE."""
    if shape in ("moe", "moe-untied"):
        common = COMMON | {"tie_word_embeddings": shape == "moe"}  # SGLang has no tied embeddings in a mixture
        return Qwen3MoeConfig(**MIXTURE, **common, architectures=["Qwen3MoeForCausalLM"])
    heads = 8 if shape != "0.2b" else 4
    return Qwen3Config(**SHAPES[shape], num_key_value_heads=heads, **COMMON, architectures=["Qwen3ForCausalLM"])


def prepare_model(shape: str, folder: Path | None) -> Path:
    """Return the folder of a Qwen3 of this shape with random bf16 weights, which rank 0 writes if it doesn't exist."""
    folder = folder or Path(tempfile.gettempdir()) / f"relaxd-bench-{shape}"
    done = folder / "complete"
    if os.environ.get("RANK", "0") == "0" and not done.is_file():
        config = make_config(shape)
        with torch.device("cuda"):
            torch.manual_seed(0)
            model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
        done.touch()
    while not done.is_file():
        time.sleep(0.5)
    return folder


def make_learner(shape: str, ranks: int, settings: dict[str, object], keep: Path | None = None) -> Learner:
    """Create the trainer's learner on a bf16 model of a shape, with random weights drawn on the device.

    `keep` is a folder for the model's configuration, which `Learner.save_hf` needs; without it, none is left.
    """
    config = TrainerConfig.model_validate({"dtype": "bfloat16", "ranks": ranks, **settings})
    place = tempfile.TemporaryDirectory() if keep is None else nullcontext(str(keep))
    with place as folder, mock.patch.object(forward, "load_hf", draw):
        make_config(shape).save_pretrained(folder)
        return Learner(Path(folder), config, GRPOConfig(), steps=1000)


@torch.no_grad()
def draw(model: torch.nn.Module, *_: object, **__: object) -> None:
    """Draw random weights, in place of reading a model's."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02)


def make_batch(vocabulary: int, tokens: int, sequences: int, seed: int = 0, prompt: int = 0) -> PackedMicroBatch:
    """Pack the sequences of `make_sequences`."""
    return pack(make_sequences(vocabulary, tokens, sequences, seed, prompt))


def make_sequences(vocabulary: int, tokens: int, sequences: int, seed: int = 0, prompt: int = 0) -> list[TrainSequence]:
    """Make random sequences of equal length, `tokens` in total. All tokens but the first of each sequence are trained.

    With `prompt` > 0 the sequences share a prompt of that length, which is packed once and not trained.
    """
    rng = np.random.default_rng(seed)
    length = (tokens - prompt) // sequences + prompt
    mask = np.ones(length, np.uint8)
    mask[: max(prompt, 1)] = 0
    ones = np.ones(length, np.float32)
    shared = rng.integers(0, vocabulary, prompt)
    return [
        TrainSequence(
            np.concatenate([shared, rng.integers(0, vocabulary, length - prompt)]),
            mask,
            {"rollout_logprobs": -12 * ones, "advantages": ones},
            ones * mask,
            mask,
            prompt_length=prompt,
        )
        for _ in range(sequences)
    ]


def count_parameters(learner: Learner) -> int:
    """Return the number of parameters of the whole model, counting tied ones once."""
    return sum(int(np.prod(spec.shape)) for spec in learner.hf_tensor_specs())


def flops(config: PretrainedConfig, parameters: int, batch: PackedMicroBatch) -> float:
    """Return the model FLOPs of forward and backward of a micro-batch.

    They are 6 x active parameters per token, and 12 x layers x heads x head size per pair of tokens of which one
    attends to the other.
    """
    experts = getattr(config, "num_experts", 0)
    idle = experts - config.num_experts_per_tok if experts else 0
    if idle:
        parameters -= config.num_hidden_layers * idle * 3 * config.hidden_size * config.moe_intermediate_size
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6 * parameters * len(batch.tokens) + attention * float(batch.positions.sum())


def peak_flops() -> float:
    """Return this GPU's dense bf16 peak FLOP/s, NaN if unknown."""
    return peak_of(torch.cuda.get_device_name()) or float("nan")
