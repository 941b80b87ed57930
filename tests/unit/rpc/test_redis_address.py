"""URLs of Redis: one server, Sentinels, a cluster, what is refused."""

import re

import pytest

from relaxd.redis_client import parse, where
from relaxd.rpc.credentials import with_certificates, with_password
from relaxd.rpc.service_settings import parse_settings

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
        ("redis+cluster://h:1/1", "/1 must be /0 or nothing: a cluster has one database"),
        ("redis+cluster://h:1,h:x", "'h:x' is not a node of a cluster: it must be host:port"),
        ("redis+cluster://h:1?sentinel_user=ann", "sentinel_user and sentinel_password_file are for redis+sentinel://"),
        ("unix+cluster:///tmp/redis.sock", "unix+cluster:// is no scheme of a Redis"),
        ("redis+sentinel://a:1", "/ must name the service that the Sentinels watch"),
        ("redis+sentinel://a:1/mine/first", "/mine/first must name the service"),
        ("redis+sentinel://a:1,a:1/mine", "a:1, a:1: one is named twice"),
        ("redis+sentinel://a:b/mine", "'a:b' is not a Sentinel: it must be host:port"),
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


@pytest.mark.parametrize(("end", "replicas"), [("", 1), ("/0?wait_replicas=0", 0), ("/?wait_replicas=2", 2)])
def test_a_url_names_nodes_of_a_cluster(end: str, replicas: int) -> None:
    address = parse(f"rediss+cluster://ann:secret@a:1,b{end}")
    assert (address.url, address.nodes, address.tls) == ("rediss://ann:secret@cluster/0", (("a", 1), ("b", 6379)), True)
    assert (address.wait_replicas, address.sentinels) == (replicas, ())


def test_where_a_url_leads_is_said_without_secrets() -> None:
    assert where(SENTINELS) == "the primary of 'mine' (Sentinels a:1, b:26379)"
    assert where("redis://ann:secret@h/0?wait_replicas=1") == "h:6379"
    assert where("redis+cluster://ann:secret@a:1,b") == "the cluster of a:1, b:6379"
    assert where("unix:///tmp/redis.sock") == "/tmp/redis.sock"


def test_password_and_certificates_from_files_reach_the_servers_behind_sentinels(tmp_path) -> None:
    for name, text in (("password", "se/cret\n"), ("ca.crt", "")):
        (tmp_path / name).write_text(text)
    url = with_password("rediss+sentinel://ann@a:1,b:2/mine", str(tmp_path / "password"))
    url = with_certificates(url, {"ca": str(tmp_path / "ca.crt")})
    assert parse(url).url == f"rediss://ann:se%2Fcret@sentinel/?ssl_ca_certs={tmp_path}/ca.crt"
    assert parse(url).sentinels == (("a", 1), ("b", 2))
    url = with_certificates("rediss+cluster://ann@a:1", {"ca": str(tmp_path / "ca.crt")})
    assert parse(url).url == f"rediss://ann@cluster/0?ssl_ca_certs={tmp_path}/ca.crt"
