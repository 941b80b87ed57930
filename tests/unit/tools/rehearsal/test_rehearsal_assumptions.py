"""What is rehearsed of a run: the shapes that this project has to carry, and how they are scaled."""

from pathlib import Path

import pytest

from relaxd.board import worst_bytes
from relaxd.config.load_toml import load, load_file
from relaxd.config.role_settings import AutoscaleConfig
from relaxd.config.write_toml import dump
from relaxd.envs.loading import load_environment
from relaxd.tools.rehearsal.assumptions import (
    Scale,
    admitted_groups,
    held_bytes,
    least_step_seconds,
    mean_turns,
    obstacle,
    payload_scale,
    rehearsed,
)

SHAPES = sorted(Path("benchmarks/shapes").glob("*.toml"))


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_every_shape_can_be_rehearsed(path: Path, tmp_path: Path) -> None:
    config = load_file(path)
    assert obstacle(config) == ""
    scale = Scale(rollout=64, time=10.0, payload=8)
    changed = rehearsed(config, scale, model=tmp_path / "stand-in", folder=tmp_path)
    assert load(dump(changed)) == changed  # the coordinator accepts it
    own, assumed = config.rehearsal, changed.rehearsal
    # An answer takes a tenth of the time, with an eighth of the tokens.
    before = own.median_tokens / own.sample_tokens_per_second
    assert assumed.median_tokens / assumed.sample_tokens_per_second == pytest.approx(before / 10, rel=0.01)
    assert assumed.train_tokens_per_second == pytest.approx(own.train_tokens_per_second * 10 / 8)
    assert changed.rollout.max_new_tokens == config.rollout.max_new_tokens // 8
    assert changed.trainer.micro_batch_tokens >= config.data.max_prompt_tokens + changed.rollout.max_new_tokens


def test_a_trainer_over_hosts_is_rehearsed_on_one(tmp_path: Path) -> None:
    config = load_file(SHAPES[0])
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 8, "hosts": 2})})
    changed = rehearsed(config, Scale(rollout=64, time=10.0, payload=8), model=tmp_path / "stand-in", folder=tmp_path)
    assert load(dump(changed)) == changed


def test_the_autoscaler_is_as_much_faster_as_steps(tmp_path: Path) -> None:
    config = load_file(SHAPES[0])
    autoscale = AutoscaleConfig(mode="on", out_seconds=30, in_seconds=120, in_cooldown_seconds=300)
    config = config.model_copy(update={"autoscale": autoscale})
    changed = rehearsed(config, Scale(rollout=64, time=10.0, payload=8), model=tmp_path / "stand-in", folder=tmp_path)
    found = changed.autoscale
    assert (found.mode, found.out_cooldown_seconds, found.in_cooldown_seconds) == ("on", 6.0, 30.0)
    assert (found.out_seconds, found.in_seconds) == (5.0, 12.0)  # not 3 s: it looks once a second


def test_payloads_are_scaled_to_the_memory_that_there_is() -> None:
    config = load_file(Path("benchmarks/shapes/math.toml"))
    needed = 3 * config.trainer.groups_per_step * worst_bytes(config, 0) * 1.5 * 4000 / 20480
    assert payload_scale(config, int(needed) + 1) == 1
    assert payload_scale(config, int(needed / 3)) == 4
    assert config.rollout.max_new_tokens // payload_scale(config, 1) >= 64


def test_payloads_with_media_are_not_scaled() -> None:
    plain = load_file(Path("benchmarks/shapes/math.toml"))
    data = plain.data.model_copy(update={"media_keys": {"image": "images"}})
    seeing = plain.model_copy(update={"data": data})
    assert payload_scale(plain, 1 << 20) > payload_scale(seeing, 1 << 20) == 1
    expected = 3 * plain.trainer.groups_per_step * 3200 * plain.data.max_prompt_tokens / 4
    assert held_bytes(seeing) - held_bytes(plain) == pytest.approx(expected)


COLOCATED = "[run]\nsteps = 1\ncolocate = true\n[board]\nmax_staleness = 0\n[weights]\ntransport = 'cuda_ipc'"
BLIND = "[run]\nsteps = 1\n[rollout]\nengine = 'sglang_external'\n[agent]\nenvironment = 'zoom'\nmedia = ['image']"
EXPERTS = "[run]\nsteps = 1\n[rollout]\nengine = 'sglang'\nreturn_routed_experts = true"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (COLOCATED, "run.colocate is true"),
        (BLIND, 'rollout.engine = "sglang_external", which takes no image (agent.media)'),
        (EXPERTS, "rollout.return_routed_experts is true"),
    ],
)
def test_what_cant_be_rehearsed_is_said(text: str, problem: str) -> None:
    config = load(f"{text}\n[model]\npath = 'm'\n[data]\nsource = 'addition'\n[reward]\nname = 'math'\n")
    assert obstacle(config).startswith(problem)


@pytest.mark.parametrize(
    "agent",
    [
        'environment = "number_guessing"\nsettings = {high = 9}\nplayers = 2\ncredit = "sequence"',
        'command = ["python", "solve.py"]\ncontainer = "image"\nmax_sequences = 3',
        'function = "solve.py:solve"\npython = "/other/python"',
    ],
)
def test_conversations_keep_their_limits_and_take_the_assumed_time(agent: str, tmp_path: Path) -> None:
    config = load(
        f"""
        [run]
        steps = 1
        [model]
        path = "m"
        [data]
        source = "addition"
        [reward]
        name = "environment"
        [rollout]
        max_new_tokens = 4096
        [agent]
        {agent}
        media = ["image"]
        max_turns = 6
        turn_tokens = 512
        max_sessions = 16
        on_failure = "mask"
        [rehearsal]
        turns = 4
        tool_seconds = 3.0
        observation_tokens = 400
        """
    )
    assert obstacle(config) == ""
    scale = Scale(rollout=4, time=10.0, payload=4, agents=2)
    found = rehearsed(config, scale, model=tmp_path / "stand-in", folder=tmp_path)
    assert load(dump(found)) == found  # the coordinator accepts it
    assert found.media_kinds == config.media_kinds == ("image",)
    assert found.media_problem is None
    assert (found.agent.max_turns, found.agent.turn_tokens, found.agent.on_failure) == (6, 128, "mask")
    shown = {"words": 100, "word": "a", "shows": "image"}
    assert found.agent.settings == {"turns": 4, "seconds": 0.3, "spread": 1.0, **shown}
    load_environment(found.agent.environment, found.agent.settings)()
    assert found.rehearsal.median_tokens == 4096 // 8 // 4 // 4
    # A conversation waits for its environment, which costs time and no tokens.
    quick = load(dump(config.model_copy(update={"rehearsal": config.rehearsal.model_copy(update={"tool_seconds": 0})})))
    assert least_step_seconds(config, 1000) > least_step_seconds(quick, 1000) > 0
    assert held_bytes(config) == held_bytes(quick)
    # Each answer but the last is a picture.
    blind = config.model_copy(update={"agent": config.agent.model_copy(update={"media": ()})})
    seen = config.data.max_prompt_tokens / 4 + config.rollout.samples_per_prompt * (mean_turns(config) - 1) * 400
    expected = 3 * config.trainer.groups_per_step * 3200 * seen
    assert held_bytes(config) - held_bytes(blind) == pytest.approx(expected, rel=1e-3)
    # An agent replica holds the conversations of two groups, an eighth of those that the gate lets through.
    assert admitted_groups(config) == 16
    assert least_step_seconds(config, 1000, 1) == pytest.approx(8 * least_step_seconds(config, 1000))


def test_what_is_not_rehearsed_is_left_out(tmp_path: Path) -> None:
    shape = Path("benchmarks/shapes/math.toml").read_text()
    text = shape.replace('name = "math"', 'address = "judge:50060"\ncache_samples = 100')
    config = load(text + '\n[[eval.sets]]\nname = "letters"\ntask = "spell_backward"\nprompts = 2\n')
    found = rehearsed(config, Scale(rollout=4, time=10.0, payload=4), model=tmp_path / "stand-in", folder=tmp_path)
    assert load(dump(found)) == found  # the coordinator accepts it
    assert (found.reward.address, found.reward.cache_samples, found.eval.sets) == ("", 0, ())
