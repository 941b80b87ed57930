"""Settings of models that see: what is trained of them, and which roles see images."""

import json
from pathlib import Path

import pytest

from relaxd.cli.preparing.config_command import check
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, load_file
from tests.kit.cases import each
from tests.kit.sounds import write_omni_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "addition.toml"
VISION, PROJECTION, LANGUAGE = (
    "model.visual.blocks.0.attn.qkv.weight",
    "model.visual.deepstack_merger_list.1.norm.weight",
    "model.language_model.layers.0.mlp.up_proj.weight",
)
IMAGES = 'data.media_keys={image = "images"}'
SOUNDS = 'data.media_keys={audio = "sounds"}'
IMAGES_SHOWN = 'agent.media=["image"]'
OPD = ("algorithm.name=opd", "roles.teacher.model=big", "roles.teacher.placement=service")


def load(*options: str) -> RunConfig:
    return load_file(EXAMPLE, [f"--{option}" for option in options])


@each(
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
    assert trainer.trains_towers(hears=False) == bool(trained & {VISION, PROJECTION})


@pytest.mark.parametrize(
    ("option", "trained"),
    [
        ("trainer.threads=1", {"model.layers.0.mlp.gate", "lm_head"}),
        ('trainer.train_only=["audio"]', {"audio_tower.layers.0.fc1"}),
        ('trainer.train_only=["vision"]', {"visual.blocks.0.attn.qkv"}),
        ('trainer.train_only=["projection"]', {"audio_tower.proj1", "visual.merger_list.0.ln_q"}),
        ('trainer.freeze=["language"]', {"audio_tower.layers.0.fc1", "visual.blocks.0.attn.qkv", "audio_tower.proj1",
                                         "visual.merger_list.0.ln_q"}),
    ],
)  # fmt: skip
def test_parts_of_a_model_that_hears(option: str, trained: set[str]) -> None:
    trainer = load(option).trainer
    towers = ("audio_tower.layers.0.fc1", "visual.blocks.0.attn.qkv", "audio_tower.proj1", "visual.merger_list.0.ln_q")
    names = (*towers, "model.layers.0.mlp.gate", "lm_head")
    assert {name for name in names if trainer.trains(f"thinker.{name}.weight")} == trained
    assert trainer.trains_towers(hears=True) == bool(trained & set(towers))


@each(
    ("options", "problem"),
    [
        (["reward.media=true"], "reward.media is true, but the run has none"),
        (["data.video_fps=2", IMAGES], "data.video_fps is 2.0, but the run has no video: name its column"),
        (["data.max_image_tokens=64"], "data.max_image_tokens is 64, but the run has no images: name its column"),
        (["data.min_image_tokens=4", SOUNDS], "data.min_image_tokens is 4, but the run has no images: name its column"),
        (
            ["data.max_audio_seconds=9", IMAGES],
            "data.max_audio_seconds is 9.0, but the run has no sound: name its column",
        ),
        (
            ['data.media_hosts=["a.org"]'],
            'data.media_hosts is ["a.org"], but no column has media that could be fetched',
        ),
        (
            ["data.media_wait_seconds=60", IMAGES],
            "data.media_wait_seconds is 60.0, but no host has media that could be awaited",
        ),
        (["data.video_sound=true", IMAGES], "data.video_sound is true, but the run has no video: name its column"),
        (
            ["reward.media=true", "reward.name=", "reward.address=localhost:1", IMAGES],
            "reward.media is true, but reward.address is a service, which gets no media",
        ),
        (['trainer.freeze=["("]'], "'(' is no regular expression"),
        (['trainer.train_only=["vision"]', "trainer.freeze=[]"], "trainer.freeze is []"),
        (
            ["algorithm.name=ppo", "roles.critic.placement=service", IMAGES],
            'roles.critic.placement is "service", but the run has media (data.media_keys)',
        ),
        (
            [*OPD, "roles.teacher.engine=sglang", IMAGES],
            'roles.teacher.engine is "sglang", but the run has media (data.media_keys)',
        ),
        (
            [*OPD, "roles.teacher.privileged_key=answer", IMAGES],
            'roles.teacher.privileged_key is "answer", but the run has media (data.media_keys)',
        ),
        (
            ["algorithm.name=ppo", "roles.critic.placement=service", "agent.environment=zoom", IMAGES_SHOWN],
            'roles.critic.placement is "service", but the run has media (agent.media)',
        ),
        ([IMAGES_SHOWN], 'agent.media is ["image"], but agent.environment is empty'),
    ],
)
def test_wrong_settings_are_refused(options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*options)
    assert problem in str(caught.value)


def test_limits_are_for_media_of_any_place() -> None:
    both = 'data.media_keys={video = "videos"}', "data.video_sound=true"
    for options in (
        ["data.max_image_tokens=64", "agent.environment=zoom", IMAGES_SHOWN],
        [*both, "data.max_audio_seconds=9"],
    ):
        load("rollout.engine=transformers", *options)


@pytest.mark.parametrize("leads", ['agent.command=["a"]', "agent.function=a.b:c"])
@pytest.mark.parametrize("images", [IMAGES, IMAGES_SHOWN])
def test_programs_and_functions_may_have_images(leads: str, images: str) -> None:
    run = load("rollout.engine=transformers", leads, images)
    assert run.has_media
    assert run.media_problem is None


def test_conversations_may_have_each_kind_that_their_engine_takes() -> None:
    agent = ("agent.environment=zoom", 'agent.media=["video", "audio"]')
    run = load("rollout.engine=transformers", *agent, 'data.media_keys={image = "a", video = "b"}')
    assert run.media_kinds == ("image", "video", "audio")
    assert run.media_problem is None
    run = load("rollout.engine=sglang_external", *agent)
    assert run.media_problem == (
        "rollout.engine",
        '= "sglang_external", which takes no video (agent.media): "transformers" or "sglang" does',
    )


def test_a_model_without_media_is_refused_by_the_setting_that_asks_for_some(tmp_path: Path) -> None:
    write_omni_model(tmp_path)  # for its vocabulary
    config = {"model_type": "qwen3", "vocab_size": 300, "num_attention_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 64, "intermediate_size": 64}))
    beside = write_omni_model(tmp_path / "beside")
    file = beside / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "qwen3_vl", "text_config": {}}))
    reference = ("algorithm.kl_coef=0.1", f"roles.reference.model={beside}")
    run = load(f"model.path={tmp_path}", "agent.environment=zoom", 'agent.media=["image", "audio"]', *reference)
    found = [f"{problem.setting} {problem.message}" for problem in check(run, call_reward=False)]
    media = "which the run has (agent.media): media of type 'qwen3_vl' are image, video"
    assert f"roles.reference.model = '{beside}' takes no audio, {media}" in found
    (own,) = (message for message in found if message.startswith("agent.media"))
    assert "models of type 'qwen3' take no media in the trainer: qwen3_vl" in own
