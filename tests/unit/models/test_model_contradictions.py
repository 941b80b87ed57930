"""Model folders whose readers would disagree are refused by whoever reads them: check, fit and trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from relaxd.cli.preparing.config_command import check
from relaxd.config.load_toml import load
from relaxd.models import DataError
from relaxd.models.model_contradictions import weights_contradiction
from relaxd.models.shape import read_shape
from services.trainer.batch.disk_files import errors_of_the_system
from services.trainer.model.architecture import ModelError
from services.trainer.model.architectures import read_architecture
from services.trainer.model.hf_weights import copy_small_files
from tests.kit.models import make_tiny_model


def with_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def refused(folder: Path, *words: str) -> None:
    for error, read in ((DataError, read_shape), (ModelError, read_architecture)):
        with pytest.raises(error) as caught:
            read(folder)
        assert all(word in str(caught.value) for word in ("config.json", *words)), caught.value


def test_two_ways_to_rotate_are_refused(tmp_path: Path) -> None:
    folder, rope = make_tiny_model(tmp_path / "tiny"), {"rope_type": "default", "rope_theta": 1e5}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    refused(with_config(folder, rope_parameters=rope, rope_scaling=yarn), "rope_parameters is", "rope_scaling is")
    read_architecture(with_config(folder, rope_scaling={"rope_type": "default"}))  # says the same
    read_architecture(with_config(folder, rope_scaling=None))


def test_a_head_beside_tied_embeddings_is_refused_unless_it_is_a_copy(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", tied=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    assert weights_contradiction(folder, tied_embeddings=True) == ""
    save_file({**tensors, "lm_head.weight": torch.randn_like(embedding)}, file, metadata={"format": "pt"})
    said = f"{folder / 'config.json'}: tie_word_embeddings is true, but the weights have an lm_head.weight other than"
    assert weights_contradiction(folder, tied_embeddings=True).startswith(said)
    assert weights_contradiction(folder, tied_embeddings=False) == ""

    tied = with_config(folder, tie_word_embeddings=True)
    config = load(
        f'run.steps = 1\nmodel.path = "{tied}"\ndata.source = "addition"\nreward.name = "addition"\n'
        'algorithm.name = "grpo"'
    )
    problems = check(config, call_reward=False)
    assert [one.message for one in problems if one.setting == "model.path"] == [weights_contradiction(tied, True)]


def test_the_exported_folder_has_the_template_of_the_run(tmp_path: Path) -> None:
    original, out = make_tiny_model(tmp_path / "tiny"), tmp_path / "out"
    out.mkdir()
    copy_small_files(original, out, torch.bfloat16, "{% for m in messages %}<{{ m.content }}>{% endfor %}")
    chat = [{"role": "user", "content": "hi"}]
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False) == "<hi>"
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_exported_folder_has_the_models_template_for_tools_unless_the_run_has_its_own(tmp_path: Path) -> None:
    original = make_tiny_model(tmp_path / "tiny")
    (original / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (original / "additional_chat_templates").mkdir()
    (original / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for name, own, expected in (("theirs", None, "tools: hi"), ("own", "<{{ messages[0].content }}>", "<hi>")):
        out = tmp_path / name
        out.mkdir()
        copy_small_files(original, out, torch.bfloat16, own)
        tokenizer = AutoTokenizer.from_pretrained(out)
        chat = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(chat, tools=tools, tokenize=False) == expected


def test_files_of_safetensors_have_the_permissions_of_others(tmp_path: Path) -> None:
    file, other = tmp_path / "a.safetensors", tmp_path / "b"
    with errors_of_the_system(file):
        save_file({"a": torch.zeros(2)}, file)
    other.write_text("")
    assert file.stat().st_mode == other.stat().st_mode
