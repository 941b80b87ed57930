"""Media items at http(s) addresses: fetched from allowed hosts only, within limits, and without telling secrets."""

import traceback
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from relaxd.config import DataConfig
from relaxd.media import fetching
from relaxd.media.sources import MediaError, MediaHostAway, RemoteItem, content_hash, read_source, with_hosts
from relaxd.waiting import Backoff
from tests.kit.media_server import MediaServer, media_server
from tests.kit.ports import free_port

CONTENT = b"the content"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BACKOFF", Backoff(0.01))


@pytest.fixture
def server() -> Iterator[MediaServer]:
    with media_server() as one:
        one.files["a.png"] = CONTENT
        yield one


def fetched(url: str, *hosts: str) -> bytes:
    return read_source(with_hosts(url, hosts))


def refusal(url: str, *hosts: str) -> str:
    with pytest.raises(MediaError) as caught:
        fetched(url, *hosts)
    told = "".join(traceback.format_exception(caught.value))
    assert "secret" not in told
    assert isinstance(caught.value, MediaHostAway) == ("times in a row" in str(caught.value))  # runs wait for these
    return str(caught.value)


def secret(server: MediaServer, path: str) -> str:
    return f"http://me:secret@{server.host}/{path}?key=secret"


def test_items_of_allowed_hosts_are_fetched(server: MediaServer) -> None:
    assert fetched(f"{server.url}/a.png", server.host) == CONTENT
    assert fetched(f"HTTP://{server.host}/a.png?size=9", "elsewhere", server.host) == CONTENT
    assert fetched(secret(server, "a.png"), server.host) == CONTENT
    assert server.headers[0]["Accept-Encoding"] == "identity"
    assert "Authorization" in server.headers[-1]
    frames = with_hosts(
        [{"path": f"{server.url}/a.png", "bytes": None}, {"path": f"{server.url}/a.png"}], [server.host]
    )
    assert [read_source(one) for one in frames] == [CONTENT] * 2
    assert read_source(with_hosts({"bytes": b"GIF8", "path": f"{server.url}/a.png"}, [])) == b"GIF8"


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://me:secret@host.org/a.png?key=secret", "host.org"),
        ("http://example.org.evil.org/", "example.org.evil.org"),
        ("http://example.org@evil.org/", "evil.org"),
        ("http://sub.example.org/", "sub.example.org"),
        ("http://example.org:81/", "example.org:81"),
        ("http://[::1]/", "[::1]"),
        ("http://2130706433/", "2130706433"),
    ],
)
def test_other_hosts_are_refused(url: str, host: str) -> None:
    what = "items are only fetched from hosts that data.media_hosts names"
    assert refusal(url, "example.org") == (
        f'is a URL of {host}: {what}, so add "{host}" to it, or download the item and give its path'
    )


def test_a_host_may_be_named_with_the_port_of_its_scheme() -> None:
    for hosts in (["localhost"], ["localhost:80"]):
        assert "can't be fetched" in refusal("http://localhost:80/a.png", *hosts)


@pytest.mark.parametrize("url", ["http://example.org\\@secret.org/", "http://h:99999/secret", "https://"])
def test_addresses_that_cannot_be_read_are_refused(url: str) -> None:
    assert refusal(url, "example.org").endswith("it must look like https://host/path")


def test_redirects_are_followed_to_allowed_hosts_only(server: MediaServer) -> None:
    with media_server() as other:
        other.files["b.png"] = b"other"
        server.redirects = {
            "there": f"{other.url}/b.png?key=secret",
            "here": "/a.png",
            "again": "/here",
            "loop": "/loop",
            "file": "file:///etc/passwd",
            "wrong": "http://secret:9:9/",
        }
        assert fetched(secret(server, "again"), server.host) == CONTENT
        assert fetched(secret(server, "there"), server.host, other.host) == b"other"
        assert "Authorization" not in other.headers[0], "credentials are of one host"
        complaint = refusal(secret(server, "there"), server.host)
        assert complaint.startswith(f"is a URL of {server.host}, which redirects to {other.host}: items are only")
        assert other.asked == {"b.png": 1}
    assert (
        refusal(secret(server, "loop"), server.host) == f"is a URL of {server.host}, which redirects more than 5 times"
    )
    assert server.asked["loop"] == 6
    assert "which redirects to one that can't be fetched: it must look" in refusal(secret(server, "file"), server.host)
    assert "is a URL that can't be read" in refusal(secret(server, "wrong"), server.host)


def test_large_items_are_refused(server: MediaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(secret(server, "huge"), server.host) == (
        f"is a URL of {server.host}, whose answer is larger than 64 MiB, the maximum: make it smaller"
    )
    monkeypatch.setattr(fetching, "MAX_BYTES", 100_000)
    assert "whose answer is larger than" in refusal(secret(server, "endless"), server.host)
    assert server.asked == {"huge": 1, "endless": 1}


def test_passing_faults_are_tried_again(server: MediaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.statuses = {"a.png": [503, 429], "away": [500, 502, 504]}
    assert fetched(secret(server, "a.png"), server.host) == CONTENT
    failed = f"is a URL of {server.host}, which can't be fetched"
    assert refusal(secret(server, "away"), server.host) == f"{failed}, 3 times in a row: HTTP 504"
    assert refusal(secret(server, "brief"), server.host) == (
        f"{failed}, 3 times in a row: the connection broke (ClientPayloadError)"
    )
    closed = f"127.0.0.1:{free_port()}"
    assert f"is a URL of {closed}, which can't be fetched, 3 times" in refusal(f"http://{closed}/secret", closed)
    monkeypatch.setattr(fetching, "ATTEMPT_SECONDS", 0.2)
    assert refusal(secret(server, "hangs"), server.host) == f"{failed}, 3 times in a row: no whole answer within 0.2 s"
    assert server.asked == {"a.png": 3, "away": 3, "brief": 3, "hangs": 3}


def test_other_faults_are_not_tried_again(server: MediaServer) -> None:
    server.statuses = {"denied": [403]}
    for path, status in (("nothing", 404), ("denied", 403)):
        assert refusal(secret(server, path), server.host) == (
            f"is a URL of {server.host}, which can't be fetched: HTTP {status}"
        )
    server.files["empty"] = b""
    assert refusal(secret(server, "empty"), server.host) == "is empty"
    assert server.asked == {"nothing": 1, "denied": 1, "empty": 1}


def test_addresses_are_secret_and_compared_without_being_fetched(server: MediaServer) -> None:
    assert "secret" not in repr(with_hosts(secret(server, "a.png"), ["a"]))
    assert isinstance(with_hosts(f"{server.url}/a.png", []), RemoteItem)
    assert content_hash(f"{server.url}/a.png") == content_hash(f"{server.url}/a.png") != content_hash(server.url)
    assert not server.asked


def test_hosts_are_names_of_hosts() -> None:
    hosts = ("images.example.org", "store:9000", "10.0.0.1", "[::1]:80")
    assert DataConfig(source="addition", media_hosts=hosts).media_hosts == hosts
    for wrong in ("https://example.org", "example.org/images", "*.example.org", "Example.org", "", "a:b@c"):
        with pytest.raises(ValidationError, match="must be the name of a host in lower case"):
            DataConfig(source="addition", media_hosts=(wrong,))
