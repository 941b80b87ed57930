"""A whole run, with the trainer's own weights on their way to an external SGLang server."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import CONFIG, REWARD, Workplace
from tests.integration.rollout.sglang_external.external_kit import KEY, Server

RUN = ("run", "tiny.toml", "--run-id", "external", "--board.max_staleness", "0")


def prepared(folder: Path, model: Path) -> Workplace:
    (folder / "tiny_reward.py").write_text(REWARD)
    config = CONFIG.replace("threads = 1", 'engine = "sglang_external"', 1)
    (folder / "tiny.toml").write_text(config.format(model=model, steps=3))
    return Workplace(folder)


def trained_steps(place: Workplace) -> list[dict[str, float]]:
    metrics = place.folder / "runs" / "external" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "logprob_difference" in line]


def test_a_run_with_an_external_server(server: Server, model: Path, tmp_path: Path) -> None:
    place = prepared(tmp_path, model)
    code, output = place.relaxd(
        *RUN,
        timeout=240,
        RELAXD_SGLANG_URL=server.url,
        RELAXD_SGLANG_KEY=KEY,
    )
    assert code == 0, output
    steps = trained_steps(place)
    assert len(steps) == 3  # on-policy: every step's tokens are of the version that it trains, so all are compared
    assert all(0 < step["logprob_difference"] < 1e-4 for step in steps)


@pytest.mark.night
def test_a_server_joins_a_run_by_its_url(server: Server, model: Path, tmp_path: Path) -> None:
    place = prepared(tmp_path, model)
    run = place.start(*RUN, RELAXD_SGLANG_KEY=KEY)  # without a server
    assert run.stdout is not None
    assert any("has no server" in line for line in run.stdout)
    words = ("scale", "--sglang-url", server.url, "--wait")
    planned = place.relaxd(*words, "--dry-run")
    assert (planned[0], "pending (1 pending)" in planned[1]) == (0, True), planned
    joined = place.relaxd(*words, timeout=240)
    assert (joined[0], "active (1 active)" in joined[1]) == (0, True), joined
    again = place.relaxd(*words)
    assert (again[0], "nothing to do" in again[1]) == (0, True), again
    rest, _ = run.communicate(timeout=240)
    assert run.returncode == 0, rest
    assert len(trained_steps(place)) == 3
