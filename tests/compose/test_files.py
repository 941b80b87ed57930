"""The files for containers fit the code. Nothing here needs a Docker engine."""

import json
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from relaxd.local.compose import STOP_MARGIN_SECONDS
from relaxd.roles import ROLES
from relaxd.telemetry.metrics import METRICS
from tests.compose.stack import COMPOSE, ROOT

DASHBOARDS = sorted((COMPOSE / "config" / "grafana" / "dashboards").glob("*.json"))
SERVICES = {"console", *(role.module.split(".")[1] for role in ROLES.values())}
PASSED_ON = {
    *("RELAXD_ALERT_URLS", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY"),
    *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    *("CLEARML_API_HOST", "CLEARML_WEB_HOST", "CLEARML_FILES_HOST"),
    *("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"),
}
"""Variables of whoever calls compose that the coordinator gets."""
LAYERS = (
    "compose.yaml",
    "compose.yaml:compose.gpu.yaml",
    "compose.yaml:compose.gpu.yaml:compose.teacher.yaml",
    "compose.yaml:compose.data.yaml",
    "compose.yaml:compose.observability.yaml",
    "compose.yaml:compose.scaling.yaml",
    "compose.yaml:compose.tls.yaml",
    "compose.yaml:compose.scaling.yaml:compose.tls.yaml:compose.scaling.tls.yaml",
    "compose.yaml:compose.gpu.yaml:compose.observability.yaml:compose.scaling.yaml:compose.scaling.observability.yaml",
)


def settings() -> dict[str, str]:
    """deploy/compose/.env."""
    lines = (COMPOSE / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def compose_config(files: str, **variables: str) -> dict[str, Any]:
    """What compose makes of files, with .env and `variables` set and nothing else; skips where there is no compose."""
    environment = {name: value for name, value in os.environ.items() if name not in settings()}
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("docker has no compose plugin")
    done = subprocess.run(
        ["docker", "compose", "--profile", "*", "config", "--format", "json"],
        cwd=COMPOSE,
        env=environment | {"COMPOSE_FILE": files} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "variable is not set" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("files", LAYERS)
def test_each_combination_of_files_is_valid(files: str) -> None:
    services = compose_config(files)["services"]
    for name, service in services.items():
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert service["networks"].keys() == {"relaxd"}, name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
        if name not in ("secrets", "model-fetch", "cli", "demo"):
            assert service["restart"] == "unless-stopped", name
            assert service["deploy"]["resources"]["limits"]["memory"], name
        assert service.get("user") != "root" or name == "secrets"
    published = {name for name, service in services.items() if "ports" in service}
    assert published == {"coordinator", "console"} | ({"grafana", "jaeger"} if "observability" in files else set())
    for name in ("trainer", "ranks", "rollout", "reference", "teacher", "critic", "judge"):
        devices = services[name]["deploy"]["resources"].get("reservations", {}).get("devices", [])
        assert bool(devices) == ("gpu" in files)
        assert (services[name].get("ipc") == "host") == ("gpu" in files)


@pytest.mark.parametrize("files", LAYERS)
def test_a_container_can_do_little_more_than_it_needs(files: str) -> None:
    for name, service in compose_config(files)["services"].items():
        on_gpus = "gpu" in files and name in ("trainer", "ranks", "rollout", "reference", "teacher", "critic", "judge")
        assert service["cap_drop"] == ["ALL"], name
        assert service.get("cap_add", []) == (["CHOWN", "DAC_OVERRIDE", "FOWNER"] if name == "secrets" else []), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only", False) != on_gpus, name  # there, kernels are compiled at run time
        assert service["deploy"]["resources"]["limits"]["pids"] == (32768 if on_gpus else 4096), name
        # Small temporary files are in memory, where a service may have large ones they are on disk.
        places = [mount["target"] for mount in service.get("volumes", ()) if mount.get("source") is None]
        on_disk = name in ("coordinator", "cli", "model-fetch", "demo")
        torch = name in ("trainer", "ranks", "rollout", "reference", "teacher", "critic", "judge")
        in_memory = [] if on_disk else ["/tmp:exec" if torch else "/tmp"]
        assert (places, service.get("tmpfs", [])) == (["/tmp"] if on_disk else [], in_memory), name
        assert not service.get("privileged"), name


@pytest.mark.parametrize("files", LAYERS)
def test_each_service_has_its_own_secrets_and_no_others(files: str) -> None:
    """They find them in volumes that are filled before them, and none of relaxd's is in a file or in a variable."""
    services = compose_config(files)["services"]
    mounted = {
        name: {
            mount["source"]: (mount["target"], mount.get("read_only", False))
            for mount in service.get("volumes", ())
            if mount["type"] == "volume" and mount.get("source", "").startswith("secrets")
        }
        for name, service in services.items()
    }
    without = {"model-fetch", "otel-collector", "jaeger", "loki", "prometheus"} & services.keys()
    assert {name for name, volumes in mounted.items() if not volumes} == without
    own = {"demo": "cli", "data-1": "redis", "data-2": "redis"}
    owners = {own.get(name, name) for name in services.keys() - without - {"secrets"}}
    assert mounted.pop("secrets") == {
        "secrets": ("/run/all", False),
        **{f"secrets-{owner}": (f"/run/relaxd/{owner}", False) for owner in owners},
    }
    for name in mounted.keys() - without:
        assert mounted[name] == {f"secrets-{own.get(name, name)}": ("/run/relaxd", True)}, name
        waits_for = {name}
        while not waits_for >= (more := {other for one in waits_for for other in services[one].get("depends_on", ())}):
            waits_for |= more
        assert "secrets" in waits_for, name
    for name, service in services.items():
        for variable, value in service.get("environment", {}).items():
            if any(word in variable for word in ("TOKEN", "PASSWORD")) and variable not in PASSED_ON:
                assert re.fullmatch(r"/run/relaxd/\w+", value), f"{name}: {variable}"
    assert "requirepass" in services["redis"]["command"][-1]
    assert "ports" not in services["redis"]


def test_only_the_coordinator_gets_the_secrets_of_notifications_and_trackers() -> None:
    passed_on = {
        (name, variable): value
        for file in COMPOSE.glob("compose*.yaml")
        for name, service in yaml.safe_load(file.read_text())["services"].items()
        for variable, value in (service.get("environment") or {}).items()
        if variable in PASSED_ON
    }
    assert passed_on == {("coordinator", variable): None for variable in PASSED_ON}  # None: without a value in the file


def test_compose_passes_on_only_variables_that_are_set() -> None:
    environment = compose_config("compose.yaml", WANDB_API_KEY="hunter2")["services"]["coordinator"]["environment"]
    passed_on = {name: value for name, value in environment.items() if name in PASSED_ON and value is not None}
    assert passed_on == {"WANDB_API_KEY": "hunter2"}


def test_only_what_uses_redis_gets_its_password() -> None:
    services = compose_config("compose.yaml:compose.scaling.yaml")["services"]
    given = {name for name, one in services.items() if "RELAXD_REDIS_PASSWORD_FILE" in (one.get("environment") or {})}
    assert given == {*ROLES, "launcher"} - {"judge"}


def test_redis_has_time_to_read_its_file() -> None:
    for name in ("redis", "data-1", "data-2"):
        healthcheck = compose_config("compose.yaml:compose.data.yaml")["services"][name]["healthcheck"]
        assert seconds(healthcheck["start_period"]) == 120


def test_every_service_exports_to_the_collector() -> None:
    files = ("compose.observability.yaml", "compose.scaling.observability.yaml")
    environments = {
        name: service["environment"]
        for file in files
        for name, service in yaml.safe_load((COMPOSE / file).read_text())["services"].items()
        if "OTEL_EXPORTER_OTLP_ENDPOINT" in service.get("environment", {})
    }
    assert environments.keys() == {*ROLES, "coordinator", "launcher"}
    assert {one["OTEL_EXPORTER_OTLP_ENDPOINT"] for one in environments.values()} == {"http://otel-collector:4317"}
    collector = yaml.safe_load((COMPOSE / "config" / "otel" / "collector.yaml").read_text())
    assert collector["service"]["pipelines"].keys() == {"traces", "metrics", "logs"}
    for pipeline in collector["service"]["pipelines"].values():
        assert {*pipeline["exporters"]} <= collector["exporters"].keys()
    assert collector["exporters"]["prometheus"]["enable_open_metrics"], "no exemplars otherwise"


def test_redis_is_full_before_its_container_is() -> None:
    redis = compose_config("compose.yaml")["services"]["redis"]
    limit = int(redis["deploy"]["resources"]["limits"]["memory"])
    maxmemory = re.search(r"redis-server \S+ --maxmemory (\d+)gb\n", redis["command"][-1])
    assert maxmemory, redis["command"]
    assert limit >= 3 * int(maxmemory[1]) * 2**30


def seconds(duration: str) -> float:
    """A duration of compose's, such as 2m15s, in seconds."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


@pytest.mark.parametrize("files", LAYERS)
def test_docker_waits_longer_than_a_service_drains(files: str) -> None:
    services = compose_config(files, GRACE_SECONDS="50", ROLLOUT_GPU_GRACE_SECONDS="250.5")["services"]
    drains = {
        name: (float(service["environment"]["RELAXD_GRACE_SECONDS"]), seconds(service["stop_grace_period"]))
        for name, service in services.items()
        if name in ROLES
    }
    for name in ("rollout", "judge"):
        assert drains.pop(name) == ((250.5, 265.5) if "gpu" in files else (50, 65))
    assert set(drains.values()) == {(50, 50 + STOP_MARGIN_SECONDS)}


@pytest.mark.parametrize("file", sorted(COMPOSE.glob("compose*.yaml")), ids=lambda path: path.name)
def test_every_setting_is_in_the_env_file_with_the_same_default(file: Path) -> None:
    known = settings()
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", file.read_text()):
        assert known.get(name) == default, f"{file.name} has {name} = {default!r}, .env {known.get(name)!r}"
    assert not re.findall(r"(?<!\$)\$\{\w+\}", file.read_text()), "a setting without a default"


def test_every_setting_of_the_env_file_is_used() -> None:
    text = "".join(file.read_text() for file in COMPOSE.glob("compose*.yaml"))
    unused = [name for name in settings() if f"${{{name}:-" not in text]
    assert unused == ["COMPOSE_FILE"]


def expressions(dashboard: Any) -> Iterator[str]:
    """Every PromQL expression of a dashboard."""
    if isinstance(dashboard, dict):
        for key, value in dashboard.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(dashboard, list):
        for value in dashboard:
            yield from expressions(value)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_name_metrics_and_attributes_that_there_are(file: Path) -> None:
    exported: set[str] = set()
    labels = {"run", "service_name", "service_instance_id", "le"}
    for metric in METRICS.values():
        name = metric.exported_name.replace(".", "_")
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(metric.kind, ("",))
        exported |= {f"{name}{suffix}" for suffix in suffixes}
        labels |= {attribute.replace(".", "_") for attribute in metric.attributes}
    used: set[str] = set()
    for text in expressions(json.loads(file.read_text())):
        used |= set(re.findall(r"\b(?:relaxd|rpc)_\w+", text))
        for group in re.findall(r"by \(([^)]*)\)", text):
            assert {label.strip() for label in group.split(",")} <= labels | {"relaxd_run_id"}, text
    assert used - labels <= exported | {"relaxd_run_id"}
    for wanted in ("relaxd_queue_waiting", "relaxd_staleness_bucket", "relaxd_step_reward_mean"):
        assert wanted in used
    assert "relaxd_sync_seconds_bucket" in used


def test_locks_of_the_images_are_current() -> None:
    lock = runpy.run_path(str(ROOT / "requirements" / "generate.py"))
    for image in lock["IMAGES"]:
        assert (ROOT / "requirements" / f"{image}.lock").read_text() == lock["lock"](image), (
            f"requirements/{image}.lock is out of date: python requirements/generate.py"
        )
    assert (ROOT / "requirements" / "torch-build.lock").read_text() == lock["torch_lock"]()


def test_images_install_only_what_has_the_digests_of_its_lock() -> None:
    """Except torch, whose builds differ: it comes last, when its lock has brought everything else."""
    for file in [*ROOT.glob("services/*/Dockerfile"), ROOT / "relaxd" / "cli" / "Dockerfile"]:
        text = file.read_text().replace("\\\n", " ")
        for command in re.findall(r"pip --python /venv/bin/python install (.*?)(?:&&|\|\||$)", text, re.MULTILINE):
            assert "--require-hashes --no-deps --requirement /requirements/" in " ".join(command.split()) or (
                command.split()[-2:] == ["--requirement", "$build"]
            ), f"{file}: {command}"
    for path in (ROOT / "requirements").glob("*-build.lock"):
        assert re.fullmatch(r"#.*\ntorch==[\d.]+\n", path.read_text())


def test_no_small_image_gets_torch() -> None:
    for image in ("core", "coordinator"):
        text = (ROOT / "requirements" / f"{image}.lock").read_text().lower()
        assert "torch==" not in text
        assert "transformers==" not in text


def test_the_coordinator_can_notify_and_has_every_tracker() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {re.split("[<>=]", text)[0] for extra in ("alerts", "trackers") for text in extras[extra]}
    lock = (ROOT / "requirements" / "coordinator.lock").read_text()
    assert wanted == {"apprise", "tensorboard", "wandb", "clearml"}
    assert wanted <= set(re.findall(r"^([\w-]+)==", lock, re.MULTILINE))


def test_every_service_has_an_image_and_its_command() -> None:
    for service in SERVICES:
        text = (ROOT / "services" / service / "Dockerfile").read_text()
        assert f'ENTRYPOINT ["python", "-m", "services.{service}"]' in text
        assert "\nUSER relaxd\n" in text
        assert "# syntax=" not in text
        others = set(SERVICES) - {service}
        assert not [other for other in others if f"COPY services/{other} " in text]


def test_every_role_has_a_compose_service_that_runs_its_module() -> None:
    services = compose_config("compose.yaml")["services"]
    for role in ROLES.values():
        service = services[role.name]
        image = ["python", "-m", f"services.{service['image'].partition('/')[2].partition(':')[0]}"]
        assert (service.get("entrypoint") or image)[-1] == role.module
        assert service.get("profiles", []) == ([] if role.replicas else [role.name])


def test_a_teacher_with_an_engine_has_the_image_of_the_rollout_service() -> None:
    services = compose_config("compose.yaml:compose.gpu.yaml:compose.teacher.yaml")["services"]
    assert services["teacher"]["entrypoint"][-1] == ROLES["teacher"].modules["sglang"]
    rollout, teacher = services["rollout"], services["teacher"]
    assert teacher["image"] == rollout["image"]
    assert teacher["build"]["dockerfile"] == rollout["build"]["dockerfile"]
    assert rollout["build"]["args"].items() <= teacher["build"]["args"].items()
