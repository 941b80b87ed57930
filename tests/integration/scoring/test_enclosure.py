"""What reward workers can't do, with and without namespaces, and what they still can."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from relaxd.sandbox import landlock
from services.reward.enclosure import NEEDED
from tests.kit.processes import ROOT, run_python
from tests.kit.waiting import wait_until

ESCAPING = "escaping_rewards:by_response"
FORK_BOMB = """
import os, signal
from relaxd.sandbox.enclosure import Plan, enclose
measures = {one.name: one.by for one in enclose(Plan(processes=20))}
children = []
try:
    while len(children) < 200:
        child = os.fork()
        if not child:
            os.setsid()
            signal.pause()
        children.append(child)
except BlockingIOError:
    pass
print(measures["processes"] and len(children))
"""

pytestmark = pytest.mark.skipif(not landlock.version(), reason="needs Landlock")


@pytest.fixture(params=[False, True], ids=["namespaces", "none"])
def forbid(request: pytest.FixtureRequest) -> bool:
    """Whether the kernel forbids namespaces."""
    return request.param


def score(*responses: str | dict[str, Any], forbid: bool, secret_files: list[str] | None = None, **config: Any) -> Any:
    """Score responses, or samples, in one worker after another; see `tests.integration.scoring.enclosed`."""
    asked = {
        "config": {"name": ESCAPING, **config},
        "samples": [{"prompt": "", "response": one} if isinstance(one, str) else one for one in responses],
        "secret_files": secret_files or [],
        "forbid": forbid,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.scoring.enclosed"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "private files" in found["measures"] and not forbid and not found["measures"]["private files"]:
        pytest.skip("this machine allows no namespaces")
    return found


def test_the_network_is_there_only_if_asked_for(forbid):
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = [f"connect {server.getsockname()[1]}", "resolve relaxd.invalid", "one"]
        found = score(*asked, forbid=forbid)
        assert found["outcomes"][2] == 1.0
        for reason in found["outcomes"][:2]:
            assert reason.endswith("; a reward needs the network: set reward.network = true")
        assert score(asked[0], forbid=forbid, network=True)["outcomes"] == [1.0]


def test_secrets_cannot_be_read_and_little_can_be_written(forbid, tmp_path):
    (secrets := tmp_path / "secrets").mkdir(mode=0o700)
    beside = tmp_path / "beside"
    for file in (secrets / "reward.token", secrets / "admin.token", key := tmp_path / "judge.key", beside):
        file.write_text("secret")
    (own := tmp_path / "own").mkdir()
    link = tmp_path / "link"
    link.symlink_to(secrets / "reward.token")
    to_read = (secrets / "reward.token", secrets / "admin.token", link, key, beside)
    to_write = (beside, tmp_path / "new", secrets / "new", Path("/var/tmp/relaxd-new"), own / "new")
    others = ("temporary 1048576", f"environment-of {os.getpid()}", f"signal {os.getpid()}", "unshare")
    found = score(
        *(*(f"read {path}" for path in to_read), *(f"write {path}" for path in to_write), *others),
        forbid=forbid,
        secret_files=[str(link), str(key)],
        writable=[str(own)],
        settings={"data": str(tmp_path)},  # a private /tmp would hide it
    )
    *read, beside_read = found["outcomes"][:5]
    *written, in_own = found["outcomes"][5:10]
    temporary, *refused = found["outcomes"][10:]
    assert len(read) == 4
    for reason in read:
        assert reason.startswith("PermissionError: [Errno 13] Permission denied:"), reason
    assert (beside_read, in_own, temporary) == (1.0, 1.0, 1.0)
    for reason in written:
        assert "name what else they write, or its folder, in reward.writable (here " in reason
    assert (own / "new").read_text() == "written"
    assert beside.read_text() == "secret"
    for reason in refused:
        assert "Error" in reason


def test_a_memory_bomb_ends_only_its_sample(forbid):
    found = score("allocate 3000000000", "one", "allocate 300000000", forbid=forbid, worker_memory_bytes=1 << 30)
    bomb, *others = found["outcomes"]
    assert bomb.startswith("MemoryError")
    assert bomb.endswith("; a process of a reward has at most 1073741824 bytes: raise reward.worker_memory_bytes")
    assert others == [1.0, 1.0]


def test_a_private_tmp_is_bounded():
    full, one = score("temporary 1500000000", "temporary 1048576", forbid=False)["outcomes"]
    assert full.endswith("; a worker's /tmp has 1073741824 bytes: for more, name a folder in reward.writable")
    assert one == 1.0


def test_processes_that_left_the_workers_group_end_with_it(tmp_path):
    (never := tmp_path / "never").touch()
    assert score(f"leave-sessions {never}", "one", forbid=False)["outcomes"] == [1.0, 1.0]

    def left() -> bool:
        return any(str(never) in one.info["cmdline"] for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"])

    wait_until(lambda: not left(), "the processes are gone")


def test_a_fork_bomb_is_bounded():
    done = run_python("-c", FORK_BOMB)
    if done.stdout.strip() == "":
        pytest.skip("this machine lets nobody limit processes")
    assert done.returncode == 0, done.stderr
    assert 10 < int(done.stdout) < 20


def test_rewards_start_processes_and_code_runs_in_its_own_sandbox(forbid):
    assert score("use", forbid=forbid)["outcomes"] == [1.0]
    tests = json.dumps({"inputs": ["3", "4"], "outputs": ["9", "16"]})
    right, wrong = (
        {"prompt": "", "response": f"```python\nprint(int(input()) {power})\n```", "answer": tests}
        for power in ("** 2", "* 3")
    )
    assert score(right, wrong, forbid=forbid, name="code")["outcomes"] == [1.0, 0.0]


def test_what_the_run_asks_for_is_required_or_left_out(forbid, tmp_path):
    found = score("one", forbid=forbid, sandbox="required")
    missing = [name for name in NEEDED if not found["measures"][name]]
    assert not forbid or missing == ["processes"]
    if missing:
        assert found["outcomes"] == []
        assert found["error"].startswith(
            'reward.sandbox is "required", but this machine does not let workers be limited in processes: '
        )
    else:
        assert found["outcomes"] == [1.0]
    found = score(f"write {tmp_path / 'new'}", forbid=forbid, sandbox="off")
    assert (found["outcomes"], found["measures"]) == ([1.0], {})
    assert (tmp_path / "new").exists()


def test_a_process_ends_as_its_worker_does():
    program = "import os, sys\nfrom relaxd.sandbox.enclosure import Plan, enclose\nenclose(Plan())\n"
    assert run_python("-c", program + "os._exit(7)").returncode == 7
    assert run_python("-c", program + "os.kill(os.getpid(), 11)").returncode == -signal.SIGSEGV
