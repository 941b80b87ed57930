"""URLs of Redis: one server, Sentinels, what is refused."""

import re

import pytest

from relaxd.redis_client import parse, where
from relaxd.rpc.credentials import with_certificates, with_password
from relaxd.rpc.settings import parse_settings

SENTINELS = "redis+sentinel://ann:secret@a:1,b/mine/3"


@pytest.mark.parametrize(
    ("url", "plain", "sentinels", "service", "replicas"),
    [
        ("redis://h:1/2", "redis://h:1/2", (), "", 0),
        ("unix:///tmp/redis.sock?db=1", "unix:///tmp/redis.sock?db=1", (), "", 0),
        ("redis://h:1/2?wait_replicas=2&client_name=x", "redis://h:1/2?client_name=x", (), "", 2),
        (SENTINELS, "redis://ann:secret@sentinel/3", (("a", 1), ("b", 26379)), "mine", 1),
        ("rediss+sentinel://a:1/mine?wait_replicas=0", "rediss://sentinel/", (("a", 1),), "mine", 0),
    ],
)
def test_a_url_is_of_one_server_or_of_sentinels(
    url: str, plain: str, sentinels: tuple[tuple[str, int], ...], service: str, replicas: int
) -> None:
    address = parse(url)
    assert (address.url, address.sentinels, address.service, address.wait_replicas) == (
        plain,
        sentinels,
        service,
        replicas,
    )
    assert address.tls == url.startswith("rediss")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:6379", "is no scheme of a Redis: it must be redis://host:port/db, "),
        ("http://h:1", "http:// is no scheme of a Redis"),
        ("redis+cluster://h:1/0", "redis+cluster:// is a Redis Cluster, which isn't supported"),
        ("redis+sentinel://a:1", "/ must name the service that the Sentinels watch"),
        ("redis+sentinel://a:1/mine/first", "/mine/first must name the service"),
        ("redis+sentinel://a:1,a:1/mine", "the Sentinels a:1, a:1: one is named twice"),
        ("redis+sentinel://a:b/mine", "'a:b' is no Sentinel: it must be host:port"),
        ("redis://h?wait_replicas=-1", "wait_replicas=-1: it must be a number of replicas, 0 to 16"),
        ("redis://h?sentinel_user=ann", "sentinel_user and sentinel_password_file are for redis+sentinel:// URLs"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(url)
    for arguments, environment in ((["--redis", url], {}), ([], {"RELAXD_REDIS": url})):
        with pytest.raises(SystemExit):
            parse_settings("reward", arguments, environment)
        assert message in " ".join(capsys.readouterr().err.split())


def test_where_a_url_leads_is_said_without_secrets() -> None:
    assert where(SENTINELS) == "the primary of 'mine' (Sentinels a:1, b:26379)"
    assert where("redis://ann:secret@h/0?wait_replicas=1") == "h:6379"
    assert where("unix:///tmp/redis.sock") == "/tmp/redis.sock"


def test_password_and_certificates_from_files_reach_the_servers_behind_sentinels(tmp_path) -> None:
    for name, text in (("password", "se/cret\n"), ("ca.crt", "")):
        (tmp_path / name).write_text(text)
    url = with_password("rediss+sentinel://ann@a:1,b:2/mine", str(tmp_path / "password"))
    url = with_certificates(url, {"ca": str(tmp_path / "ca.crt")})
    assert parse(url).url == f"rediss://ann:se%2Fcret@sentinel/?ssl_ca_certs={tmp_path}/ca.crt"
    assert parse(url).sentinels == (("a", 1), ("b", 2))
