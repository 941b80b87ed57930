"""The environment and the secrets of the Helm chart's pods bring a stack up: here as processes, without Kubernetes."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CONFIG, REWARD
from tests.kit.helm_chart import HelmUnavailable, render_chart
from tests.kit.models import make_tiny_model
from tests.kit.ports import free_port
from tests.kit.processes import kill, start_python
from tests.kit.redis.redis_server import RedisServer

SERVICES = ("coordinator", "trainer", "rollout", "reward", "advantage")


@pytest.mark.night
@pytest.mark.timeout(300)
def test_pods_work_together_with_their_environments_and_secrets(tmp_path: Path) -> None:
    try:
        _, (rendered,) = render_chart({})
    except HelmUnavailable as error:
        pytest.skip(f"the chart is not rendered: {error}")
    secrets = rendered.documents["Secret", "r-secrets"]["stringData"]
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis", password=secrets["redis_password"]).start()
    ports = {role: free_port() for role in SERVICES}

    def environment(role: str) -> dict[str, str]:
        """Return the environment of a role's container, with this machine's files and addresses."""
        pod: dict[str, Any] = rendered.documents["Deployment", f"r-{role}"]["spec"]["template"]["spec"]
        folder = tmp_path / f"secrets-{role}"
        folder.mkdir()
        (volume,) = (one["secret"] for one in pod["volumes"] if one["name"] == "secrets")
        for item in volume["items"]:
            (folder / item["path"]).write_text(secrets[item["key"]])
        places = {
            "/run/relaxd": str(folder),
            "/models": str(tmp_path),
            "r-redis:6379": f"127.0.0.1:{redis.port}",
            "r-coordinator:50050": f"127.0.0.1:{ports['coordinator']}",
            "$(POD_IP):50051": f"127.0.0.1:{ports.get(role)}",
        }
        given = {one["name"]: one.get("value", "") for one in pod["containers"][0]["env"]}
        for there, here in places.items():
            given = {name: value.replace(there, here) for name, value in given.items()}
        image = {"RELAXD_HOST": "0.0.0.0", "RELAXD_PORT": str(ports.get(role, 0))}
        return given | (image if role in ports else {})

    make_tiny_model(tmp_path / "tiny")
    (tmp_path / "tiny_reward.py").write_text(REWARD)
    (tmp_path / "tiny.toml").write_text(CONFIG.format(steps=2, model=tmp_path / "tiny"))
    processes = []
    for role in SERVICES:
        log = tmp_path / f"{role}.log"
        given = environment(role)
        processes.append(start_python("-m", f"services.{role}", log=log, cwd=tmp_path, clean=True, environment=given))
    cli = environment("cli") | {"CI": "1"}
    words = ("-m", "relaxd.cli", "run", "tiny.toml", "--run-id", "r")
    log = tmp_path / "run.log"
    try:
        for word in (("-m", "relaxd.cli", "resume", "--wait", "60"), words):  # the first waits, and finds no run
            command = start_python(*word, log=log, cwd=tmp_path, clean=True, environment=cli)
            processes.append(command)
            code = command.wait(240)
        logs = "\n".join(file.read_text()[-2000:] for file in tmp_path.glob("*.log"))
        assert code == 0, logs
        assert "step 2/2" in log.read_text()
    finally:
        kill(*processes)
        redis.kill()
