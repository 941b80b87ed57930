"""The reference of a KL term, which takes over weights: in the trainer, or as a service that is killed."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.roles import ADVANTAGE
from tests.e2e.conftest import Workplace, open_workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.waiting import wait_until

STEPS = 6
SETTINGS = (
    *("--run.steps", str(STEPS), "--eval.prompts", "0", "--board.max_staleness", "0"),
    *("--algorithm.kl_coef", "0.5", "--algorithm.drop_zero_variance", "false", "--trainer.optimizer.lr", "1e-2"),
    *("--roles.reference.refresh_every", "2"),
)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Workplace]:
    """Services that are up, at first without a reference."""
    with open_workplace(tmp_path_factory.mktemp("services"), tiny_model) as place:
        code, output = place.relaxd("up", "--port", "0")
        assert code == 0, output
        yield place


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_killed_reference_replica_loses_nothing_and_changes_no_loss(services: Workplace) -> None:
    state = StateFolder(services.folder / ".relaxd")
    words = ("run", "tiny.toml", *SETTINGS)
    code, output = services.relaxd(*words, "--run-id", "alone", timeout=180)
    assert code == 0, output

    run = services.start(*words, "--roles.reference.placement", "service", "--run-id", "killed")
    with CoordinatorClient(state.read().coordinator) as coordinator:
        wait_until(lambda: coordinator.run().reason == "waiting for reference", "a run that waits", 240)
    code, output = services.relaxd("scale", "reference=2", "--wait")
    assert code == 0, output
    services.kill_in_step(run, 2, "reference", replicas=2)

    runs = services.folder / "runs"
    check_books(read_summary(runs / "killed"), STEPS)
    inside, apart = metrics(runs / "alone"), metrics(runs / "killed")
    assert [step["step"] for step in apart] == [step["step"] for step in inside] == list(range(1, STEPS + 1))
    assert inside[-1]["kl"] > 1e-3  # else it would not matter where the reference is
    for one, other in zip(inside, apart, strict=True):
        for name in ("loss", "kl", "grad_norm", "reward_mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (one["step"], name)
    ledger = [json.loads(line) for line in (runs / "killed" / "ledger.jsonl").read_text().splitlines()]
    trained = Counter(group for entry in ledger for group in entry["plan"]["groups"])
    assert set(trained.values()) == {1}
    assert [entry["plan"].get("reference", "") for entry in ledger] == [
        *("", ""),
        *("step-000002.1", "step-000002.1"),
        *("step-000004.1", "step-000004.1"),
    ]
    assert "queue_reference_seconds" in apart[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_divergence_in_the_reward_counts_the_same_wherever_the_reference_is(services: Workplace) -> None:
    """The reference takes over weights, so that the trainer computes the advantages, and no advantage service does."""
    code, output = services.relaxd("scale", "reference=1", "--wait")
    assert code == 0, output
    in_reward = ("--algorithm.kl_coef", "0", "--algorithm.kl_reward_coef", "0.05")
    words = ("run", "tiny.toml", *SETTINGS, *in_reward)
    code, output = services.relaxd(*words, "--run-id", "inside", timeout=180)
    assert code == 0, output
    run = services.start(*words, "--roles.reference.placement", "service", "--run-id", "apart")
    state = StateFolder(services.folder / ".relaxd")
    with CoordinatorClient(state.read().coordinator) as coordinator:

        def said() -> list[str]:
            return [one.status.detail for one in coordinator.replicas() if one.registration.role == ADVANTAGE]

        wait_until(lambda: said() == ["this run needs no advantage service"], "an advantage replica that is idle", 120)
    rest, _ = run.communicate(timeout=240)
    assert run.returncode == 0, rest

    runs = services.folder / "runs"
    inside, apart = metrics(runs / "inside"), metrics(runs / "apart")
    assert [step["step"] for step in apart] == [step["step"] for step in inside] == list(range(1, STEPS + 1))
    assert inside[-1]["kl"] > 1e-3
    for one, other in zip(inside, apart, strict=True):
        for name in ("loss", "kl", "grad_norm", "reward_mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), (one["step"], name)
    assert not {name for step in apart for name in step if "advantage_seconds" in name}
    for name in ("inside", "apart"):
        check_books(read_summary(runs / name), STEPS)
    code, output = services.relaxd("replay", "apart", "--step", str(STEPS))
    assert code == 0, output
    assert output.count("the same") >= 3, output
