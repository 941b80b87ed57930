"""Settings of models that see: what is trained of them, and which roles see images."""

from pathlib import Path

import pytest

from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, load_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "addition.toml"
VISION, PROJECTION, LANGUAGE = (
    "model.visual.blocks.0.attn.qkv.weight",
    "model.visual.deepstack_merger_list.1.norm.weight",
    "model.language_model.layers.0.mlp.up_proj.weight",
)
IMAGES = 'data.media_keys={image = "images"}'
OPD = ("algorithm.name=opd", "roles.teacher.model=big", "roles.teacher.placement=service")


def load(*options: str) -> RunConfig:
    return load_file(EXAMPLE, [f"--{option}" for option in options])


@pytest.mark.parametrize(
    ("option", "trained"),
    [
        ("trainer.threads=1", {LANGUAGE}),
        ("trainer.freeze=[]", {VISION, PROJECTION, LANGUAGE}),
        ('trainer.freeze=["language"]', {VISION, PROJECTION}),
        ('trainer.train_only=["projection"]', {PROJECTION}),
        (r'trainer.freeze=["vision", "layers\\.0\\."]', {PROJECTION}),
        (r'trainer.train_only=["\\.mlp\\.", "vision"]', {VISION, LANGUAGE}),
    ],
)
def test_parts_and_patterns_choose_what_is_trained(option: str, trained: set[str]) -> None:
    trainer = load(option).trainer
    assert {name for name in (VISION, PROJECTION, LANGUAGE) if trainer.trains(name)} == trained
    assert trainer.trains_vision == bool(trained & {VISION, PROJECTION})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["reward.images=true"], "reward.images is true, but data.media_keys names no column"),
        (
            ["reward.images=true", "reward.name=", "reward.address=localhost:1", IMAGES],
            "reward.images is true, but reward.address is a service, which gets no images",
        ),
        (['trainer.freeze=["("]'], "'(' is no regular expression"),
        (['trainer.train_only=["vision"]', "trainer.freeze=[]"], "trainer.freeze is []"),
        (
            ["algorithm.name=ppo", "roles.critic.placement=service", IMAGES],
            'roles.critic.placement is "service", but data.media_keys names a column with media',
        ),
        (
            [*OPD, "roles.teacher.engine=sglang", IMAGES],
            'roles.teacher.engine is "sglang", but data.media_keys names a column with media',
        ),
        (
            [*OPD, "roles.teacher.privileged_key=answer", IMAGES],
            'roles.teacher.privileged_key is "answer", but data.media_keys names a column with media',
        ),
    ],
)
def test_wrong_settings_are_refused(options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*options)
    assert problem in str(caught.value)
