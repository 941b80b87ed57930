"""A trainer over two hosts, which are two containers on one network of Docker."""

import pytest

from relaxd.config.load_toml import load_file
from relaxd.config.write_toml import dump
from tests.compose.stack import Run, Stack, running

pytestmark = [pytest.mark.night, pytest.mark.timeout(1800)]
SETTINGS = {"run.steps": "2", "eval.prompts": "0", "trainer.ranks": "2", "trainer.hosts": "2"}


def test_two_containers_train_as_two_hosts(stack: Stack) -> None:
    words = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    file = stack.examples / "hosts.toml"
    file.write_text(dump(load_file(stack.examples / "tiny.toml", words)))
    file.chmod(0o644)
    with running(stack, {"COMPOSE_PROFILES": "ranks", "CONSOLE_REPLICAS": "0"}):
        (host,) = stack.replicas("ranks")
        networks = [
            set(one["NetworkSettings"]["Networks"]) for name in ("trainer", "ranks") for one in stack.containers(name)
        ]
        assert networks == [{f"{stack.name}_relaxd"}] * 2
        stack.compose("cp", str(stack.examples.parent / "tiny"), "coordinator:/models/")
        Run(stack, "examples/hosts.toml", "--run-id", "hosts").finish()
        run = stack.run()
        assert (run.step, run.groups.trained) == (2, 8)
        assert f"ranks are on this host and on {host.registration.replica_id}, over eth0" in stack.compose(
            "logs", "trainer"
        )
        assert "ranks 1 to 1 of" in stack.compose("logs", "ranks")
