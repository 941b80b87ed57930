"""A trainer whose ranks are on two hosts, which are two services on this machine."""

from pathlib import Path

from tests.integration.trainer.hosts.host_kit import trainer_over_hosts
from tests.integration.trainer.service_kit import make_config
from tests.kit.models import make_tiny_model


def test_two_hosts_train_what_one_host_trains(redis_url: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3")
    exports = []
    for hosts in (2, 1):
        config = make_config(model, trainer={"ranks": 2, "hosts": hosts}, board={"max_staleness": 0})
        with trainer_over_hosts(config, redis_url, tmp_path / f"run-{hosts}") as run:
            run.begin()
            run.train(3)
            run.check_books()
            exports.append(run.exported())
    assert exports[0] == exports[1]
