"""Redis behind a password, an ACL and TLS."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from relaxd.board import BoardUnavailable
from relaxd.client import CliError
from relaxd.local import embedded_redis
from relaxd.rpc.service_settings import parse_settings
from tests.kit.boards import advance, group, make_board, take
from tests.kit.certificates import CertificateAuthority
from tests.kit.ports import free_port
from tests.kit.processes import run_python
from tests.kit.redis.redis_acl import USER, apply_acl
from tests.kit.tls_proxy import tls_proxy

PASSWORD = "p@ss/word of the test"
WAITS = {"timeout_seconds": 2.0, "retry_seconds": 0.5}


class Locked(NamedTuple):
    """A Redis with the ACL that is recommended, plain and behind TLS."""

    port: int
    tls_port: int
    ca: CertificateAuthority
    password_file: Path

    def url(self, *, tls: bool, **variables: str) -> str:
        """What a service makes of its settings."""
        place = f"rediss://{USER}@localhost:{self.tls_port}/0" if tls else f"redis://{USER}@127.0.0.1:{self.port}/0"
        given = {"RELAXD_REDIS": place, "RELAXD_REDIS_PASSWORD_FILE": str(self.password_file)} | variables
        return parse_settings("reward", [], given).redis

    def certificates(self) -> dict[str, str]:
        """All that TLS to it takes."""
        files = self.ca.files("person")
        return {
            "RELAXD_REDIS_CA": files.ca,
            "RELAXD_REDIS_CERTIFICATE": files.certificate,
            "RELAXD_REDIS_KEY": files.key,
        }


@pytest.fixture
def locked(redis_server, tmp_path: Path) -> Iterator[Locked]:
    server = redis_server(append_only=False)
    apply_acl(server.url, PASSWORD)
    ca = CertificateAuthority.create(tmp_path / "certificates")
    (tmp_path / "password").write_text(PASSWORD + "\n")
    with tls_proxy(server.port, ca.files("service", clients=True)) as tls_port:
        yield Locked(server.port, tls_port, ca, tmp_path / "password")


@pytest.mark.parametrize("tls", [False, True])
def test_the_board_works_with_the_recommended_acl(locked: Locked, tls: bool):
    board = make_board(locked.url(tls=tls, **locked.certificates() if tls else {}), groups_per_step=2)
    board.publish(term=1, groups=[group("a"), group("b")])
    advance(board, ("rollout", "reward", "critic", "advantage"))
    taken = take(board, "train", count=2)
    assert {delivery.group_id for delivery in taken} == {"a", "b"}
    board.counts().check()
    board.close()


def test_the_board_works_with_the_recommended_acl_on_a_cluster_behind_tls(redis_server, tmp_path: Path):
    password, ca = tmp_path / "password", CertificateAuthority.create(tmp_path / "certificates")
    password.write_text(PASSWORD)
    server = redis_server(append_only=False, options=("--cluster-enabled", "yes", "--cluster-port", str(free_port())))
    with tls_proxy(server.port, ca.files("service", clients=True)) as tls_port:
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            admin.config_set("cluster-announce-port", tls_port)
        apply_acl(server.url, PASSWORD)
        locked = Locked(server.port, tls_port, ca, password)
        url = locked.url(tls=True, **locked.certificates()).replace("rediss", "rediss+cluster", 1)
        board = make_board(f"{url}&wait_replicas=0", retry_seconds=30.0)
        board.publish(term=1, groups=[group("a")])
        board.delete()
        with pytest.raises(
            BoardUnavailable, match=r"has no node for these keys: NOOWNER .*CERTIFICATE_VERIFY_FAILED"
        ) as error:
            make_board(url.replace("&", "?").split("?")[0], **WAITS)
        assert PASSWORD not in str(error.value)


def test_the_user_may_do_nothing_else(locked: Locked):
    with redis.Redis.from_url(locked.url(tls=False)) as client:
        client.set("relaxd:mine", "1")
        for command in (("GET", "other"), ("SET", "other", "1"), ("CONFIG", "GET", "*"), ("FLUSHALL",), ("KEYS", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
        for command in (("ACL", "LIST"), ("CLUSTER", "NODES"), ("CLIENT", "KILL", "TYPE", "normal"), ("SHUTDOWN",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)
    with redis.Redis(port=locked.port) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("RELAXD_REDIS_CA", "CERTIFICATE_VERIFY_FAILED"),
        ("RELAXD_REDIS_CERTIFICATE", ""),  # whether the alert or the end of the connection is seen first, is luck
    ],
)
def test_redis_over_tls_wants_both_sides_certificates(locked: Locked, missing: str, told: str):
    given = locked.certificates()
    del given[missing]
    if missing == "RELAXD_REDIS_CERTIFICATE":
        del given["RELAXD_REDIS_KEY"]
    with pytest.raises(BoardUnavailable, match=f"Redis at localhost:{locked.tls_port} doesn't answer") as caught:
        make_board(locked.url(tls=True, **given), **WAITS)
    assert told in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_a_redis_for_another_host_is_not_talked_to(locked: Locked):
    locked.ca.issue("elsewhere", "DNS:elsewhere.example")
    with (
        tls_proxy(locked.port, locked.ca.files("elsewhere")) as port,
        pytest.raises(BoardUnavailable, match="certificate is not valid for 'localhost'"),
    ):
        make_board(locked._replace(tls_port=port).url(tls=True, **locked.certificates()), **WAITS)


def coordinator(**variables: str) -> tuple[int, str]:
    done = run_python("-m", "services.coordinator", "--port", "0", environment=variables, clean=True)
    return done.returncode, done.stderr


def test_a_coordinator_with_the_wrong_password_says_so_at_once(locked: Locked, tmp_path: Path):
    (tmp_path / "wrong").write_text("not it")
    variables = {"RELAXD_REDIS": f"redis://{USER}@127.0.0.1:{locked.port}/0"}
    code, told = coordinator(**variables, RELAXD_REDIS_PASSWORD_FILE=str(tmp_path / "wrong"))
    assert code == 1
    assert f"Redis at 127.0.0.1:{locked.port} rejects the user or password" in told
    assert "not it" not in told


def test_files_for_tls_need_a_url_with_tls(locked: Locked, capsys):
    with pytest.raises(SystemExit):
        locked.url(tls=False, **locked.certificates())
    assert "need a rediss:// URL, not redis://" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        locked.url(tls=True, RELAXD_REDIS_CA="/no/such/file")
    assert "/no/such/file" in capsys.readouterr().err


def test_the_command_line_finds_the_password_and_hides_it(locked: Locked, monkeypatch):
    monkeypatch.setenv("REDIS_URL", f"redis://{USER}@127.0.0.1:{locked.port}/0")
    monkeypatch.setenv("RELAXD_REDIS_PASSWORD_FILE", str(locked.password_file))
    url = embedded_redis.given_url()
    assert url
    embedded_redis.wait_until_up(url, seconds=60)
    with pytest.raises(CliError, match="refuses the password") as caught:
        embedded_redis.wait_until_up(url.replace("p%40ss", "p%40st"), seconds=5)
    assert "p%40" not in str(caught.value)
    assert "word of" not in str(caught.value)
