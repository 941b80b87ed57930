"""A whole run, with the trainer's own weights on their way to an external SGLang server."""

import json
from pathlib import Path

from tests.e2e.conftest import CONFIG, REWARD, Workplace
from tests.integration.rollout.sglang_external.external_kit import KEY, Server


def test_a_run_with_an_external_server(server: Server, model: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny_reward.py").write_text(REWARD)
    config = CONFIG.replace("threads = 1", 'engine = "sglang_external"', 1)
    (tmp_path / "tiny.toml").write_text(config.format(model=model, steps=3))
    place = Workplace(tmp_path)
    code, output = place.relaxd(
        *("run", "tiny.toml", "--run-id", "external", "--board.max_staleness", "0"),
        timeout=240,
        RELAXD_SGLANG_URL=server.url,
        RELAXD_SGLANG_KEY=KEY,
    )
    assert code == 0, output
    metrics = tmp_path / "runs" / "external" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "logprob_difference" in line]
    assert len(steps) == 3  # on-policy: every step's tokens are of the version that it trains, so all are compared
    assert all(0 < step["logprob_difference"] < 1e-4 for step in steps)
