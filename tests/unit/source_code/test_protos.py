"""The protos are clean and the stubs in relaxd/v1 are made from them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def test_the_stubs_are_current(tmp_path):
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *outputs, *protos],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        check=True,
        timeout=120,
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "relaxd" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "relaxd" / "v1").glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed), "run: make protos"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run: make protos"


def test_buf_has_nothing_to_say():
    lint = subprocess.run([BIN / "buf", "lint"], cwd=ROOT / "protos", capture_output=True, text=True, timeout=120)
    assert (lint.returncode, lint.stdout) == (0, "")
