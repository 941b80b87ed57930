"""config.json: what is supported is read right, what isn't is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from relaxd.config import TrainerConfig
from services.trainer.model.architecture import ModelError, ModelFileError, Rope
from services.trainer.model.architectures import FAMILIES, read_architecture
from services.trainer.model.policy_model import check_divisible
from tests.unit.trainer.model.model_configs import LLAMA, MOE, write

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED = {"original_max_position_embeddings": 128}


def test_old_and_new_rope_fields_mean_the_same(tmp_path: Path) -> None:
    new = read_architecture(write(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    old = read_architecture(write(tmp_path, rope_theta=5e5, rope_scaling=None))
    assert new.rope == old.rope == Rope(5e5)
    scaling = {**LLAMA3, **TRAINED}
    new = read_architecture(write(tmp_path, rope_parameters={"rope_theta": 5e5, **scaling}))
    assert read_architecture(write(tmp_path, rope_theta=5e5, rope_scaling=scaling)).rope == new.rope
    linear = read_architecture(write(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))
    assert linear.rope == Rope(10000.0, "linear", {"factor": 2.0})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 12345.0},
        {"rope_type": "linear", "factor": 3.0},
        {**LLAMA3, **TRAINED, "rope_theta": 500000.0},
        {"rope_type": "yarn", "factor": 4.0, **TRAINED, "rope_theta": 1e6},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, **TRAINED, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, **TRAINED, "attention_factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0, **TRAINED, "mscale": 0.7, "mscale_all_dim": 0.5},
    ],
)
def test_rotary_embeddings_equal_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    ours = read_architecture(write(tmp_path, rope_parameters=rope)).rope.rotary(16)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**LLAMA, rope_parameters={"rope_theta": 10000.0, **rope}))
    torch.testing.assert_close(ours.frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.scale == pytest.approx(theirs.attention_scaling)


def test_windows_are_those_of_the_layers(tmp_path: Path) -> None:
    def windows(**changes: Any) -> tuple[int | None, tuple[bool, ...]]:
        shape = read_architecture(write(tmp_path, **changes))
        return shape.window, shape.windowed

    assert windows(model_type="mistral") == (4096, (True, True))  # as transformers' default
    assert windows(model_type="mistral", sliding_window=None) == (None, ())
    qwen2 = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert windows(**qwen2) == (None, ())
    assert windows(**qwen2, use_sliding_window=True) == (8, (False, True))
    types = ["sliding_attention", "full_attention"]
    assert windows(**qwen2, use_sliding_window=True, layer_types=types) == (8, (True, False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, r'model_type is "mixtral": supported are llama, .* nearest name is "mistral"'),
        ({"model_type": "gpt2"}, r"docs/models.md says how to add a family"),
        ({"mlp_bias": True}, r"mlp_bias is True: only False is supported"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        ({"hidden_size": "64"}, r"hidden_size is '64': it must be a whole number"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3: it must divide num_attention_heads, which is 4"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config: the weights are quantised"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5: only 1.0"),
        ({"rope_scaling": {"type": "longrope"}}, r'rope_type is "longrope": supported are "default", "linear", '),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r'max_position_embeddings \(512 tokens\) "default" is'),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2}},
            r'"llama3" needs low_freq_factor and high_freq_factor',
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1}}}, r"rope_parameters differ by layer type"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]}, r"\['chunked_attention'\]"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, r"layer_types has 1 of num_hidden_layers = 2"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, r"sliding_window is None: it must be"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2}}, r'rope_type is "yarn": only "default"'),
        ({**MOE, "mlp_only_layers": [1]}, r"only models with experts in every layer"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_architecture(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor_parallel": 3},
            r"tensor_parallel is 3: it must divide the model's 4 query heads; sizes that do: 1, 2$",
        ),
        (
            {"tensor_parallel": 4, "context_parallel": 3},
            r"tensor_parallel is 4: it must divide the model's 2 key-value heads; sizes that do: 1, 2$",
        ),
        (
            {"pipeline_parallel": 4},
            r"pipeline_parallel is 4: it must divide the model's 2 layers; sizes that do: 1, 2$",
        ),
        (
            {"expert_parallel": 4},
            r"expert_parallel is 4: it must divide the model's 6 experts; sizes that do: 1, 2, 3, 6",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_says_which_sizes_would(
    tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    config = TrainerConfig.model_validate({"ranks": 12, **sizes})
    with pytest.raises(ModelError, match=message):
        check_divisible(write(tmp_path, **MOE, head_dim=16), config)


def test_broken_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no config.json: it must be a Hugging Face model folder"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="isn't valid JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8}))
    with pytest.raises(ModelError, match="has no field 'num_attention_heads'"):
        read_architecture(tmp_path)


def test_the_page_lists_every_family() -> None:
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    assert [name for name in FAMILIES if f"| `{name}` |" not in page] == []
