"""The whole answer of `relaxd fit`, for runs of several kinds."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.client.errors import CliError
from relaxd.config import RunConfig
from relaxd.config.load import ConfigError
from relaxd.fitting.fit import Fit, fit
from relaxd.fitting.held import FitError, Hardware
from relaxd.fitting.layout import Layout, possible_layouts, problem
from relaxd.fitting.shape import read_shape
from tests.unit.fitting.models import write_config

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
    critic = fit(make(small, algorithm={"name": "ppo"}), H200)
    held = next(one.bytes for one in critic.held if one.role == "trainer")
    assert held["critic moments"] == pytest.approx(held["moments"], rel=1e-4)


def test_offload_and_colocation_need_the_hosts_memory(small: Path) -> None:
    state = {"ranks": 1, "optimizer": {"cpu_offload": True}}
    assert "offloaded optimizer" in fit(make(small, trainer=state), H200).host
    shared = make(
        small, run={"steps": 100, "colocate": True}, board={"max_staleness": 0}, weights={"transport": "cuda_ipc"}
    )
    found = fit(shared, H200)
    assert [one.place for one in found.held] == ["generate", "train", "synchronise"]
    assert found.host["the sleeping trainer"] == pytest.approx(14 * 1.72e9, rel=0.01)
    assert found.fits
    greedy = shared.model_copy(update={"rollout": shared.rollout.model_copy(update={"memory_fraction": 0.95})})
    assert not fit(greedy, H200).held[0].fits  # no room for the sleeping trainer's context


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
        ({"ranks": 2, "expert_parallel": 2}, r"trainer.expert_parallel is 2: .*\(it is a dense model\)"),
        ({"ranks": 16}, "trainer.ranks is 16: a replica's GPUs are on one node, which has 8"),
    ],
)
def test_layouts_that_cannot_be(small: Path, trainer: dict[str, int], wrong: str) -> None:
    with pytest.raises(FitError, match=wrong):
        fit(make(small, trainer=trainer), H200)


def test_every_layout_divides_the_model(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, "mixture"))
    layouts = possible_layouts(shape, 8, 64, offload=False)
    assert not any(problem(layout, shape) for layout in layouts)
    assert {layout.expert for layout in layouts} == {1, 2, 4, 8}
    assert {layout.pipeline for layout in layouts} == {1, 2}  # of 6 layers
    assert {layout.tensor * layout.context for layout in layouts} == {1, 2, 4}  # of 4 key-value heads


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
