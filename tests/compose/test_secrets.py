"""The secrets of the compose files: made at the first start, or copied from a folder; none that can be guessed."""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relaxd.roles import REPLICA_ROLES, ROLES
from relaxd.rpc.access import TOKEN_ROLES, AccessTokens
from tests.compose.stack import COMPOSE, Stack

SCRIPT = COMPOSE.parent / "secrets.sh"
NAMES = ("grafana_password", "redis_password", "tokens", *(f"{role}.token" for role in TOKEN_ROLES))
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
    """Text of each file in the volumes, and its permissions and owner, by service and name."""
    command = (
        'cd /run/relaxd; for file in */*; do echo "$file $(stat -c %a:%u $file) $(cat $file | tr "\\n" ";")"; done'
    )
    words = ("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "sh", "secrets", "-c", command)
    lines = (line.split(" ", 2) for line in project.compose(*words).splitlines())
    return {file: (text.rstrip(";"), mode) for file, mode, text in lines}


@pytest.mark.timeout(600)
def test_they_are_made_once_and_only_their_users_can_read_them(project: Stack, tmp_path: Path) -> None:
    project.compose("up", "--detach", "--wait", "redis")
    made = read(project)
    redis_user = ask_redis(project, "id", "-u")
    with_redis = [role for role in ROLES if role != "judge"]
    assert {file: mode for file, (_, mode) in made.items()} == {
        "redis/redis_password": f"400:{redis_user}",
        "cli/token": "400:10001",
        "console/token": "400:10001",
        **{f"{role}/{name}": "400:10001" for role in ROLES for name in ("token", "tokens")},
        **{f"{role}/redis_password": "400:10001" for role in with_redis},
    }
    texts = {file: text for file, (text, _) in made.items()}
    assert {texts[f"{role}/redis_password"] for role in with_redis} == {texts["redis/redis_password"]}
    tokens = {file.partition("/")[0]: text for file, text in texts.items() if file.endswith("/token")}
    assert len({*tokens.values(), texts["redis/redis_password"]}) == len(tokens) + 1
    assert all(len(token) >= 32 for token in tokens.values())
    (accepted,) = {texts[f"{role}/tokens"] for role in ROLES}
    (tmp_path / "accepted").write_text(accepted.replace(";", "\n"))
    found = {of: AccessTokens(tmp_path / "accepted").caller(token) for of, token in tokens.items()}
    assert {of: caller.role for of, caller in found.items()} == {role: role for role in ROLES} | {
        "cli": "admin",
        "console": "read",
    }

    # Redis has its own, and asks for it.
    assert "NOAUTH" in ask_redis(project, "redis-cli", "get", "key")
    assert ask_redis(project, "ls", "/run/relaxd") == "redis_password"

    project.compose("down")
    project.compose("up", "--detach", "--wait", "redis")
    assert read(project) == made

    # One that is given replaces the one that was made; the others stay.
    given = Path(project.settings["SECRETS"]) / "reward.token"
    given.write_text(TOKEN)
    given.chmod(0o600)
    project.compose("up", "--detach", "--wait", "redis")
    changed = {file: text for file, (text, _) in read(project).items() if text != texts[file]}
    assert changed.pop("reward/token") == TOKEN
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    assert changed.keys() == {f"{role}/tokens" for role in ROLES}
    assert all(f"reward reward sha256:{digest};" in text for text in changed.values())


@pytest.mark.timeout(600)
def test_one_that_can_be_guessed_starts_nothing(project: Stack) -> None:
    (Path(project.settings["SECRETS"]) / "redis_password").write_text("development\n")
    with pytest.raises(AssertionError, match='service "secrets" didn\'t complete successfully: exit 1'):
        project.compose("up", "--detach", "--wait", "redis")
    assert "redis_password is 11 characters long: it must have 16 or more" in project.compose("logs", "secrets")
    assert [container["State"]["Status"] for container in project.containers("redis")] == ["created"]


def test_make_secrets_writes_them_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "secrets"
    subprocess.run([SCRIPT, folder], check=True, timeout=20)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(first) == sorted(NAMES)
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700, 0o600}
    subprocess.run([SCRIPT, folder], check=True, timeout=20)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


def test_each_token_is_for_its_role_and_no_other_is_accepted(tmp_path: Path) -> None:
    subprocess.run([SCRIPT, tmp_path], check=True, timeout=20)
    tokens = AccessTokens(tmp_path / "tokens")
    tokens.refuse_weak()
    for role in TOKEN_ROLES:
        token = (tmp_path / f"{role}.token").read_text().strip()
        assert tokens.caller(token).role == role
        assert token not in (tmp_path / "tokens").read_text()
    assert len((tmp_path / "tokens").read_text().splitlines()) == len(TOKEN_ROLES) == len(REPLICA_ROLES) + 3


def test_tokens_of_ones_own_are_copied(tmp_path: Path) -> None:
    given, folder = tmp_path / "given", tmp_path / "folder"
    given.mkdir()
    (given / "tokens").write_text(f"admin ann {TOKEN}\n")
    subprocess.run([SCRIPT, folder, given], check=True, timeout=20)
    assert (folder / "tokens").read_text() == f"admin ann {TOKEN}\n"
    # Without them, those of the tokens that are there now.
    (given / "tokens").unlink()
    (given / "admin.token").write_text(TOKEN)
    subprocess.run([SCRIPT, folder, given], check=True, timeout=20)
    assert AccessTokens(folder / "tokens").caller(TOKEN).role == "admin"
