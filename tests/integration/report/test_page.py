"""The charts of report.html, drawn by a real browser. (What they hold is tests/unit/report/test_charts.py.)"""

import json
import os
from pathlib import Path

import pytest

from relaxd.report.report_files import write_report
from tests.kit.browser import browser_page, find_browser
from tests.kit.waiting import wait_until

TEXTS = ("prompt", "response", "answer")
INJECTED = (
    "</script><script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
)
RUN_INJECTED = f"document.body.insertAdjacentHTML('beforeend', {json.dumps(INJECTED)}); 1"
LABELS = "[...document.querySelectorAll('.chart:not([hidden]) h3')].map((one) => one.textContent.trim())"


@pytest.fixture
def browser() -> str:
    """Path of a Chromium. Without one the test is skipped, or fails where there has to be one (`.ci/run`)."""
    if found := find_browser():
        return found
    if os.environ.get("RELAXD_TEST_BROWSER"):
        pytest.fail("no Chromium is installed")
    pytest.skip("no Chromium is installed: the report's JavaScript is not run")


def test_the_charts_are_drawn_smoothed_and_filtered(tmp_path: Path, browser: str) -> None:
    (tmp_path / "config.toml").write_text("[run]\nsteps = 40\n")
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": "r", "state": "stopped", "steps": 40}))
    (tmp_path / "samples.jsonl").write_text(
        json.dumps({"step": 40, "reward": 1.0, **dict.fromkeys(TEXTS, INJECTED)}) + "\n"
    )
    lines = [{"step": step, "reward_mean": step / 40, "loss": (-1) ** step, "entropy": 5.539} for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)

    with browser_page(browser, tmp_path / "profile") as page:
        page.call("Page.navigate", url=(tmp_path / "report.html").as_uri())
        wait_until(lambda: page.value("document.querySelectorAll('canvas').length") == 3, "three charts")
        assert sorted(page.value(LABELS)) == ["entropy", "loss", "reward"]
        legend = page.value("document.querySelector('.u-legend').textContent")
        assert "reward_mean" in legend
        painted = """(() => { const one = document.querySelector('canvas');
            return one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((part) => part > 0); })()"""
        wait_until(lambda: page.value(painted), "a line in the first chart")

        def enter(element: str, text: str) -> None:
            field = f"document.getElementById('{element}')"
            page.value(f"{field}.value = '{text}'; {field}.dispatchEvent(new Event('input'))")

        enter("smoothing", "0.9")
        assert page.value("document.querySelector('output').textContent") == "0.9"
        enter("filter", "loss")
        assert page.value(LABELS) == ["loss"]
        assert page.errors == []

        # Were something not escaped, the page's policy would still not run it.
        note = "(one) => blocked.push(one.violatedDirective)"
        page.value(f"window.blocked = []; addEventListener('securitypolicyviolation', {note}); 1")
        page.value(RUN_INJECTED)
        page.value(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 2'})); 1"
        )
        wait_until(lambda: page.value("blocked.some((one) => one == 'script-src-elem')"), "the script is blocked")
        wait_until(lambda: page.value("blocked.includes('img-src')"), "the image is blocked")
        assert page.value("document.title") == "relaxd · r"


def test_every_chart_is_drawn_without_being_scrolled_to(tmp_path: Path, browser: str) -> None:
    (tmp_path / "config.toml").write_text("[run]\nsteps = 40\n")
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": "r", "state": "stopped", "steps": 40}))
    names = (
        "reward_mean",
        "loss",
        "grad_norm",
        "lr",
        "entropy",
        "kl",
        "clip_fraction",
        "ratio",
        "tokens",
        "sync_seconds",
    )
    lines = [{"step": step, **dict.fromkeys(names, step)} for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)
    with browser_page(browser, tmp_path / "profile") as page:
        page.call("Page.navigate", url=(tmp_path / "report.html").as_uri())
        wait_until(lambda: page.value("document.querySelectorAll('.chart').length") == len(names), "all charts")
        drawn = "[...document.querySelectorAll('.chart')].every((one) => one.querySelector('canvas'))"
        wait_until(lambda: page.value(drawn), "all charts are drawn")
        assert page.errors == []
