"""Which scales a machine carries, as tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaxd.config.load_toml import load_file
from relaxd.tools.rehearsal.assumptions import least_step_seconds, mean_tokens
from relaxd.tools.rehearsal.carrying import HostLoad, advice, doubt, refusal
from tests.kit.cases import each

# A step takes at least 240 s and costs 30 s of processor time: at a time scale of 8 that is one processor.
LOAD = HostLoad(
    cores=2,
    machine_share=0.95,
    idle_cores=0.2,
    step_seconds=30.0,
    least_step_seconds=240.0,
    time_scale=8.0,
    replicas=512,
)
NEEDS = "this machine can't carry this scale: at --time-scale"
REFUSALS = [
    ({}, ""),  # it needs 1.2 of 2 processors: others have kept the machine busy
    ({"time_scale": 60.0, "machine_share": 0.85}, ""),  # there was a processor left, so nothing waited for one
    (
        {"time_scale": 60.0},
        f"{NEEDS} 60 the rehearsal needs 7.7 processors, and 2 are here. --time-scale 11 --seconds 44",
    ),
    ({"time_scale": 60.0, "cores": 16}, ""),
    ({"step_seconds": 3000.0}, "No time scale would do: it takes 16 processors, or a larger --payload-scale"),
    ({"idle_cores": 3.0}, "No time scale would do: it takes 4 processors, or --rollout 136"),
]


@each(("changes", "said"), REFUSALS)
def test_a_scale_that_the_machine_cant_carry_is_refused(changes: dict[str, float], said: str) -> None:
    found = refusal(replace(LOAD, **changes))
    assert said in found
    assert bool(said) == bool(found)


def test_the_numbers_that_would_do_do() -> None:
    refused = replace(LOAD, time_scale=60.0)
    assert refusal(replace(refused, time_scale=11.0)) == ""
    assert refusal(replace(refused, time_scale=12.0)) != ""


def test_doubt_is_about_a_machine_that_others_use() -> None:
    assert doubt(replace(LOAD, machine_share=0.85), 0.5) == ""
    assert doubt(LOAD, 0.5).startswith(
        "this machine's processors were 95% busy (50% with the rehearsal, which needs 1.2"
    )


def test_advice_to_a_rehearsal_without_steps() -> None:
    assert "a larger --time-scale" in advice(0.5)
    assert advice(0.97).startswith("a smaller --time-scale with a longer --seconds")


@pytest.mark.parametrize("path", sorted(Path("benchmarks/shapes").glob("*.toml")), ids=lambda path: path.stem)
def test_mean_lengths_are_those_of_drawn_lengths(path: Path) -> None:
    config = load_file(path)
    own, most = config.rehearsal, config.rollout.max_new_tokens
    normal = np.random.default_rng(0).standard_normal((50_000, 8))
    drawn = np.minimum(own.median_tokens * np.exp(own.spread * normal), most)
    assert mean_tokens(config) == pytest.approx(float(drawn.mean()), rel=0.01)
    assert mean_tokens(config, of_longest=8) == pytest.approx(float(drawn.max(axis=1).mean()), rel=0.01)


def test_a_step_takes_at_least_what_the_slowest_part_needs() -> None:
    config = load_file(Path("benchmarks/shapes/math.toml"))
    tokens = 512 * 16 * mean_tokens(config)
    assert least_step_seconds(config, 4) == pytest.approx(tokens / 4 / 3000)  # engines
    assert least_step_seconds(config, 512) == pytest.approx(tokens / 200_000 + config.rehearsal.update_seconds)
    # The gate admits two steps, and a group stays as long as its longest answer takes, however many engines there are.
    config = load_file(Path("benchmarks/shapes/agents.toml"))
    assert least_step_seconds(config, 4096) == pytest.approx(mean_tokens(config, of_longest=8) / 60 / 2)
