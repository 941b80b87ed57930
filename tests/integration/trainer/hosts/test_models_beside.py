"""Reference, teacher and critic in a trainer's ranks on two hosts, which are two services on this machine."""

from pathlib import Path
from typing import Any

import pytest

from relaxd.run_folder import checkpoint_steps
from tests.integration.trainer.hosts.host_kit import TrainerOverHosts, ranks_ended, trainer_over_hosts
from tests.integration.trainer.service_kit import make_config
from tests.kit.models import make_tiny_model
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]
ROLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "reference": ({"refresh_every": 2}, {"kl_coef": 0.3, "kl_estimator": "k2"}, "kl"),
    "teacher": (
        {"placement": "trainer"},
        {"name": "opd", "old_logprobs": "current", "distill_coef": 0.0, "distill_loss_coef": 1.0},
        "teacher_kl",
    ),
    "critic": ({}, {"name": "ppo", "old_logprobs": "current"}, "value_loss"),
}
"""Each role's settings, those of its algorithm, and a metric that comes from its model."""
LAYOUTS: dict[str, dict[str, int]] = {"dp2": {}, "pp2": {"pipeline_parallel": 2}}


def lose_other_host(run: TrainerOverHosts, folder: Path) -> None:
    """Kill the other host, once there is a checkpoint of step 2, and start it again."""
    wait_until(lambda: checkpoint_steps(folder) == [2], "the checkpoint of step 2")
    (host,) = run.hosts
    (rank,) = host.rank_pids()
    host.kill()
    ranks_ended([rank])
    host.start()
    run.again()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ROLES)
def test_models_beside_the_trained_one_are_those_of_one_host(
    role: str, layout: str, redis_url: str, tmp_path: Path
) -> None:
    """Bit for bit, also after one of two hosts was killed and all models were loaded from a checkpoint."""
    model = make_tiny_model(tmp_path / "model", architecture="qwen3")
    settings, algorithm, metric = ROLES[role]
    if role == "teacher":
        settings = settings | {"model": str(make_tiny_model(tmp_path / "teacher", architecture="llama", seed=7))}
    exports, metrics = [], []
    for hosts in (2, 1):
        config = make_config(
            model,
            run={"steps": 4},
            trainer={"ranks": 2, "hosts": hosts, "checkpoint": {"every": 2}, **LAYOUTS[layout]},
            board={"max_staleness": 0, "lease_seconds": 30},
            algorithm=algorithm,
            roles={role: settings},
        )
        folder = tmp_path / f"run-{hosts}"
        with trainer_over_hosts(config, redis_url, folder) as run:
            run.begin()
            run.train(3)
            if hosts == 2:
                lose_other_host(run, folder)
            run.train(1)
            run.check_books()
            metrics.append([entry.metrics[metric] for entry in run.feeder.board.ledger()])
            exports.append(run.exported())
    assert any(metrics[0])
    assert metrics[0] == metrics[1]
    assert exports[0] == exports[1]
