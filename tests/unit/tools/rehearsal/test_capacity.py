"""Verdicts on the control plane (its goals, which calls are judged), and scales that a machine carries, as tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaxd.config.load_toml import load_file
from relaxd.tools.rehearsal.assumptions import least_step_seconds, mean_tokens
from relaxd.tools.rehearsal.capacity import (
    AnsweredCall,
    CallTimes,
    HostLoad,
    advice,
    call_times,
    doubt,
    line,
    p99,
    read_calls,
    refusal,
    verdict,
)
from tests.kit.cases import each

VERDICTS = [
    # p99 at rest, p99 while it works, p99 of leases, cores, busy at rest; what is said
    (
        0.02,
        0.05,
        0.6,
        0.5,
        False,
        "meets its goals with 512 rollout replicas: uses 0.5 of 1 cores; p99 of Heartbeat 20 ms",
    ),
    (0.1, 0.1, 5.0, 1.0, False, "meets its goals"),
    (0.02, 3.0, 0.6, 0.5, False, "meets its goals"),  # steps come faster than they will
    (0.02, 0.05, None, 0.5, False, "meets its goals"),
    (0.02, 0.05, 0.6, 1.5, False, "misses its goals with 512 rollout replicas: uses 1.5 of 1 cores (all: "),
    (0.2, 0.2, 0.6, 0.5, False, "misses its goals with 512 rollout replicas: p99 of Heartbeat 200 ms of 100 ms (all: "),
    (0.02, 0.05, 6.0, 0.5, False, "misses its goals with 512 rollout replicas: p99 of LeaseGpus 6 s of 5 s (all: "),
    (0.2, 0.2, 0.6, 0.5, True, "not judged: this machine had no processor left, at rest either"),
    (0.2, 0.2, 0.6, 1.5, True, "misses its goals"),  # processor seconds don't depend on who else works here
    (0.02, 0.05, 0.6, 0.5, True, "meets its goals"),
    (None, 0.05, 0.6, 0.5, False, "not judged: no heartbeat was answered in the window at rest"),
]


@each(("rest", "working", "lease", "cores", "busy", "said"), VERDICTS)
def test_verdict(
    rest: float | None, working: float | None, lease: float | None, cores: float, busy: bool, said: str
) -> None:
    assert verdict(CallTimes(rest, working, lease), cores, 512, busy_at_rest=busy).startswith(said)


def test_heartbeats_count_in_the_window_in_which_they_were_sent_and_leases_always() -> None:
    calls = [
        AnsweredCall("LeaseGpus", 1.0, 0.7),
        AnsweredCall("Heartbeat", 5.0, 9.0),  # before both windows
        AnsweredCall("Heartbeat", 11.0, 0.3),
        AnsweredCall("Heartbeat", 25.0, 8.0),  # between them: the run comes to rest
        AnsweredCall("Heartbeat", 31.0, 0.1),
    ]
    assert call_times(calls, (10.0, 20.0), (30.0, 40.0)) == CallTimes(0.1, 0.3, 0.7)
    assert call_times([], (10.0, 20.0), (30.0, 40.0)) == CallTimes(None, None, None)


def test_p99() -> None:
    assert p99([]) is None
    assert p99([float(number) for number in range(100, -1, -1)]) == 99.0


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    whole = line("Heartbeat", 1.5, 0.25)
    (tmp_path / "1.txt").write_text(whole + line("LeaseGpus", 2.0, 0.5) + "Heartb")
    (tmp_path / "2.txt").write_text(whole[:-3])
    assert read_calls(tmp_path) == [AnsweredCall("Heartbeat", 1.5, 0.25), AnsweredCall("LeaseGpus", 2.0, 0.5)]


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
