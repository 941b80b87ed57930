"""The secrets of the compose files: made at the first start, or copied from a folder; none that can be guessed."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.stack import COMPOSE, Stack

NAMES = ("grafana_password", "redis_password", "token")
TOKEN = "b0b1b2b3b4b5b6b7b8b9"


@pytest.fixture
def project(engine: None, tmp_path: Path) -> Iterator[Stack]:
    """A project that is not up, with a folder for secrets of its own."""
    given = tmp_path / "given"
    given.mkdir(mode=0o700)
    stack = Stack(f"relaxd-secrets-{os.getpid()}", tmp_path, {"SECRETS": str(given)})
    yield stack
    stack.compose("down", "--volumes", "--timeout", "5")


def ask_redis(project: Stack, *words: str) -> str:
    """What `redis-cli WORDS` says in the Redis container."""
    return project.compose("exec", "--no-TTY", "redis", *words).strip()


def read(project: Stack) -> dict[str, tuple[str, str]]:
    """Text of each file in the volume, and its permissions, owner and group."""
    command = 'cd /run/relaxd; for name in *; do echo "$name $(cat $name) $(stat -c %a:%u:%g $name)"; done'
    words = ("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "sh", "secrets", "-c", command)
    return {name: (text, mode) for name, text, mode in map(str.split, project.compose(*words).splitlines())}


@pytest.mark.timeout(600)
def test_they_are_made_once_and_only_their_users_can_read_them(project: Stack) -> None:
    project.compose("up", "--detach", "--wait", "redis")
    made = read(project)
    group = ask_redis(project, "id", "-g")
    assert {name: mode for name, (_, mode) in made.items()} == {
        "grafana_password": "400:472:0",
        "redis_password": f"440:10001:{group}",
        "token": "400:10001:0",
    }
    texts = [text for text, _ in made.values()]
    assert len(set(texts)) == len(NAMES)
    assert all(len(text) >= 32 for text in texts)
    # Redis has its own, and asks for it.
    assert "NOAUTH" in ask_redis(project, "redis-cli", "get", "key")
    assert ask_redis(project, "cat", "/run/relaxd/redis_password") == made["redis_password"][0]
    with pytest.raises(AssertionError, match="Permission denied"):
        ask_redis(project, "cat", "/run/relaxd/token")

    project.compose("down")
    project.compose("up", "--detach", "--wait", "redis")
    assert read(project) == made

    # One that is given replaces the one that was made; the others stay.
    given = Path(project.settings["SECRETS"]) / "token"
    given.write_text(TOKEN)
    given.chmod(0o600)
    project.compose("up", "--detach", "--wait", "redis")
    assert read(project) == made | {"token": (TOKEN, "400:10001:0")}


@pytest.mark.timeout(600)
def test_one_that_can_be_guessed_starts_nothing(project: Stack) -> None:
    (Path(project.settings["SECRETS"]) / "redis_password").write_text("development\n")
    with pytest.raises(AssertionError, match='service "secrets" didn\'t complete successfully: exit 1'):
        project.compose("up", "--detach", "--wait", "redis")
    assert "redis_password is 11 characters long: it must have 16 or more" in project.compose("logs", "secrets")
    assert [container["State"]["Status"] for container in project.containers("redis")] == ["created"]


def test_make_secrets_writes_them_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "secrets"
    script = COMPOSE.parent / "secrets.sh"
    subprocess.run([script, folder], check=True, timeout=20)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(first) == sorted(NAMES)
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700, 0o600}
    subprocess.run([script, folder], check=True, timeout=20)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
