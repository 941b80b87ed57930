"""config.json is read as the trainer reads it, and what can't be read is named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from relaxd.models import DataError
from relaxd.models.shape import FAMILIES, SEEING, read_shape
from relaxd.tools.fitting import activations, host_and_disk, speed
from services.trainer.batch import micro_batch_division, step_plan
from services.trainer.learner import logprobs
from services.trainer.model import architectures
from services.trainer.model.architectures import read_architecture
from services.trainer.model.towers import tower_shapes
from services.trainer.transformer import sequence_layout
from tests.integration.trainer.trainer_worlds import KINDS
from tests.unit.tools.fitting.models import write_config

TINY = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def check(folder: Path) -> None:
    ours, theirs = read_shape(folder), read_architecture(folder)
    sizes = ("hidden_size", "ffn_size", "vocab_size", "tied_embeddings")
    assert (ours.hidden, ours.ffn, ours.vocabulary, ours.tied) == tuple(getattr(theirs, name) for name in sizes)
    for name in ("model_type", "layers", "heads", "kv_heads", "head_size", "qk_norm", "qkv_bias", "output_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.output_gate, ours.delta_net) == (theirs.output_gate, theirs.delta_net)
    counts = {one.name: sum(math.prod(shape) for shape in tower_shapes(one).values()) for one in theirs.towers}
    found_towers = {"visual": ours.vision, "audio_tower": ours.audio}
    assert {name: tower.parameters for name, tower in found_towers.items() if tower is not None} == counts
    if ours.vision is not None:
        mergers = [name.partition("merger_list.")[2] for name in tower_shapes(theirs.towers[0])]
        assert ours.vision.deepstack == len({name.partition(".")[0] for name in mergers if name})
    if theirs.experts is None:
        assert ours.experts is None
    else:
        assert ours.experts is not None
        found = ours.experts.count, ours.experts.per_token, ours.experts.ffn, ours.experts.shared_ffn or None
        assert found == (
            theirs.experts.count,
            theirs.experts.per_token,
            theirs.experts.ffn_size,
            theirs.experts.shared_ffn_size,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_as_the_trainer_reads_it(tmp_path: Path, kind: str) -> None:
    model_type, own = KINDS[kind]
    transformers.AutoConfig.for_model(model_type, **TINY, **own).save_pretrained(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_fields_that_are_missing_have_the_trainers_defaults(tmp_path: Path, model_type: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = {**TINY, **experts, "shared_expert_intermediate_size": 80, "model_type": model_type, "rms_norm_eps": 1e-6}
    del config["num_key_value_heads"]
    config |= {"num_attention_heads": 32, "full_attention_interval": 2}
    if model_type.startswith("qwen3_5_moe"):  # whose configuration has no such field
        del config["intermediate_size"]
    if model_type in SEEING:
        config = {"model_type": model_type, "text_config": config, "vision_config": {"out_hidden_size": 64}}
        config["image_token_id"] = 5
    if model_type in ("qwen3_vl_moe", "qwen3_omni_moe"):
        config["text_config"]["head_dim"] = 128
    if model_type == "qwen3_omni_moe":
        audio = {"output_dim": 64}
        config = {"model_type": model_type, "thinker_config": {**config, "audio_config": audio, "audio_token_id": 6}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path)


def test_every_family_of_the_trainer_is_known() -> None:
    assert set(FAMILIES) == set(architectures.FAMILIES)


def test_constants_are_those_of_the_trainer() -> None:
    assert (activations.CHUNK_BYTES, activations.KEPT_SHARE) == (logprobs.CHUNK_BYTES, logprobs.KEPT_SHARE)
    assert host_and_disk.MAX_REPEAT == micro_batch_division.MAX_REPEAT
    assert speed.SCHEDULE == step_plan.SCHEDULE
    assert activations.DELTA_CHUNK == sequence_layout.CHUNK


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"model_type": "qwen33"}, 'model_type is "qwen33": supported are .* The nearest name is "qwen3"'),
        ({"hidden_size": 0}, "hidden_size is 0: it must be a whole number of at least 1"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers is '28': it must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(DataError, match=wrong) as raised:
        read_shape(write_config(tmp_path, "1.7b", **changes), "roles.judge.model")
    assert raised.value.field == "roles.judge.model"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "has no readable config.json"),
        ("{", "Expecting property name"),
        ("[]", "must be a JSON object"),
        ("{}", "no field 'model_type'"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str | None, wrong: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=wrong):
        read_shape(tmp_path)
