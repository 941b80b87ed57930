"""A whole run whose engines pass its weights on; one of them dies."""

import json

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary


@pytest.mark.night
@pytest.mark.timeout(300)
def test_a_run_sends_weights_along_a_chain(workplace: Workplace) -> None:
    words = ("--weights.transport", "gloo_chain", "--weights.verify", "always", "--run.steps", "6", "--rollout", "3")
    run = workplace.start("run", "tiny.toml", *words, "--run-id", "chain")
    workplace.kill_in_step(run, 2, "rollout", replicas=3)
    folder = workplace.folder / "runs" / "chain"
    check_books(read_summary(folder), steps=6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Each engine's checksums of each version were those of the trainer: else it had served nothing.
    assert sum("sync_seconds" in line for line in lines) >= 4
