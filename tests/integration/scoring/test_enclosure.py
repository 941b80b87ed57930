"""What reward workers can't do, with and without a namespace of users, and what they still can."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from relaxd.local.stack import make_plan
from relaxd.local.state_folder import StateFolder
from relaxd.sandbox import landlock
from services.reward.worker_enclosure import NEEDED
from tests.kit.processes import ROOT, python_path, run_python

ESCAPING = "escaping_rewards:by_response"
FORK_BOMB = """
import os, signal, sys
from relaxd.sandbox import enclosure, privileges
enclosure.PROCESSES = 20
if sys.argv[1:] == ["nobody"]:
    privileges.become(65_530)
measures = {one.name: one.by for one in enclosure.enclose(enclosure.Plan())}
children = []
try:
    while len(children) < 200:
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
except BlockingIOError:
    pass
for child in children:
    os.kill(child, signal.SIGKILL)
print(len(children) if measures["processes"] else "")
"""

pytestmark = pytest.mark.skipif(not landlock.version(), reason="needs Landlock")


@pytest.fixture(params=[False, True], ids=["free", "container"])
def forbid(request: pytest.FixtureRequest) -> bool:
    """Whether the kernel forbids namespaces, and root has no capabilities."""
    return request.param


def score(*responses: str | dict[str, Any], forbid: bool, secret_files: list[str] | None = None, **config: Any) -> Any:
    """Score responses, or samples, in one worker after another; see `tests.integration.scoring.enclosed`."""
    asked = {
        "config": {"name": ESCAPING, **config},
        "samples": [{"prompt": "", "response": one} if isinstance(one, str) else one for one in responses],
        "secret_files": secret_files or [],
        "forbid": forbid,
    }
    # What the kernel forbids a program it doesn't forbid a nursery, which would fork the worker.
    path = f"{ROOT}:{Path(__file__).parent}" if forbid else python_path(ROOT, Path(__file__).parent)
    done = run_python(
        "-m", "tests.integration.scoring.enclosed", environment={"PYTHONPATH": path}, given=json.dumps(asked)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_network_is_there_only_if_asked_for(forbid):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asked = [
            f"connect {port}",
            "resolve relaxd.invalid",
            f"run-python import socket; socket.create_connection(('127.0.0.1', {port}))",
            "one",
        ]
        found = score(*asked, forbid=forbid)
        assert found["outcomes"][-1] == 1.0
        for reason in found["outcomes"][:-1]:
            assert reason.endswith("; rewards have no network: set reward.network = true")
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
    )
    *read, beside_read = found["outcomes"][:5]
    *written, in_own = found["outcomes"][5:10]
    temporary, *refused = found["outcomes"][10:]
    assert len(read) == 4
    for reason in read:
        assert reason.startswith("PermissionError: [Errno 13] Permission denied:"), reason
    assert (beside_read, in_own, temporary) == (1.0, 1.0, 1.0)
    for reason in written:
        assert "name what else they write, or its folder, in reward.writable" in reason
    assert (own / "new").read_text() == "written"
    assert beside.read_text() == "secret"
    for reason in refused:
        assert "Error" in reason


@pytest.mark.parametrize("action", ["write", "sqlite", "run-touch", "safetensors"])
def test_the_setting_that_allows_to_write_is_named_however_it_is_done(action, tmp_path):
    (reason,) = score(f"{action} {tmp_path / 'new'}", forbid=False)["outcomes"]
    assert "name what else they write, or its folder, in reward.writable" in reason
    assert score(f"{action} {tmp_path / 'new'}", forbid=False, writable=[str(tmp_path)])["outcomes"] == [1.0]


def test_no_secret_of_a_local_stack_can_be_read(forbid, tmp_path, monkeypatch):
    """Also not where the worker stays the service's user: Redis's password, its settings, and its data."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    folder = StateFolder(tmp_path / "state")
    plan = make_plan(folder, port=0, redis_data=folder.redis_data_of("r"))
    folder.plan.write_text(plan.model_dump_json())
    (data := folder.redis_data_of("r") / "appendonlydir").mkdir()
    (data / "appendonly.aof").write_text("a prompt")
    password = folder.redis_password.read_text()
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    secret = {path.name for path in files if password in path.read_text() or "a prompt" in path.read_text()}
    assert secret == {"password", "redis.conf", "appendonly.aof"}
    outcomes = score(*(f"read {path}" for path in files), forbid=forbid, secret_files=[plan.redis_password_file])[
        "outcomes"
    ]
    for path, outcome in zip(files, outcomes, strict=True):
        if path.name in secret:
            assert outcome.startswith("PermissionError: [Errno 13]"), path
        else:
            assert outcome == 1.0, path


def test_a_writable_path_that_is_not_there_is_named(tmp_path):
    done = run_python(
        "-c",
        "from relaxd.config import RewardConfig\n"
        "from services.reward.worker_pool import WorkerPool\n"
        f"WorkerPool(1, RewardConfig(name='dummy', writable=({str(tmp_path / 'no')!r},)))",
    )
    assert f"reward.writable names {tmp_path / 'no'}, not on the reward service's machine" in done.stderr


def test_a_memory_bomb_ends_only_its_sample():
    found = score("allocate 3000000000", "one", "allocate 300000000", forbid=False, worker_memory_bytes=1 << 30)
    bomb, *others = found["outcomes"]
    assert bomb.startswith("MemoryError")
    assert bomb.endswith("; a process of a reward has at most 1073741824 bytes: raise reward.worker_memory_bytes")
    assert others == [1.0, 1.0]


@pytest.mark.parametrize("who", ["this user", "nobody"])
def test_a_fork_bomb_is_bounded(who):
    """Limit another user's processes, or those in a namespace of users."""
    if who == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    done = run_python("-c", FORK_BOMB, who)
    assert done.returncode == 0, done.stderr
    if not done.stdout.strip():
        pytest.skip("this machine lets nobody limit processes")
    assert 10 < int(done.stdout) < 20


def test_temporary_files_end_with_their_worker():
    (outcome,) = score("keep-temporary", forbid=False)["outcomes"]
    folder = Path(outcome.partition("a file in ")[2].split()[0])
    assert folder.name.startswith("relaxd-reward-")
    assert not folder.exists()


def test_rewards_start_processes_and_code_runs_in_its_own_sandbox(forbid):
    assert score("use", forbid=forbid)["outcomes"] == [1.0]
    tests = json.dumps({"inputs": ["3", "4"], "outputs": ["9", "16"]})
    right, wrong = (
        {"prompt": "", "response": f"```python\nprint(int(input()) {power})\n```", "answer": tests}
        for power in ("** 2", "* 3")
    )
    assert score(right, wrong, forbid=forbid, name="code")["outcomes"] == [1.0, 0.0]


def test_a_run_may_require_all_limits_or_none(forbid, tmp_path):
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
