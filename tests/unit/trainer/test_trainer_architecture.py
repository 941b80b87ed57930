"""config.json: what is supported is read right, what isn't is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.trainer.model.architecture import ModelError, read_architecture

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def test_old_and_new_rope_fields_mean_the_same(tmp_path: Path) -> None:
    new = read_architecture(write(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    old = read_architecture(write(tmp_path, rope_theta=5e5, rope_scaling=None))
    assert new.rope == old.rope == {"rope_theta": 5e5, "rope_type": "default"}
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert read_architecture(write(tmp_path, rope_theta=5e5, rope_scaling=scaling)).rope == LLAMA3_ROPE


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 12345.0}, LLAMA3_ROPE])
def test_rotary_frequencies_equal_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    ours = read_architecture(write(tmp_path, rope_parameters=rope)).inverse_frequencies()
    theirs = LlamaRotaryEmbedding(LlamaConfig(**LLAMA, rope_parameters=rope)).inv_freq
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2': supported are llama, qwen3, qwen2_moe, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type is 'yarn'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(write(tmp_path, **changes))


def test_broken_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json: it must be a Hugging Face model folder"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="isn't valid JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="has no field 'num_attention_heads'"):
        read_architecture(tmp_path)
