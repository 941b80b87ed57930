"""The loading of a model is seen from outside, however the process reads its files."""

import subprocess
from pathlib import Path

import psutil
import pytest

from services.rollout.service.child_engine import loaded_mebibytes
from tests.kit.processes import start_python

MEBIBYTES = 32
LOADER = """
import mmap, os, sys
for line in sys.stdin:
    how, path = line.split()
    with open(path, "rb") as file:
        if how == "read":
            while file.read(1 << 20):
                pass
        else:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            touched = sum(mapped[place] for place in range(0, len(mapped), 4096))
    print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["read", "map"])
def test_whoever_reads_moves_and_whoever_hangs_does_not(how: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(bytes(MEBIBYTES << 20))
    # A grandchild, as SGLang's scheduler processes are.
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOADER!r}])"
    with start_python("-c", code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"read {tmp_path / 'model'}\n")
        child.stdin.flush()
        child.stdout.readline()  # it is up
        before = loaded_mebibytes(psutil.Process())
        assert loaded_mebibytes(psutil.Process()) == before
        child.stdin.write(f"{how} {model}\n")
        child.stdin.flush()
        child.stdout.readline()
        assert loaded_mebibytes(psutil.Process()) >= before + MEBIBYTES - 1
        child.stdin.close()
