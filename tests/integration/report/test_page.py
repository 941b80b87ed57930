"""The charts of report.html, drawn by a real browser. (What they hold is tests/unit/report/test_charts.py.)"""

import json
from pathlib import Path

from playwright.sync_api import expect

from relaxd.report.report_files import write_report
from tests.kit.browser import browser_page
from tests.kit.waiting import wait_until

TEXTS = ("prompt", "response", "answer")
INJECTED = (
    "</script><script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
)
RUN_INJECTED = f"document.body.insertAdjacentHTML('beforeend', {json.dumps(INJECTED)}); 1"
LABELS = "[...document.querySelectorAll('.chart:not([hidden]) h3')].map((one) => one.textContent.trim())"


def test_the_charts_are_drawn_smoothed_and_filtered(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\nsteps = 40\n")
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": "r", "state": "stopped", "steps": 40}))
    (tmp_path / "samples.jsonl").write_text(
        json.dumps({"step": 40, "reward": 1.0, **dict.fromkeys(TEXTS, INJECTED)}) + "\n"
    )
    lines = [{"step": step, "reward_mean": step / 40, "loss": (-1) ** step, "entropy": 5.539} for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)

    with browser_page() as (page, errors):
        page.goto((tmp_path / "report.html").as_uri())
        expect(page.locator("canvas")).to_have_count(3)
        assert sorted(page.evaluate(LABELS)) == ["entropy", "loss", "reward"]
        legend = page.evaluate("document.querySelector('.u-legend').textContent")
        assert "reward_mean" in legend
        painted = """(() => { const one = document.querySelector('canvas');
            return one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((part) => part > 0); })()"""
        wait_until(lambda: page.evaluate(painted), "a line in the first chart")

        page.locator("#smoothing").fill("0.9")
        assert page.locator("output").text_content() == "0.9"
        page.locator("#filter").fill("loss")
        assert page.evaluate(LABELS) == ["loss"]
        assert errors == []

        # Were something not escaped, the page's policy would still not run it.
        note = "(one) => blocked.push(one.violatedDirective)"
        page.evaluate(f"window.blocked = []; addEventListener('securitypolicyviolation', {note}); 1")
        page.evaluate(RUN_INJECTED)
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 2'})); 1"
        )
        blocked = "blocked.includes('script-src-elem') && blocked.includes('img-src')"
        wait_until(lambda: page.evaluate(blocked), "script and image are blocked")
        assert page.evaluate("document.title") == "relaxd · r"


def test_every_chart_is_drawn_without_being_scrolled_to(tmp_path: Path) -> None:
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
    with browser_page() as (page, errors):
        page.goto((tmp_path / "report.html").as_uri())
        expect(page.locator(".chart:has(canvas)")).to_have_count(len(names))
        assert errors == []
