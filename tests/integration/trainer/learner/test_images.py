"""Qwen3-VL with images and video in packed rows, against transformers' own pass of each sample."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from relaxd.data.towers import TowerOutputs
from relaxd.data.vision import read_vision
from services.trainer.batch.micro_batch import PackedMicroBatch, pack
from services.trainer.batch.sequence_media import DecodedItem
from services.trainer.learner.learner import Learner
from services.trainer.model.architecture import ModelError
from services.trainer.model.architectures import read_architecture
from services.trainer.model.hf_weights import load_hf
from services.trainer.model.policy_model import PolicyModel, check_divisible
from services.trainer.model.towers import KEPT_BYTES
from tests.integration.trainer.learner.image_worlds import Job, make_samples, run_job
from tests.integration.trainer.learner.media_layouts import ALL, LAYOUTS, check_layouts
from tests.integration.trainer.trainer_worlds import CP2, TP2, make_learner, run_world, trainer_config
from tests.integration.trainer.trainer_worlds import Job as LearnerJob
from tests.kit.megatron_world import leave_layout
from tests.kit.vision import (
    EXPERTS,
    STACKED,
    TEXT,
    TOWER,
    Item,
    make_vision_model,
    seen_by_transformers,
    with_published_experts,
)

MIXTURE: dict[str, Any] = {"tied": False, "model_type": "qwen3_vl_moe", **EXPERTS}
"""Fields of a Qwen3-VL-MoE."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("models")

    def make(tied: bool = True, **own: Any) -> Path:
        folder = root / f"{tied}-{own}"
        return folder if folder.exists() else make_vision_model(folder, tied=tied, **own)

    return make


def reference(folder: Path) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probs of the trained tokens, and gradients of PPO's objective where the ratio is 1, by transformers.

    Its own positions, patches and masks, except that an answer's image token is text, as it isn't for transformers.
    """
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model, found, loss = whole.model, [], torch.zeros(())
    kinds = (
        (1, whole.config.image_token_id, model.get_image_features, "pixel_values", "image_grid_thw"),
        (2, whole.config.video_token_id, model.get_video_features, "pixel_values_videos", "video_grid_thw"),
    )
    for sample in make_samples(read_vision(folder)):
        ids = torch.from_numpy(sample.tokens)[None]
        embeddings, more = model.get_input_embeddings()(ids), {}
        position = torch.arange(ids.shape[1]).expand(3, 1, -1)
        if sample.media is not None:
            seen = seen_by_transformers([_item(image) for image in sample.media.items])
            modality, deep = torch.zeros_like(ids), [torch.zeros_like(embeddings)] * 3
            for kind, token, features, patches, grids in kinds:
                if patches not in seen:
                    continue
                own = features(seen[patches], seen[grids], return_dict=True)
                is_own = (ids == token) & (torch.arange(ids.shape[1]) < sample.prompt_length)
                modality[is_own] = kind
                embeddings = embeddings.masked_scatter(is_own[..., None], torch.cat(list(own.pooler_output)))
                deep = [
                    before.masked_scatter(is_own[..., None], torch.cat(list(rows)))
                    for before, rows in zip(deep, own.deepstack_features, strict=True)
                ]
            deep = [rows[modality != 0] for rows in deep]
            more = {"visual_pos_masks": modality != 0, "deepstack_visual_embeds": deep}
            grids = {name: seen[name] for name in ("image_grid_thw", "video_grid_thw") if name in seen}
            position, _ = model.get_rope_index(ids, mm_token_type_ids=modality, **grids)
        hidden = model.language_model(inputs_embeds=embeddings, position_ids=position, **more).last_hidden_state
        logprobs = whole.lm_head(hidden)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        logprobs = logprobs[torch.from_numpy(sample.loss_mask)[1:] == 1]
        advantages = torch.from_numpy(sample.columns["advantages"][sample.loss_mask == 1])
        found.append(logprobs.detach().numpy())
        loss = loss - (logprobs * advantages).sum()
    loss.backward()
    return np.concatenate(found), {
        name: parameter.grad.transpose(1, 2) if name.endswith(STACKED) else parameter.grad
        for name, parameter in whole.named_parameters()
    }


def _item(image: DecodedItem) -> Item:
    """Return an item as the data had it, but in its normal size."""
    height = image.values.shape[1] * image.grid[1] // image.grid[2]
    frames = [PIL.Image.fromarray(one) for one in np.split(image.values, len(image.values) // height)]
    return frames if len(frames) > 1 else frames[0]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({"tied": True}, ALL),
        ({"tied": False}, ALL),
        (MIXTURE, ALL),
        ({"tied": True}, {**ALL, "recompute": "full"}),
        ({"tied": False}, {**ALL, "recompute": "full"}),
    ],
    ids=["tied", "untied", "mixture", "tied recomputed", "untied recomputed"],
)
def test_log_probs_and_gradients_equal_those_of_transformers(
    models: Callable[..., Path], alone: None, model: dict[str, Any], settings: dict[str, Any]
) -> None:
    folder = models(**model)
    logprobs, gradients = reference(folder)
    found = run_job(Job(folder, settings))
    assert found["images"] == [4, 6]
    np.testing.assert_allclose(found["logprobs"], logprobs, atol=1e-5)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in found["gradients"].items():
        difference = np.linalg.norm(gradient - gradients[name].numpy())
        assert difference <= 1e-4 * np.linalg.norm(gradients[name].numpy()), name


@pytest.mark.parametrize("control", ["plain_positions", "swapped"])
def test_controls_give_other_log_probs(models: Callable[..., Path], alone: None, control: str) -> None:
    found = run_job(Job(models(), **{control: True}))
    logprobs, _ = reference(models())
    assert np.abs(found["logprobs"] - logprobs).max() > 0.01


def test_the_tower_is_frozen_by_default_and_written_as_it_was(
    models: Callable[..., Path], alone: None, tmp_path: Path
) -> None:
    folder = models()
    found = run_job(Job(folder, steps=1, save=tmp_path / "saved"))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys() == found["tensors"].keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("model.visual.")}
    assert not {name for name in found["trained"] if name.startswith("towers.")}
    AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")


def test_a_frozen_tower_sees_an_image_once_until_its_weights_change(models: Callable[..., Path], alone: None) -> None:
    """Bit for bit, although the second pass has other micro-batches than the first one."""
    samples = make_samples(read_vision(models()))
    learner = make_learner(LearnerJob(models(), {}, {"old_logprobs": "current"}))
    module = learner._policy
    assert isinstance(module, PolicyModel)
    outputs = module.tower_outputs

    def log_probs(rows: Sequence[PackedMicroBatch]) -> list[np.ndarray]:
        return [found[row.loss_mask == 1] for found, row in zip(learner.log_probs(rows), rows, strict=True)]

    first = log_probs([pack(samples[:5]), pack(samples[5:])])
    assert (outputs.asked, outputs.runs) == (10, 7)  # four images and six in the rows, and three of them in both
    alone_in_row = [pack([sample]) for sample in samples]
    again = log_probs(alone_in_row)
    assert outputs.runs == 7
    learner.accumulate(alone_in_row)
    assert outputs.runs == 7

    module.tower_outputs = none_kept = TowerOutputs(0, on_host=True)
    for ours, theirs in zip(log_probs(alone_in_row), again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(log_probs([pack(samples[:5]), pack(samples[5:])])[0], first[0])
    assert none_kept.runs == none_kept.asked

    module.tower_outputs = outputs
    load_hf(module, make_vision_model(models().parent / "other", seed=2), learner._forward.architecture, learner.world)
    changed = log_probs(alone_in_row)
    assert outputs.runs == 14
    module.tower_outputs = TowerOutputs(KEPT_BYTES, on_host=True)
    np.testing.assert_array_equal(np.concatenate(changed), np.concatenate(log_probs(alone_in_row)))
    leave_layout()


def test_a_frozen_tower_sees_an_image_once_in_all_steps(models: Callable[..., Path], alone: None) -> None:
    """Although updates and sleep write into the parameters that are trained."""
    learner = make_learner(LearnerJob(models(), {}, {"old_logprobs": "current"}))
    samples = make_samples(read_vision(models()))
    module = learner._policy
    assert isinstance(module, PolicyModel)
    for step in range(3):
        learner.accumulate([pack(samples[step:])])
        learner.finish(20.0)
        assert module.tower_outputs.runs == 7  # different items
        learner.offload()
        learner.onload()
    assert module.tower_outputs.asked == 20  # the third step has not the first one
    leave_layout()


def test_a_checkpoint_has_the_tower(models: Callable[..., Path], alone: None, tmp_path: Path) -> None:
    """Trained in part: what is trained has main weights and moments, the rest weights."""
    job = LearnerJob(models(), {"train_only": ["projection", "language"]}, {"old_logprobs": "current"})
    rows = [pack(make_samples(read_vision(models())))]

    def step(learner: Learner) -> tuple[float, float, int]:
        learner.accumulate(rows)
        stats = learner.finish(20.0)
        return stats.loss, stats.grad_norm, learner.checksum()

    learner = make_learner(job)
    step(learner)
    (tmp_path / "checkpoint").mkdir()
    snapshot = learner.snapshot(tmp_path / "checkpoint")
    snapshot.write()
    learner.offload()
    learner.onload()
    expected = step(learner)
    leave_layout()
    learner = make_learner(job)
    learner.restore(tmp_path / "checkpoint", 1, same_layout=True)
    assert step(learner) == expected
    leave_layout()


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"train_only": ["projection"]}, {"visual.merger", "visual.deepstack_merger_list"}),
        ({"freeze": ["language", "projection"]}, {"visual.patch_embed", "visual.pos_embed", "visual.blocks"}),
        ({"train_only": [r"layers\.3\.mlp"], "recompute": "full"}, {"decoder.layers"}),
    ],
    ids=["projection", "vision", "pattern"],
)
def test_parts_are_trained_alone_with_the_gradients_that_they_have_together(
    models: Callable[..., Path], alone: None, settings: dict[str, Any], trained: set[str]
) -> None:
    found = run_job(Job(models(), settings))
    assert {".".join(name.removeprefix("towers.").split(".")[:2]) for name in found["trained"]} == trained
    _, gradients = reference(models())
    for name, gradient in found["gradients"].items():
        if np.any(gradient):
            np.testing.assert_allclose(gradient, gradients[name], rtol=1e-3, atol=1e-5, err_msg=name)
    config = trainer_config(**settings)
    assert {name for name, gradient in found["gradients"].items() if np.any(gradient)} <= {
        name for name in gradients if config.trains(name)
    }


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"freeze": ["no_such_name"]}, "trainer.freeze has 'no_such_name', which is found in no name"),
        ({"freeze": ["q_proj"]}, "trainer.freeze trains .*v_proj.weight but not .*q_proj.weight, which are one"),
        ({"freeze": ["language", "model"]}, "trainer.freeze leaves nothing to train in pipeline stage 0"),
    ],
    ids=["unknown", "divided", "nothing"],
)
def test_wrong_patterns_are_refused(
    models: Callable[..., Path], alone: None, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ModelError, match=error):
        run_job(Job(models(), settings))


EXPERT_LAYOUTS = ("TP2", "CP2", "PP2 of 3 and 1", "DP2", "EP2", "TP2 EP2")
"""Layouts of a mixture."""


@pytest.mark.night  # every layout
def test_two_ranks_train_as_one_does(models: Callable[..., Path], alone: None, tmp_path: Path) -> None:
    dense = ("TP2", "CP2", "PP2 of 3 and 1", "DP2", "DP2 overlapped", "DP2 sharded", "TP2 recomputed", "TP2 selective")
    odd = models(num_attention_heads=3, num_key_value_heads=1)  # heads that context parallelism can't divide
    check_layouts({models(): dense, odd: ("CP2",), models(**MIXTURE): EXPERT_LAYOUTS}, tmp_path / "world")


@pytest.mark.night  # two ranks
def test_a_frozen_tower_sees_an_image_once_on_each_rank(models: Callable[..., Path], tmp_path: Path) -> None:
    jobs = [Job(models(), own, steps=3) for own in ({}, TP2, CP2)]
    for ranks in run_world(jobs, 2, tmp_path / "world"):
        for rank in ranks:
            assert rank["tower_runs"] == 7
            assert rank["tower_asked"] > 3 * rank["tower_runs"] / 2


def test_pipelines_that_divide_deepstack_are_refused(models: Callable[..., Path]) -> None:
    sizes = {"ranks": 2, "pipeline_parallel": 2}
    with pytest.raises(ModelError, match=r"trainer.pipeline_parallel is 2: the first 2 layers are together, but"):
        check_divisible(models(), trainer_config(**sizes))
    check_divisible(models(), trainer_config(**sizes, pipeline_layers=[3, 1]))


@pytest.fixture(scope="module")
def published(models: Callable[..., Path]) -> Path:
    """A mixture as it is published, with transposed experts; transformers writes those of its module."""
    folder = models(**MIXTURE).with_name("published")
    shutil.copytree(models(**MIXTURE), folder)
    return with_published_experts(folder)


@pytest.mark.night  # every layout
def test_every_layout_has_the_files_stacked_experts(published: Path, alone: None, tmp_path: Path) -> None:
    jobs = [Job(published, ALL | LAYOUTS[name], steps=0) for name in EXPERT_LAYOUTS]
    expected = load_file(published / "model.safetensors")
    results = run_world(jobs, 2, tmp_path / "world")
    for way, ranks in zip(EXPERT_LAYOUTS, results, strict=True):
        found = {name: tensor for rank in ranks for name, tensor in rank["tensors"].items()}
        assert found.keys() == expected.keys(), way
        for name, tensor in found.items():
            np.testing.assert_array_equal(tensor, expected[name].numpy(), err_msg=f"{way} {name}")


def test_square_tensors_of_experts_are_refused(tmp_path: Path) -> None:
    config = {"text_config": TEXT | EXPERTS | {"moe_intermediate_size": 32, "vocab_size": 64}, "vision_config": TOWER}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", **config}))
    with pytest.raises(ModelError, match=r"moe_intermediate_size is 32 and hidden_size 64: .* square"):
        read_architecture(tmp_path)
