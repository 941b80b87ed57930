"""Addresses: how they are read, and that nothing that is shown has a secret of one."""

from pathlib import Path

import pytest

from relaxd.alerts.urls import VARIABLE, UrlProblem, parse_urls, read_urls

TEXTS = [
    ("", []),
    ("json://h/p", [("json://h/p", 0)]),
    (" json://h/a,b?freq=10,slack://t/o \n tgram://1:a/c?freq=3&x=y", [
        ("json://h/a,b", 10), ("slack://t/o", 0), ("tgram://1:a/c?x=y", 3)]),
    ("json://h/p?x=y&freq=5", [("json://h/p?x=y", 5)]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "urls"), TEXTS)
def test_addresses_are_separated_and_lose_their_freq(text: str, urls: list[tuple[str, int]]) -> None:
    assert [(url.address, url.every) for url in parse_urls(text, "F")] == urls


WRONG = [
    ("hunter2", "F: URL 1 is none: expected an Apprise URL"),
    ("json://h/p\njson://hunter2/?freq=0", "F: URL 2: freq must be a number of steps, 1 or more"),
    ("json://hunter2/?freq=often", "F: URL 1: freq must be"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_wrong_addresses_are_refused_without_showing_them(text: str, problem: str) -> None:
    with pytest.raises(UrlProblem) as caught:
        parse_urls(text, "F")
    assert str(caught.value).startswith(problem)
    assert "hunter2" not in str(caught.value)


def test_a_file_comes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("# who is on call\njson://h/one\n\n# slack://h/two\nslack://three/x?freq=2\n")
    environment = {VARIABLE: "json://other"}
    assert [url.address for url in read_urls(str(file), environment)] == ["json://h/one", "slack://three/x"]
    assert [url.address for url in read_urls("", environment)] == ["json://other"]
    assert read_urls("", {}) == []
    with pytest.raises(UrlProblem, match="can't be read: FileNotFoundError"):
        read_urls(str(tmp_path / "none"), environment)


def test_what_is_shown_has_only_the_number_and_the_service() -> None:
    _, url = parse_urls("json://h slack://hunter2/hunter2", "F")
    assert url.shown == "URL 2 (slack)"
    assert "hunter2" not in repr(url)
