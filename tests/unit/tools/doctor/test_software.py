"""Packages, Docker, the sandbox and the services' versions."""

import importlib.metadata
import json
import venv
from pathlib import Path

import pytest

from relaxd import PROTOCOL_VERSION, __version__
from relaxd.config import TrackingConfig
from relaxd.config.load_toml import load
from relaxd.local.state_folder import StateFolder
from relaxd.rewards.table import PACKAGES
from relaxd.sandbox.enclosure import Measure
from relaxd.tools.doctor import Scope
from relaxd.tools.doctor.checks import CHECKS, examine
from relaxd.tools.doctor.host import answers_finding, check_sandbox, enclosure_finding
from relaxd.tools.doctor.packages import (
    OPTIONAL,
    SERVICES,
    Requirement,
    check_optional_packages,
    extras_of,
    package_finding,
    parse,
    requirements,
    trackers_finding,
)
from relaxd.tools.doctor.packages import TRACKER_PACKAGES as TRACKERS
from relaxd.tools.doctor.services import check_docker, engine_findings, image_findings, status_findings
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED, ReplicaStatus
from tests.kit.cases import each

RUN = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
"""
WITHOUT_ENGINE = json.loads('{"ServerVersion":"","Runtimes":null,"ClientInfo":{"Version":"28.2.2","Plugins":[]}}')
WITH_ENGINE = {
    "ServerVersion": "28.2.2",
    "Runtimes": {"runc": {}},
    "ClientInfo": {"Plugins": [{"Name": "compose", "Version": "v2.36.2"}]},
}


@each(
    ("text", "installed", "problem"),
    [
        ("torch>=2.11,<2.14", "2.13.0+cpu", ""),
        ("torch>=2.11,<2.14", "2.14.0", "torch 2.14.0 is not >=2.11,<2.14"),
        ("torch<2.14,>=2.11; extra == 'trainer'", "2.10.1", "torch 2.10.1 is not <2.14,>=2.11"),
        ("megatron-core==0.16.1", "0.16.1", ""),
        ("megatron-core==0.16.1", None, "megatron-core is missing"),
        ("sglang==0.5.15.post1", "0.5.15", "sglang 0.5.15 is not ==0.5.15.post1"),
        ("redis[hiredis]>=7", "7.0.0", ""),
        ("types-protobuf", "1", ""),
        ("PyYAML (>=6) ; extra == 'migrate'", "5.4", "PyYAML 5.4 is not >=6"),
    ],
)
def test_versions(text: str, installed: str | None, problem: str) -> None:
    assert parse(text).problem(installed) == problem


def test_what_is_missing_gets_a_command() -> None:
    required = {"": [parse("grpcio>=1")], "trainer": [parse("no-such-package==1.2"), parse("torch>=99")]}
    finding = package_finding("packages", required, ["trainer"])
    assert finding.level == "problem"
    assert finding.how == "pip install 'no-such-package==1.2' 'torch>=99'"
    assert package_finding("packages", {"": [parse("torch>=99")]}, []).level == "warning"
    assert package_finding("packages", {}, []).level == "ok"


def test_requirements_are_those_of_the_project() -> None:
    required = requirements()
    assert {*SERVICES, *OPTIONAL} <= set(required)
    assert Requirement("megatron-core", "==0.16.1") in required["trainer"]
    assert package_finding("packages", required, SERVICES).level == "ok"
    installed = [parse(line).name for line in importlib.metadata.requires("relaxd") or []]
    assert set(installed) == {one.name for extra in required.values() for one in extra}
    assert {requirement for _, requirement in PACKAGES.values()} <= {f"relaxd[{extra}]" for extra in required}


def test_a_run_needs_what_its_roles_and_rewards_need() -> None:
    assert extras_of(load(RUN)) == ["coordinator", "reward", "advantage", "rollout", "trainer"]
    config = load(RUN.replace('reward.name = "addition"', 'reward.name = "boxed_ifeval"\nrollout.engine = "sglang"'))
    assert extras_of(config) == ["coordinator", "reward", "advantage", "sglang", "trainer", "ifeval"]
    assert extras_of(load(RUN + 'data.media_keys = {image = "images"}\n'))[-1] == "media"
    assert extras_of(load(RUN + 'data.media_keys = {video = "videos"}\n'))[-2:] == ["media", "video"]


def test_optional_packages_are_no_problem(tmp_path: Path) -> None:
    first, *others = check_optional_packages(Scope(folder=StateFolder(tmp_path)))
    assert first.level == ("ok" if first.found == "complete" else "absent")
    assert {one.level for one in others} <= {"warning"}


def test_the_interpreter_of_trackers_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    bare, old = str(tmp_path / "bare" / "bin" / "python"), tmp_path / "old"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    (tmp_path / "wandb").mkdir()  # W&B leaves such a folder, which is no package
    for trackers, python, level, found, how in (
        (("tensorboard",), "", "ok", "has what tensorboard need", ""),
        (("mlflow", "own.py:Own"), bare, "ok", "has what mlflow, own.py:Own need", ""),
        (("wandb", "mlflow"), bare, "problem", f"{bare} has no wandb", f"{bare} -m pip install 'wandb>="),
        (("wandb",), "/no/python", "problem", "/no/python (tracking.python) can't be used", "set tracking.python"),
        (("wandb",), str(old), "problem", "is Python 3.9", "set tracking.python"),
    ):
        more = {"mlflow_url": "http://mlflow:5000"} if "mlflow" in trackers else {}
        finding = trackers_finding(TrackingConfig(trackers=trackers, python=python, **more))
        assert (finding.level, found in finding.found) == (level, True), finding
        assert finding.how.startswith(how), finding
    assert set(TRACKERS) - {"trackio"} == {one.name for one in requirements()["trackers"]}  # it wants an older Pillow


@pytest.mark.parametrize(
    ("info", "needed", "gpus", "expected"),
    [
        (WITHOUT_ENGINE, False, 0, {"docker": "absent", "docker compose": "absent"}),
        (WITHOUT_ENGINE, True, 0, {"docker": "problem", "docker compose": "problem"}),
        (WITH_ENGINE, True, 0, {"docker": "ok", "docker compose": "ok"}),
        (WITH_ENGINE, True, 2, {"docker": "ok", "docker GPUs": "problem", "docker compose": "ok"}),
        (WITH_ENGINE | {"Runtimes": {"nvidia": {}}}, True, 2, {"docker": "ok", "docker compose": "ok"}),
    ],
)
def test_docker(info: dict, needed: bool, gpus: int, expected: dict[str, str]) -> None:
    error = "" if info["ServerVersion"] else "Cannot connect to the Docker daemon"
    assert {one.about: one.level for one in engine_findings(info, error, needed, gpus)} == expected


def test_containers_to_be_started_need_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for containers, level in ((False, "absent"), (True, "problem")):
        findings = check_docker(Scope(folder=StateFolder(tmp_path), containers=containers))
        assert [(one.about, one.level) for one in findings] == [("docker", level)]
    assert [one.about for one in examine(Scope(folder=StateFolder(tmp_path), containers=True), "compose")] == ["docker"]
    assert list(examine(Scope(folder=StateFolder(tmp_path)), "compose")) == [], "what is absent concerns no command"


def test_images() -> None:
    (finding,) = image_findings(["relaxd/trainer:dev", "redis:8-alpine"])
    assert finding.found.startswith("there: relaxd/trainer:dev; not built: relaxd/advantage, relaxd/agent, ")


def test_this_kernel_confines_rewards(tmp_path: Path) -> None:
    findings = list(check_sandbox(Scope(folder=StateFolder(tmp_path))))
    assert [one.about for one in findings] == ["sandbox of answers", "enclosure of rewards"]
    assert "problem" not in {one.level for one in findings}


def test_what_the_enclosure_lacks_is_said() -> None:
    held = [Measure(name, "seccomp") for name in ("network", "memory", "processes", "kernel")]
    assert enclosure_finding([*held, Measure("user", missing="only root can change it")], False).level == "ok"
    lacking = [*held, Measure("files", missing="no Landlock")]
    assert enclosure_finding(lacking, False).level == "warning"
    assert "but not files: no Landlock" in enclosure_finding(lacking, False).found
    assert enclosure_finding(lacking, True).level == "problem"
    assert "Linux 6.12" in answers_finding(4).found
    assert "Linux 6.12" not in answers_finding(6).found


def test_services_of_other_versions_are_named() -> None:
    ours = {"package_version": __version__, "protocol_version": PROTOCOL_VERSION}
    statuses = [
        ReplicaStatus(replica_id="coordinator", role="coordinator", **ours),
        ReplicaStatus(replica_id="rollout-1", role="rollout", **ours),
        ReplicaStatus(replica_id="rollout-2", role="rollout", state=REPLICA_STATE_FAILED, detail="no memory", **ours),
        ReplicaStatus(replica_id="reward", role="reward", package_version="0.0.9", protocol_version=PROTOCOL_VERSION),
        ReplicaStatus(replica_id="old", role="reward", package_version="0.0.1", protocol_version=1),
    ]
    found = [(one.about, one.level) for one in status_findings(statuses)]
    assert found == [("rollout-2", "problem"), ("reward", "warning"), ("old", "problem"), ("services", "ok")]
    *_, services = status_findings(statuses)
    assert services.found == "up: coordinator, rollout 2, reward 2"


def test_what_commands_check_by_themselves_is_short_of_what_is_well(tmp_path: Path) -> None:
    scope = Scope(folder=StateFolder(tmp_path), patience_seconds=0.3)
    assert all(finding.level != "ok" for finding in examine(scope, "up"))
    assert {moment for check in CHECKS for moment in check.moments} == {"config", "run", "up", "compose"}
