"""The whole answer of `relaxd fit`, for runs of several kinds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError
from relaxd.models.flops import vision_flops
from relaxd.models.layouts import Layout, possible_layouts, problem, stage_parameters
from relaxd.models.shape import read_shape
from relaxd.tools.fitting.fit import Fit, fit
from relaxd.tools.fitting.host_and_disk import read_models, step_bytes, step_work
from relaxd.tools.fitting.speed import StepWork, predict
from relaxd.tools.fitting.trainer_memory import FitError, Hardware, buckets_in_memory
from tests.unit.tools.fitting.models import write_config

H100, H200 = Hardware(80 << 30, 8), Hardware(141 << 30, 8)


def make(model: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return a run's configuration; `sections` are added to its own."""
    own: dict[str, dict[str, Any]] = {
        "run": {"steps": 100},
        "model": {"path": str(model)},
        "data": {"source": "addition", "max_prompt_tokens": 1024},
        "reward": {"name": "addition"},
        "rollout": {
            "engine": "sglang",
            "dtype": "bfloat16",
            "memory_fraction": 0.8,
            "samples_per_prompt": 16,
            "max_new_tokens": 8192,
        },
        "trainer": {"dtype": "bfloat16", "groups_per_step": 64, "micro_batch_tokens": 16384},
        "weights": {"transport": "nccl"},
    }
    return RunConfig.model_validate(
        {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
    )


def totals(found: Fit) -> dict[tuple[str, str], int]:
    return {(one.role, one.place): one.total for one in found.held}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_config(tmp_path / "small", "1.7b")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_config(tmp_path / "large", "8b")


def test_a_run_that_fits(small: Path) -> None:
    found = fit(make(small), H200)
    assert found.fits
    assert set(totals(found)) == {("trainer", ""), ("rollout", "")}
    assert found.layouts[0].layout == found.layout == Layout(1)  # without recompute, offload or division: the fastest
    assert found.seconds.total == pytest.approx(found.layouts[0].seconds)


def test_gradients_are_sharded_where_a_layout_fits_only_so(large: Path) -> None:
    found = fit(make(large, trainer={"ranks": 4}), H100).layouts
    sharded = [one for one in found if one.layout.shard_gradients]
    assert sharded
    for one in sharded:
        assert one.layout.data * one.layout.context > 1
        whole = replace(one.layout, shard_gradients=False)
        assert whole not in [other.layout for other in found]
    assert not found[0].layout.shard_gradients


def test_a_run_that_does_not_fit_gets_layouts_that_do(large: Path) -> None:
    found = fit(make(large, trainer={"ranks": 4}), H100)
    assert not found.fits
    assert [one.seconds for one in found.layouts] == sorted(one.seconds for one in found.layouts)
    assert all(one.bytes <= H100.room and one.layout.ranks == 4 for one in found.layouts)
    best = found.layouts[0]
    changed = make(large, trainer=_settings(best.layout))
    again = fit(changed, H100)
    assert again.fits
    assert max(one.total for one in again.held if one.role == "trainer") == best.bytes


def _settings(layout: Layout) -> dict[str, Any]:
    """Return the section [trainer] of a layout's settings."""
    names = {name.removeprefix("trainer."): value for name, value in layout.settings.items()}
    return {"optimizer": {"cpu_offload": names.pop("optimizer.cpu_offload")}, **names}


def test_more_ranks_where_none_of_as_many_fits(large: Path) -> None:
    found = fit(make(large, trainer={"micro_batch_tokens": 9216}), Hardware(40 << 30, 8))
    assert {one.layout.ranks for one in found.layouts} == {min(one.layout.ranks for one in found.layouts)}
    assert found.layouts[0].layout.ranks > 1
    assert fit(make(large), Hardware(24 << 30, 1)).layouts == []


def test_stages_of_a_pipeline(large: Path) -> None:
    held = totals(fit(make(large, trainer={"ranks": 4, "pipeline_parallel": 4, "recompute": "selective"}), H100))
    first, second, third = (held["trainer", f"stage {stage}"] for stage in range(3))
    assert first > second > third  # fewer micro-batches are in flight


def test_stages_with_different_numbers_of_layers(small: Path) -> None:
    trainer: dict[str, Any] = {"ranks": 2, "pipeline_parallel": 2, "micro_batch_tokens": 16384}
    equal, uneven = (fit(make(small, trainer=trainer | {"pipeline_layers": own}), H200) for own in ((), (17, 11)))
    before, after = totals(equal), totals(uneven)
    assert after["trainer", "stage 0"] > before["trainer", "stage 0"]
    assert after["trainer", "stage 1"] < before["trainer", "stage 1"]
    assert uneven.layout.name == "PP2 (17+11 layers)"
    work = StepWork(tokens=1e6, attended=1e9, micro_batch_tokens=16384)
    shape = read_shape(small)
    assert predict(shape, uneven.layout, work).bubble < predict(shape, equal.layout, work).bubble


def test_stages_of_several_chunks(small: Path) -> None:
    """They wait less, and hold more: stage 0 begins five passes through half its layers before it goes backward."""
    trainer: dict[str, Any] = {"ranks": 2, "pipeline_parallel": 2, "micro_batch_tokens": 16384}
    whole, chunks = (fit(make(small, trainer=trainer | {"pipeline_chunks": own}), H200) for own in (1, 2))
    assert chunks.layout.name == "PP2 (2 chunks)"
    for stage, passes in enumerate((2.5, 1.5)):
        before, after = (found.held[stage].bytes for found in (whole, chunks))
        assert after["weights"] == before["weights"]
        assert after["activations: MLP"] / before["activations: MLP"] == pytest.approx(passes / (2 - stage))
    work, shape = StepWork(tokens=1e6, attended=1e9, micro_batch_tokens=16384), read_shape(small)
    one, two, seven = (predict(shape, Layout(2, pipeline=2, pipeline_chunks=own), work).bubble for own in (1, 2, 7))
    assert one - seven == pytest.approx((one - two) * (1 - 1 / 7) / (1 - 1 / 2))
    assert one > two > seven


def test_frozen_models_a_critic_and_a_judge(small: Path, large: Path) -> None:
    alone = fit(make(small), H200)
    beside = fit(make(small, algorithm={"name": "grpo", "kl_coef": 0.1}), H200)
    weights = next(one.bytes["weights"] for one in alone.held if one.role == "trainer")
    assert totals(beside)["trainer", ""] - totals(alone)["trainer", ""] == weights
    assert beside.seconds.compute == pytest.approx(alone.seconds.compute * 4 / 3)
    roles = {"reference": {"placement": "service", "tensor_parallel": 2, "model": str(large)}}
    roles["judge"] = {"model": str(large), "engine": "sglang", "dtype": "bfloat16", "memory_fraction": 0.7}
    apart = fit(make(small, algorithm={"name": "grpo", "kl_coef": 0.1}, roles=roles), H200)
    assert totals(apart)["trainer", ""] == totals(alone)["trainer", ""]
    reference = next(one for one in apart.held if one.role == "reference")
    assert reference.bytes["weights"] == pytest.approx(8.19e9, rel=0.01)  # two bytes each, divided by two
    assert {("judge", ""), ("reference", "")} <= set(totals(apart))
    beside = make(small, roles={"judge": {**roles["judge"], "gpu_share": 0.4}})
    shared = {one.role: one for one in fit(beside, H200).held}
    assert (shared["judge"].place, shared["rollout"].place) == ("0.4 of a GPU", "0.6 of a GPU")
    assert shared["judge"].room + shared["rollout"].room == pytest.approx(H200.gpu_bytes, abs=2)
    cache = shared["rollout"].bytes["weights"] + shared["rollout"].bytes["key-value cache"]
    assert cache == pytest.approx(0.8 * 0.6 * H200.gpu_bytes, rel=1e-6)
    # Where SGLang decides, both keep free what an engine keeps that has the GPU alone.
    free = make(small, roles={"judge": {**roles["judge"], "gpu_share": 0.4, "memory_fraction": 0.0}})
    judge = next(one for one in fit(free, H200).held if one.role == "judge")
    static = judge.bytes["weights"] + judge.bytes["key-value cache"]
    assert static == pytest.approx((0.4 - 0.15) * H200.gpu_bytes, rel=1e-6)
    critic = fit(make(small, algorithm={"name": "ppo"}), H200)
    held = next(one.bytes for one in critic.held if one.role == "trainer")
    assert held["critic moments"] == pytest.approx(held["moments"], rel=1e-4)


def test_a_teacher_with_an_engine(small: Path, large: Path) -> None:
    """It holds what an engine holds, with the trainer's element type; its longest sequences are the teacher's."""
    own = {"model": str(large), "engine": "sglang", "tensor_parallel": 2, "memory_fraction": 0.7}
    own |= {"privileged_key": "answer", "max_prompt_tokens": 3000}
    found = fit(make(small, algorithm={"name": "opd"}, roles={"teacher": own}), H200)
    (held,) = (one for one in found.held if one.role == "teacher")
    assert held.bytes["weights"] == pytest.approx(8.19e9, rel=0.01)
    assert held.bytes["weights"] + held.bytes["key-value cache"] == pytest.approx(0.7 * H200.gpu_bytes, rel=1e-6)
    assert found.engines["teacher"].longest == 3000 + 8192
    shared = make(small, algorithm={"name": "opd"}, roles={"teacher": {**own, "gpu_share": 0.5}})
    places = {one.role: one.place for one in fit(shared, H200).held}
    assert (places["teacher"], places["rollout"]) == ("0.5 of a GPU", "0.5 of a GPU")
    with pytest.raises(FitError, match="is 3: it must divide the model's 32 query heads"):
        fit(make(small, algorithm={"name": "opd"}, roles={"teacher": {**own, "tensor_parallel": 3}}), H200)


def test_several_teachers_beside_the_trainer(small: Path, large: Path) -> None:
    """All are held, but one is asked about a group."""
    algorithm = {"name": "opd", "distill_coef": 0.0, "distill_loss_coef": 1.0}
    one = {"model": str(small), "placement": "trainer"}
    two = one | {"models": [{"model": str(large), "sources": ["code"]}]}
    alone, both = (fit(make(small, algorithm=algorithm, roles={"teacher": own}), H200) for own in (one, two))
    more = totals(both)["trainer", ""] - totals(alone)["trainer", ""]
    assert more == pytest.approx(16.4e9, rel=0.01)
    assert both.seconds.compute == alone.seconds.compute


def test_a_reference_service_that_takes_over_weights_needs_room_in_the_runs_folder(small: Path) -> None:
    own = {"placement": "service", "refresh_every": 10}
    disk = fit(make(small, algorithm={"name": "grpo", "kl_coef": 0.1}, roles={"reference": own}), H200).disk
    weights = "2 weights of the reference, and those being written"
    assert disk[weights] == 3 * disk["the trained model"] > 0
    assert weights not in fit(make(small), H200).disk


def test_moments_in_bfloat16_need_half_as_much(small: Path) -> None:
    half: dict[str, Any] = {"optimizer": {"moments": "bfloat16"}}
    whole, policy, both = (
        fit(make(small, algorithm={"name": "ppo"}, trainer=trainer, roles={"critic": critic}), H200)
        for trainer, critic in (({}, {}), (half, {}), (half, half))
    )
    moments = [
        [one.bytes[name] for name in ("moments", "critic moments")]
        for found in (whole, policy, both)
        for one in found.held
        if one.role == "trainer"
    ]
    of_policy, of_critic = moments[0]
    assert moments[1:] == [[of_policy // 2, of_critic], [of_policy // 2, of_critic // 2]]
    saved = [found.host["a checkpoint being written"] for found in (whole, policy, both)]
    assert [saved[0] - one for one in saved[1:]] == [of_policy // 2, of_policy // 2 + of_critic // 2]
    # Moments on the host are float32, so no layout with both is proposed.
    assert any(one.layout.offload for one in whole.layouts)
    assert not any(one.layout.offload for one in policy.layouts)


def test_a_vision_tower_has_gradients_and_state_only_if_it_is_trained(small: Path, tmp_path: Path) -> None:
    """That of Qwen3-VL 2B, on the first stage."""
    text = json.loads((small / "config.json").read_text())
    tower = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
    config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    parameters = 405_000_000
    blind, seeing, trained = (
        [
            one.bytes
            for one in fit(make(folder, trainer={"ranks": 2, "pipeline_parallel": 2, "freeze": freeze}), H200).held
            if one.role == "trainer"
        ]
        for folder, freeze in ((small, ["vision"]), (tmp_path, ["vision", "projection"]), (tmp_path, []))
    )
    assert seeing[0]["weights"] - blind[0]["weights"] == pytest.approx(2 * parameters, rel=0.01)
    assert trained[0]["weights"] == seeing[0]["weights"]
    for name, size in {"gradients": 4, "main weights": 4, "moments": 8}.items():
        assert seeing[0][name] == blind[0][name]
        assert trained[0][name] - seeing[0][name] == pytest.approx(size * parameters, rel=0.01)
    assert blind[1] == seeing[1] == trained[1]


def test_towers_are_in_the_seconds_of_a_step(small: Path, tmp_path: Path) -> None:
    """A frozen one once for a group, a trained one in each pass; of other models each once."""
    text = json.loads((small / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_vl", "text_config": text, "vision_config": {}})
    )
    tower = read_shape(tmp_path).vision
    assert tower is not None
    images: dict[str, Any] = {"media_keys": {"image": "images"}, "max_image_tokens": 256}

    def flops(folder: Path = tmp_path, **sections: Any) -> float:
        config = make(folder, **{"data": images, **sections})
        return step_work(config, read_models(config)).tower_flops

    once = flops()
    assert once == pytest.approx(64 * 4 * vision_flops(tower, 256))  # 64 groups with prompts of 1,024 tokens
    assert flops(data={}) == flops(small, data={}) == 0.0
    assert flops(trainer={"freeze": []}) == 3 * once
    assert flops(trainer={"mini_batches": 2, "epochs": 2}) == once
    assert flops(trainer={"freeze": [], "mini_batches": 2, "epochs": 2}) == (3 * 2 + 1) * once
    assert flops(algorithm={"kl_coef": 0.1}) == 2 * once  # a reference in the trainer's ranks
    whole = flops(data={"media_keys": {"image": "images"}})
    assert whole == pytest.approx(64 * vision_flops(tower, 1024))
    video = {"media_keys": {"video": "clips"}, "max_video_tokens": 512, "max_video_frames": 16}
    assert flops(data=video) == pytest.approx(64 * 16 * vision_flops(tower, 64))


def test_media_are_in_the_steps_of_a_run(small: Path) -> None:
    """As many bytes as the tokens of prompts, and of what an environment says, may stand for."""
    video = {"media_keys": {"video": "clips"}}
    zoom = {"environment": "zoom", "max_turns": 4}
    own = {"turns": 2, "spread": 0.0, "observation_tokens": 100}
    blind, prompts, silent, shown = (
        step_bytes(make(small, rehearsal=own, **sections), 0)
        for sections in ({}, {"data": video}, {"agent": zoom}, {"agent": {**zoom, "media": ["image"]}})
    )
    assert prompts - blind == 64 * 1024 * 6400
    assert shown - silent == pytest.approx(64 * (1024 + 16 * 2 * 100) * 3200, abs=1)


def test_moments_in_float8_need_three_bytes_and_their_scales(small: Path) -> None:
    held, saved = [], []
    for moments in ("float32", "bfloat16", "float8"):
        found = fit(make(small, trainer={"optimizer": {"moments": moments}}), H200)
        held.append(next(one.bytes["moments"] for one in found.held if one.role == "trainer"))
        saved.append(found.host["a checkpoint being written"])
    assert held[2] == held[0] * (3 + 1 / 32) / 8
    assert saved[2] == saved[1] == saved[0] - held[0] // 2  # a checkpoint has bfloat16


def test_sharded_gradients_need_a_part_and_a_few_buckets(small: Path, large: Path) -> None:
    whole, sharded, overlapped = (
        fit(make(large, trainer={"ranks": 4, "recompute": "selective", **own}), H200)
        for own in ({}, {"shard_gradients": True}, {"shard_gradients": True, "overlap_grad_reduce": True})
    )
    before, after, more = (
        next(one.bytes for one in found.held if one.role == "trainer") for found in (whole, sharded, overlapped)
    )
    assert after["gradients"] == pytest.approx(before["gradients"] / 4, rel=1e-6)
    embedding, least = 4 * 151936 * 4096, 4 * 40_000_000
    assert embedding + least <= after["buckets of gradients"] < more["buckets of gradients"] < 1.3 * embedding
    changed = ("gradients", "buckets of gradients")
    assert {name: size for name, size in after.items() if name not in changed} == {
        name: size for name, size in before.items() if name not in changed
    }
    assert sharded.seconds.update > 2 * whole.seconds.update  # a sum for each of about ten micro-batches
    assert all(one.layout.shard_gradients for one in sharded.layouts)
    assert sharded.layout.name == "DP4, selective recompute, sharded gradients"
    service: dict[str, Any] = {"placement": "service", "context_parallel": 2}
    critic = fit(
        make(small, algorithm={"name": "ppo"}, trainer={"shard_gradients": True}, roles={"critic": service}), H200
    )
    (own,) = (one.bytes for one in critic.held if one.role == "critic")
    assert own["gradients"] + own["buckets of gradients"] < 2 * own["weights"]  # which are in bfloat16


@pytest.mark.parametrize("model", ["1.7b", "8b", "mixture"])
def test_buckets_have_all_parameters(tmp_path: Path, model: str) -> None:
    shape = read_shape(write_config(tmp_path / model, model))
    for layout in possible_layouts(shape, 8, 64, offload=False):
        for stage in range(layout.pipeline):
            parameters = stage_parameters(shape, layout, stage)
            shared = parameters.dense if layout.data * layout.context > 1 else 0
            shared += parameters.experts if layout.expert_data > 1 else 0
            assert buckets_in_memory(shape, layout, stage, least=10**12) == 4 * shared


def test_logits_in_float32_need_twice_as_much(small: Path) -> None:
    plain, exact = (
        next(one.bytes for one in fit(make(small, trainer=own), H200).held if one.role == "trainer")
        for own in ({}, {"fp32_lm_head": True})
    )
    # At most a twenty-fourth of the GPU is kept, in whole chunks, and a chunk of the gradient is rounded.
    assert exact["logits"] + exact["work space"] > plain["logits"] + plain["work space"] + (1 << 28)
    assert {name: size for name, size in exact.items() if name not in ("logits", "work space")} == {
        name: size for name, size in plain.items() if name not in ("logits", "work space")
    }


def test_offload_and_colocation_need_the_hosts_memory(small: Path) -> None:
    state = {"ranks": 1, "optimizer": {"cpu_offload": True}}
    assert "offloaded optimizer" in fit(make(small, trainer=state), H200).host
    several = fit(make(small, trainer={"ranks": 1, "epochs": 2}), H200).host
    assert several["weights for engines that join"] == pytest.approx(4 / 3 * 2 * 1.72e9, rel=0.01)
    shared = make(
        small, run={"steps": 100, "colocate": True}, board={"max_staleness": 0}, weights={"transport": "cuda_ipc"}
    )
    found = fit(shared, H200)
    assert [one.place for one in found.held] == ["generate", "train", "synchronise"]
    assert found.host["the sleeping trainer"] == pytest.approx(14 * 1.72e9, rel=0.01)
    assert found.fits
    judge = {"model": str(small), "engine": "sglang", "dtype": "bfloat16", "memory_fraction": 0.7, "gpu_share": 0.4}
    beside = fit(
        make(small, **{**shared.model_dump(include={"run", "board", "weights"}), "roles": {"judge": judge}}), H200
    )
    generate, train, synchronise = beside.held
    cache = generate.bytes["judge's weights"] + generate.bytes["judge's key-value cache"]
    assert cache == pytest.approx(0.7 * 0.4 * H200.gpu_bytes, rel=1e-6)
    assert train.bytes["sleeping judge"] == synchronise.bytes["sleeping judge"] == train.bytes["sleeping engine"]
    # An engine that sleeps gets new weights; a judge keeps its own.
    assert beside.host["sleeping judges' weights"] == generate.bytes["judge's weights"] > 0
    assert beside.host.keys() - found.host.keys() == {"sleeping judges' weights"}
    greedy = shared.model_copy(update={"rollout": shared.rollout.model_copy(update={"memory_fraction": 0.95})})
    assert not fit(greedy, H200).held[0].fits  # no room for the sleeping trainer's context
    staying = fit(shared.model_copy(update={"trainer": shared.trainer.model_copy(update={"offload": False})}), H200)
    assert "the sleeping trainer" not in staying.host
    more = staying.held[0].total - found.held[0].total
    print(staying.held[0].bytes, found.held[1].bytes)
    assert more == pytest.approx(14 * 1.72e9, rel=0.05)  # weights, main weights, moments, buckets; no gradients
    assert staying.held[1:] == found.held[1:]


@pytest.mark.parametrize(("judges", "tensor_parallel"), [(1, 1), (3, 1), (2, 2)])
def test_every_judge_sleeps_on_the_host(small: Path, judges: int, tensor_parallel: int) -> None:
    judge = {"model": str(small), "engine": "sglang", "dtype": "bfloat16", "memory_fraction": 0.7, "gpu_share": 0.4}
    shared = make(
        small,
        run={"steps": 100, "colocate": True},
        board={"max_staleness": 0},
        weights={"transport": "cuda_ipc"},
        roles={"judge": {**judge, "tensor_parallel": tensor_parallel}},
    )
    one, all_of_them = (fit(shared, H200, count) for count in (1, judges))
    weights = one.host["sleeping judges' weights"]
    assert weights == pytest.approx(2 * 1.72e9, rel=0.01)  # two bytes each, however many GPUs a judge has
    assert all_of_them.host["sleeping judges' weights"] == judges * weights
    assert all_of_them.held == one.held  # a GPU has one


@pytest.mark.parametrize(
    ("sizes", "state_on_gpu", "places"),
    [
        ({}, True, [""]),
        ({"tensor_parallel": 2}, True, [""]),
        ({"pipeline_parallel": 2}, True, ["stage 0", "stage 1"]),
        ({"optimizer": {"cpu_offload": True}}, False, [""]),
    ],
)
def test_a_critic_service(small: Path, sizes: dict[str, Any], state_on_gpu: bool, places: list[str]) -> None:
    """It is in ranks of its own: the trainer's hold what they hold without one."""
    alone, in_ranks, apart = (
        fit(make(small, **sections), H200)
        for sections in (
            {},
            {"algorithm": {"name": "ppo"}},
            {"algorithm": {"name": "ppo"}, "roles": {"critic": {"placement": "service", **sizes}}},
        )
    )
    trainer = ("trainer", "")
    assert totals(apart)[trainer] == totals(alone)[trainer] < totals(in_ranks)[trainer]
    assert apart.seconds.total == alone.seconds.total < in_ranks.seconds.total
    critic = [one for one in apart.held if one.role == "critic"]
    assert [one.place for one in critic] == places
    assert "critic" not in {one.role for one in (*alone.held, *in_ranks.held)}
    # Without an output layer, which is the embedding's copy here; two bytes each, divided among the ranks.
    whole = next(one.bytes["critic weights"] for one in in_ranks.held if one.role == "trainer")
    ranks = 2 if {"tensor_parallel", "pipeline_parallel"} & sizes.keys() else 1
    assert sum(one.bytes["weights"] for one in critic) / len(places) == pytest.approx(whole / ranks, rel=0.01)
    assert all(one.bytes["gradients"] == 2 * one.bytes["weights"] for one in critic)
    assert [("moments" in one.bytes, "main weights" in one.bytes) for one in critic] == [(state_on_gpu,) * 2] * len(
        places
    )
    assert not any("logits" in one.bytes for one in critic)
    # Its checkpoints are files of its own in the run's folder, as large as its part of the trainer's were.
    of_critic = apart.disk["2 of the critic, and one being written"]
    both = in_ranks.disk["2 checkpoints, and one being written"]
    assert of_critic == both - alone.disk["2 checkpoints, and one being written"]
    assert apart.host.keys() == alone.host.keys()
    assert apart.host["a checkpoint being written"] == alone.host["a checkpoint being written"]


def test_a_critic_service_that_cannot_be_divided(small: Path) -> None:
    critic = {"placement": "service", "tensor_parallel": 3}
    with pytest.raises(FitError, match=r"roles.critic.tensor_parallel is 3: it must divide the model's 16 query heads"):
        fit(make(small, algorithm={"name": "ppo"}, roles={"critic": critic}), H200)


def test_the_cache_in_answers(small: Path) -> None:
    engine = fit(make(small), H200).engines["rollout"]
    token = 2 * 28 * 8 * 128 * 2
    assert engine.memory.token_bytes == token
    assert engine.answers == (int(0.8 * H200.gpu_bytes) - engine.memory.weights) // token // 9216
    tiny = make(small, rollout={**make(small).rollout.model_dump(), "memory_fraction": 0.02})
    assert fit(tiny, H200).engines["rollout"].answers == 0
    assert not fit(tiny, H200).fits
    assert (
        fit(
            make(small, rollout={"engine": "transformers", "max_new_tokens": 8192, "memory_fraction": 0.0}), H200
        ).engines
        == {}
    )


@pytest.mark.parametrize(
    ("trainer", "wrong"),
    [
        ({"ranks": 3, "tensor_parallel": 3}, "trainer.tensor_parallel is 3: it must divide the model's 16 query heads"),
        ({"ranks": 3, "pipeline_parallel": 3}, "trainer.pipeline_parallel is 3: it must divide the model's 28 layers"),
        (
            {"ranks": 2, "pipeline_parallel": 2, "pipeline_layers": [17, 12]},
            r"trainer.pipeline_layers is \[17, 12\]: it must add up to the model's 28 layers",
        ),
        (
            {"ranks": 2, "pipeline_parallel": 2, "pipeline_chunks": 3},
            "trainer.pipeline_chunks is 3: it must divide the 14 layers of a pipeline stage; .* that do: 1, 2, 7, 14",
        ),
        ({"ranks": 2, "expert_parallel": 2}, r"trainer.expert_parallel is 2: .*\(it is a dense model\)"),
        ({"ranks": 16}, "trainer.ranks is 16: a replica's GPUs are on one node, which has 8"),
    ],
)
def test_layouts_that_cannot_be(small: Path, trainer: dict[str, Any], wrong: str) -> None:
    with pytest.raises(FitError, match=wrong):
        fit(make(small, trainer=trainer), H200)


def test_the_sizes_that_are_named_divide_all_heads(small: Path) -> None:
    layout = Layout(ranks=24, tensor=3)
    assert problem(layout, read_shape(small)).endswith("16 query heads; sizes that do: 1, 2, 4, 8")  # of 8 for keys


def test_every_layout_divides_the_model(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, "mixture"))
    layouts = possible_layouts(shape, 8, 64, offload=False)
    assert not any(problem(layout, shape) for layout in layouts)
    assert {layout.expert for layout in layouts} == {1, 2, 4, 8}
    assert {layout.pipeline for layout in layouts} == {1, 2}  # of 6 layers
    assert {layout.tensor for layout in layouts} == {1, 2, 4}  # of 4 key-value heads
    assert {layout.context for layout in layouts} == {1, 2, 4, 8}


TOML = """
run = {{ steps = 10 }}
model = {{ path = "{model}" }}
data = {{ source = "addition", max_prompt_tokens = 64 }}
reward = {{ name = "addition" }}
rollout = {{ engine = "sglang", dtype = "bfloat16", memory_fraction = 0.8, max_new_tokens = 2048 }}
trainer = {{ dtype = "bfloat16" }}
"""


def test_the_command(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(model=small))
    shown = CliRunner().invoke(app, ["fit", str(path)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    for words in ("it fits", "moments", "key-value cache", "sequences of 2,112 tokens", "a prediction", "checkpoints"):
        assert words in shown.output
    found = json.loads(CliRunner().invoke(app, ["fit", str(path), "--json", "--gpu-gib", "141"]).output)
    assert found["fits"]
    assert found["gpus"][0]["total"] == sum(found["gpus"][0]["bytes"].values())
    assert found["layouts"][0]["settings"]["trainer.recompute"] == "none"
    tight = CliRunner().invoke(app, ["fit", str(path), "--gpu-gib", "8"])
    assert (tight.exit_code, "it does not fit" in tight.output) == (1, True)
    placed = CliRunner().invoke(app, ["fit", str(path), "--placement.replicas={rollout = 3}"], env={"COLUMNS": "120"})
    assert "it starts: rollout 3 of 1 GPU, reward 1, advantage 1" in placed.output
    wrong = CliRunner().invoke(app, ["fit", str(path), "--placement.replicas={judge = 3}"])
    assert "placement.replicas.judge = 3, but the run has no such role" in str(wrong.exception)


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(model=tmp_path / "nowhere"))
    found = CliRunner().invoke(app, ["fit", str(path)])
    assert isinstance(found.exception, ConfigError)
    assert "model.path" in str(found.exception)
    path.write_text(TOML.format(model=write_config(tmp_path / "m", "1.7b")))
    found = CliRunner().invoke(app, ["fit", str(path), "--trainer.ranks", "3", "--trainer.tensor_parallel", "3"])
    assert isinstance(found.exception, CliError)
    assert "must divide the model's 16 query heads; sizes that do: 1, 2" in str(found.exception)


def test_a_trainer_over_hosts_has_room_on_each(large: Path) -> None:
    sections: dict[str, Any] = {"trainer": {"ranks": 16, "hosts": 2, "tensor_parallel": 2, "recompute": "selective"}}
    found, one = (
        fit(make(large, **sections), H100),
        fit(make(large, trainer=sections["trainer"] | {"hosts": 1}), wide()),
    )
    assert found.fits
    assert found.held == one.held
    assert found.host["the ranks' processes"] * 2 == one.host["the ranks' processes"]
    assert one.between_hosts == {}
    assert found.between_hosts.keys() == {"gradients", "updated weights"}
    assert found.between_hosts["gradients"] == 2 * found.between_hosts["updated weights"]
    # Tensor-parallel ranks share a host.
    assert max(one.layout.tensor for one in found.layouts) <= 8
    assert all(one.between_hosts > 0 for one in found.layouts)
    with pytest.raises(
        FitError, match=r"trainer\.ranks is 32: they are on trainer\.hosts = 2 nodes, each of which has 8"
    ):
        fit(make(large, trainer={"ranks": 32, "hosts": 2}), H100)


def wide() -> Hardware:
    """Return a host with as many GPUs as two others."""
    return Hardware(80 << 30, 16)
