"""What is rehearsed of a run: the shapes that this project has to carry, and how they are scaled."""

from pathlib import Path

import pytest

from relaxd.board import worst_bytes
from relaxd.config.load_toml import load, load_file
from relaxd.config.write_toml import dump
from relaxd.tools.rehearsal.assumptions import Scale, obstacle, payload_scale, rehearsed

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


def test_payloads_are_scaled_to_the_memory_that_there_is() -> None:
    config = load_file(Path("benchmarks/shapes/math.toml"))
    needed = 3 * config.trainer.groups_per_step * worst_bytes(config, 0) * 1.5 * 4000 / 20480
    assert payload_scale(config, int(needed) + 1) == 1
    assert payload_scale(config, int(needed / 3)) == 4
    assert config.rollout.max_new_tokens // payload_scale(config, 1) >= 64


COLOCATED = "[run]\nsteps = 1\ncolocate = true\n[board]\nmax_staleness = 0\n[weights]\ntransport = 'cuda_ipc'"
EXPERTS = "[run]\nsteps = 1\n[rollout]\nengine = 'sglang'\nreturn_routed_experts = true"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (COLOCATED, "run.colocate is true"),
        (EXPERTS, "rollout.return_routed_experts is true"),
        ("agent.environment = 'calculator'\n[run]\nsteps = 1", 'agent.environment is "calculator"'),
    ],
)
def test_what_cant_be_rehearsed_is_said(text: str, problem: str) -> None:
    config = load(f"{text}\n[model]\npath = 'm'\n[data]\nsource = 'addition'\n[reward]\nname = 'math'\n")
    assert obstacle(config).startswith(problem)


def test_what_is_not_rehearsed_is_left_out(tmp_path: Path) -> None:
    shape = Path("benchmarks/shapes/math.toml").read_text()
    text = shape.replace('name = "math"', 'address = "judge:50060"\ncache_samples = 100')
    config = load(text + '\n[[eval.sets]]\nname = "letters"\ntask = "spell_backward"\nprompts = 2\n')
    found = rehearsed(config, Scale(rollout=4, time=10.0, payload=4), model=tmp_path / "stand-in", folder=tmp_path)
    assert load(dump(found)) == found  # the coordinator accepts it
    assert (found.reward.address, found.reward.cache_samples, found.eval.sets) == ("", 0, ())
