"""The table of engines: what it names is there, and settings and errors follow from it."""

from importlib import import_module
from importlib.util import find_spec
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from relaxd.config import JudgeConfig, RolloutConfig, TeacherConfig, WeightsConfig
from relaxd.engines import ENGINES, EngineCapabilities, engines_of, list_engines
from tests.kit.cases import each

SECTIONS: dict[str, type[BaseModel]] = {
    "rollout": RolloutConfig,
    "roles.teacher": TeacherConfig,
    "roles.judge": JudgeConfig,
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_a_row_names_what_is_there(engine: EngineCapabilities) -> None:
    for place, settings in engine.settings.items():
        assert set(settings) <= set(SECTIONS[place].model_fields)
    if engine.process:
        assert find_spec(engine.process)
    if "rollout" in engine.settings:
        assert callable(import_module(engine.module).start_engine)
    assert set(engine.pauses) <= set(get_args(WeightsConfig.model_fields["pause"].annotation))


@pytest.mark.parametrize("place", SECTIONS)
def test_a_section_takes_its_engines_and_no_other(place: str) -> None:
    section = SECTIONS[place]
    for name in engines_of(place):
        section.model_validate({"engine": name, "model": "judges/one"} if place == "roles.judge" else {"engine": name})
    *first, last = (f"'{name}'" for name in engines_of(place))
    with pytest.raises(ValidationError, match=f"Input should be {', '.join(first)} or {last}"):
        section.model_validate({"engine": "vllm"})


@each(
    ("engine", "setting", "having"),
    [
        ("transformers", {"tensor_parallel": 2}, '"sglang" or "sglang_external"'),
        ("transformers", {"sglang": {"tp_size": 1}}, '"sglang"'),
        ("sglang_external", {"memory_fraction": 0.5}, '"sglang"'),
        ("sglang_external", {"return_routed_experts": True}, '"sglang"'),
        ("sglang_external", {"tensor_parallel": 2}, ""),
        ("scripted", {"tensor_parallel": 2, "memory_fraction": 0.5, "return_routed_experts": True}, ""),
    ],
)
def test_settings_of_other_engines_are_refused(engine: str, setting: dict[str, object], having: str) -> None:
    if not having:
        RolloutConfig.model_validate({"engine": engine, **setting})
        return
    expected = f'rollout.{next(iter(setting))} is for rollout.engine = {having}, but rollout.engine is "{engine}"'
    with pytest.raises(ValidationError, match=expected):
        RolloutConfig.model_validate({"engine": engine, **setting})


def test_a_new_row_is_listed_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_engines("rollout", lambda one: one.sleeps) == '"transformers" or "sglang"'
    new = EngineCapabilities(name="new", settings={"rollout": ("memory_fraction",)}, sleeps=True)
    monkeypatch.setitem(ENGINES, "new", new)
    assert list_engines("rollout", lambda one: one.sleeps) == '"transformers" or "sglang" or "new"'
    with pytest.raises(ValidationError, match=r'memory_fraction is for rollout.engine = "sglang" or "new"'):
        RolloutConfig(engine="transformers", memory_fraction=0.5)
