"""The protos are clean and the stubs in relaxd/v1 are made from them."""

import os
import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from relaxd.board import DropReason
from relaxd.reasons import FINISH_MEANINGS, TRUNCATED
from relaxd.rpc.message_parts import words
from relaxd.v1 import coordinator_pb2, group_pb2, health_pb2, sample_pb2, scaling_pb2
from services.coordinator.state import records
from tests.kit.processes import run_python

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def test_the_stubs_are_current(tmp_path):
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy")]
    path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    made = run_python("-m", "grpc_tools.protoc", "-Iprotos", *outputs, *protos, environment=path)
    assert made.returncode == 0, made.stderr
    fresh = {path.name: path.read_text() for path in (tmp_path / "relaxd" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "relaxd" / "v1").glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed), "run: make protos"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run: make protos"


def test_buf_has_nothing_to_say():
    lint = subprocess.run([BIN / "buf", "lint"], cwd=ROOT / "protos", capture_output=True, text=True, timeout=120)
    assert (lint.returncode, lint.stdout) == (0, "")


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (DropReason, group_pb2.DropReason, "DROP_REASON_"),
        (records.Outcome, coordinator_pb2.RunOutcome, "RUN_OUTCOME_"),
        (records.Health, health_pb2.HealthState, "HEALTH_STATE_"),
        (records.Direction, scaling_pb2.ScaleDirection, "SCALE_DIRECTION_"),
        (records.ScaleState, scaling_pb2.ScaleState, "SCALE_STATE_"),
    ],
)
def test_enums_of_records_are_those_of_the_protos(ours: type[StrEnum], theirs: Any, prefix: str):
    named = {name.removeprefix(prefix) for name in theirs.DESCRIPTOR.values_by_name}
    assert named == {*ours.__members__, "UNSPECIFIED"}
    assert {one.value.upper() for one in ours} == set(ours.__members__)


def test_finish_reasons_are_those_of_the_proto():
    assert set(words(sample_pb2.FinishReason).values()) == {*FINISH_MEANINGS, ""}
    assert FINISH_MEANINGS.keys() >= TRUNCATED


def test_the_scripts_of_the_board_drop_for_known_reasons():
    scripts = "".join(path.read_text() for path in (ROOT / "relaxd" / "board" / "lua").rglob("*.lua"))
    calls = re.findall(r"\bdrop\(((?:[^()]|\([^()]*\))*)\)", scripts)
    given = {reason for call in calls for reason in re.findall(r"'([a-z_]{2,})'", call)}
    assert given == {"poison", "damaged", "memory", "payload_lost"}
    assert given <= set(DropReason)
