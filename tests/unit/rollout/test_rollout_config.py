"""What [rollout] and [weights] may say of an engine."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from relaxd.board import stages_for
from relaxd.config import RunConfig
from relaxd.config.load_toml import load
from relaxd.config.write_toml import dump
from services.rollout.engines.request_types import run_sampling
from tests.unit.rollout.configs import run_config


@pytest.mark.parametrize(
    ("setting", "value"),
    [("tensor_parallel", 2), ("memory_fraction", 0.5), ("return_routed_experts", True), ("sglang", {"page_size": 1})],
)
def test_settings_of_sglang_are_refused_with_transformers(setting: str, value: Any) -> None:
    assert getattr(run_config(engine="sglang", **{setting: value}).rollout, setting) == value
    with pytest.raises(ValidationError, match=rf'rollout\.{setting} is for .*rollout\.engine is "transformers"'):
        run_config(engine="transformers", **{setting: value})


def test_transformers_cannot_retract() -> None:
    assert run_config(engine="sglang", pause="retract").weights.pause == "retract"
    with pytest.raises(ValidationError, match=r'weights\.pause is "retract", which rollout\.engine = "transformers"'):
        run_config(pause="retract")


def test_a_source_may_have_shorter_answers_and_another_nucleus() -> None:
    base = run_config(max_new_tokens=20, min_new_tokens=2, top_p=0.9, stop_token_ids=(7,)).model_dump()
    base["data"] |= {"source": "files", "sources": [{"path": "a"}, {"path": "b", "max_new_tokens": 8, "top_p": 0.5}]}
    config = RunConfig.model_validate(base)
    first, second = (run_sampling(config.rollout, 3, source.sampling) for source in config.data.sources)
    assert (first.max_new_tokens, first.top_p, first.stop_token_ids) == (20, 0.9, (7,))
    assert second == replace(first, max_new_tokens=8, top_p=0.5)
    own = {"top_k": 3, "stop": ["x", "y"], "stop_token_ids": [1], "min_new_tokens": 4}
    base["data"]["sources"] += [{"path": "c", **own}, {"path": "d", "stop_token_ids": [], "min_new_tokens": 0}]
    others = RunConfig.model_validate(base).data.sources[2:]
    through_the_board = [json.loads(json.dumps(source.sampling)) for source in others]
    third, fourth = (run_sampling(config.rollout, 3, sampling) for sampling in through_the_board)
    assert third == replace(first, top_k=3, stop=("x", "y"), stop_token_ids=(1,), min_new_tokens=4)
    assert fourth == replace(first, stop_token_ids=(), min_new_tokens=0)
    assert stages_for(config)[0].needs == ("prompt_tokens", "prompt")
    assert stages_for(run_config())[0].needs == ("prompt_tokens",)
    for wrong in (1, 21):
        base["data"]["sources"][1]["max_new_tokens"] = wrong
        with pytest.raises(ValidationError, match=rf"data\.sources\.1\.max_new_tokens is {wrong}: it must be 2 "):
            RunConfig.model_validate(base)


def test_token_ids_that_stop_are_not_negative() -> None:
    with pytest.raises(ValidationError, match=r"rollout\.stop_token_ids has -1"):
        run_config(stop_token_ids=(3, -1))


def test_options_of_sglang_are_kept_as_they_are() -> None:
    config = run_config(engine="sglang", sglang={"attention_backend": "triton", "page_size": 16, "random_seed": 3})
    assert load(dump(config)) == config


@pytest.mark.parametrize(("setting", "value"), [("memory_fraction", 0.5), ("sglang", {"page_size": 1})])
def test_how_an_external_server_is_started_is_not_the_runs_to_say(setting: str, value: Any) -> None:
    assert run_config(engine="sglang_external", tensor_parallel=2).rollout.tensor_parallel == 2
    with pytest.raises(ValidationError, match=rf'rollout\.{setting} is for .*rollout\.engine is "sglang_external"'):
        run_config(engine="sglang_external", **{setting: value})


def test_external_servers_get_their_weights_from_one_rank() -> None:
    values = run_config(engine="sglang_external").model_dump()
    trainer = values["trainer"] | {"ranks": 2, "pipeline_parallel": 2}
    with pytest.raises(ValidationError, match=r"trainer\.pipeline_parallel is 2: .* it must be 1"):
        RunConfig.model_validate(values | {"trainer": trainer})
