"""`relaxd doctor` as a command, and what other commands say of this machine before they start anything."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.integration.cli.command_kit import EXAMPLE, relaxd
from tests.kit.processes import ROOT

UNREACHABLE = "redis://:secret@127.0.0.1:1/0"


def test_it_says_what_is_well_and_what_is_not(tmp_path: Path) -> None:
    done = relaxd("doctor", cwd=tmp_path, REDIS_URL=UNREACHABLE)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("problem Redis: Redis at 127.0.0.1:1 does not answer") for line in lines)
    assert "        try: check that it runs and that REDIS_URL is right" in lines
    assert lines[-1].startswith("1 problem, ")
    assert "secret" not in done.stdout
    for about in ("system", "packages", "GPUs", "/dev/shm", "open files", "state folder", "port 50050", "services"):
        assert any(line[8:].startswith(f"{about}: ") for line in lines), about
    assert not any(tmp_path.iterdir())


def test_json_has_a_finding_in_each_line(tmp_path: Path) -> None:
    done = relaxd("doctor", str(EXAMPLE), "--run.folder", str(EXAMPLE), "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert {tuple(one) for one in findings} == {("level", "about", "found", "right", "how")}
    (folder,) = [one for one in findings if one["about"] == "run folder"]
    assert folder["level"] == "problem"
    assert folder["found"] == f"{EXAMPLE}: {EXAMPLE} is not a folder"
    assert folder["how"] == "--run.folder DIR"


def test_config_check_fails_on_a_machine_that_lacks_something(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "file").touch()
    words = ("config", "check", str(EXAMPLE), "--model.path", str(tiny_model), "--run.folder")
    done = relaxd(*words, "file", cwd=tmp_path)
    assert done.returncode == 1
    assert "run folder: " in done.stdout
    assert relaxd(*words, "runs", cwd=tmp_path).returncode == 0


def test_up_warns_first_and_names_who_has_its_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            ["bash", "-c", f"ulimit -Sn 500; exec {sys.executable} -m relaxd.cli up --port {port}"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    warning, right, command = done.stdout.splitlines()
    assert warning == "warning open files: 500 for each process (ulimit -n)"
    assert right.startswith("        right: at least 1024: ")
    assert command.startswith("        try: ulimit -n ")
    assert f"port {port} on 127.0.0.1 is taken by pid {os.getpid()}, " in done.stderr
