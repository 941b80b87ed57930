"""FLOPs against torch's count of a transformers model, and the trainer's speed against a loop over tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from relaxd.models.flops import peak_flops, training_flops
from relaxd.models.shape import read_shape
from services.trainer.batch.groups import TrainGroup
from services.trainer.loop.step_metrics import performance

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = [
    (LlamaForCausalLM, LlamaConfig(**SIZES, attn_implementation="eager")),
    (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, attn_implementation="eager")),
]


@pytest.mark.parametrize(("model", "config"), MODELS, ids=["llama", "qwen3"])
def test_flops_are_those_that_torch_counts(model, config, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    length = 24
    tokens = torch.arange(length)[None]
    policy = model(config)
    with FlopCounterMode(display=False) as counter:
        policy(input_ids=tokens).logits.sum().backward()
    # Eager attention computes all pairs, also those behind a token.
    counted = training_flops(read_shape(tmp_path), length, length, length**2)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_speed_is_that_of_all_tokens_and_pairs(tmp_path: Path) -> None:
    MODELS[0][1].save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    groups, tokens, trained, attended = [], 0, 0, 0.0
    rng = np.random.default_rng(3)
    for number in range(4):
        prompt, lengths = int(rng.integers(1, 9)), rng.integers(3, 30, 3)
        shares = np.array([1, 0, 1], np.uint8)
        mask = rng.integers(0, 2, lengths.sum()).astype(np.uint8)
        columns = {
            "prompt_tokens": np.zeros(prompt, np.int32),
            "lengths": lengths.astype(np.int32),
            "shares_prompt": shares,
            "loss_mask": mask,
        }
        groups.append(TrainGroup(f"g{number}", columns))
        tokens += prompt + int(lengths.sum())
        trained += int(mask.sum())
        attended += sum(place + 0.5 for place in range(prompt))
        for length, shared in zip(lengths, shares, strict=True):
            attended += sum((prompt if shared else 0) + place + 0.5 for place in range(length))
    found = performance(groups, 2, 0.5, 4, shape, "NVIDIA H100 80GB HBM3")
    flops = 2 * training_flops(shape, tokens, trained, attended) / 0.5 / 4
    assert found == {
        "train_tokens_per_second_per_gpu": pytest.approx(2 * tokens / 0.5 / 4),
        "train_tflops_per_gpu": pytest.approx(flops / 1e12),
        "mfu": pytest.approx(flops / 989e12),
    }
    assert performance(groups, 2, 0.5, 4, None, "").keys() == {"train_tokens_per_second_per_gpu"}
    assert "mfu" not in performance(groups, 2, 0.5, 4, shape, "")
    assert performance(groups, 2, 0.0, 4, shape, "") == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H20", None),
        ("NVIDIA H100 PCIe", None),
        ("", None),
    ],
)
def test_only_known_gpus_have_a_peak(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
