"""report.html in a real browser. (What its charts hold is tests/unit/report/test_charts.py.)"""

import json
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from relaxd.config.load_toml import load
from relaxd.media.shown import shown_media
from relaxd.media.sounds import encode_wav
from relaxd.report.report_files import write_report
from tests.kit.browser import browser_page, unreadable
from tests.kit.waiting import wait_until

TEXTS = ("prompt", "response", "answer")
INJECTED = (
    "</script><script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
)
WAV = encode_wav(np.zeros(8_000, np.int16), 16_000)
PICTURE = {"sha256": "0f", "width": 8, "height": 8, "thumbnail": "data:image/jpeg;base64,"}
SOUND = shown_media({"1f": WAV}, [{"kind": "audio", "sha256": "1f"}], previews=True)["1f"]
HARMFUL = {"sha256": "<b>", "width": 1, "height": 1, "thumbnail": "http://example.com/"}
HARMFUL_SOUND = {"sha256": "2f", "seconds": 0.5, "excerpt": "http://example.com/"}
MEDIA = [PICTURE, HARMFUL, SOUND, HARMFUL_SOUND]
RUN_INJECTED = f"document.body.insertAdjacentHTML('beforeend', {json.dumps(INJECTED)}); 1"
PLAYED = """(one) => new Promise((done) => {
    one.onended = () => done(one.duration);
    one.onerror = () => done(one.error.message);
    one.muted = true;
    one.play().catch((error) => done(error.message));
})"""
LABELS = "[...document.querySelectorAll('.chart:not([hidden]) h3')].map((one) => one.textContent.trim())"


def test_the_charts_are_drawn_smoothed_and_filtered(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\nsteps = 40\n")
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": "r", "state": "stopped", "steps": 40}))
    (tmp_path / "samples.jsonl").write_text(
        json.dumps({"step": 40, "reward": 1.0, **dict.fromkeys(TEXTS, INJECTED), "media": MEDIA}) + "\n"
    )
    lines = [{"step": step, "reward_mean": step / 40, "loss": (-1) ** step, "entropy": 5.539} for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path)

    with browser_page() as (page, errors):
        page.goto((tmp_path / "report.html").as_uri())
        expect(page.locator("h1")).to_have_text("r")
        page.keyboard.press("3")
        expect(page.locator("article")).to_contain_text(INJECTED)  # as text
        expect(page.locator("article img")).to_have_count(1)
        sound = page.locator("article audio")
        expect(sound).to_have_count(1)
        assert sound.evaluate("(one) => one.preload + one.readyState") == "none0"  # nothing is read before it is played
        assert sound.evaluate(PLAYED) == 0.5
        page.keyboard.press("2")
        expect(page.locator("canvas")).to_have_count(3)
        assert sorted(page.evaluate(LABELS)) == ["entropy", "loss", "reward"]
        legend = page.evaluate("document.querySelector('.u-legend').textContent")
        assert "reward_mean" in legend
        painted = """(() => { const one = document.querySelector('canvas');
            return one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((part) => part > 0); })()"""
        wait_until(lambda: page.evaluate(painted), "a line in the first chart")

        page.get_by_label("smoothing").fill("0.9")
        assert page.locator("output").text_content() == "0.9"
        page.get_by_label("show charts with").fill("loss")
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
        page.goto((tmp_path / "report.html").as_uri() + "#curves")
        expect(page.locator(".chart:has(canvas)")).to_have_count(len(names))
        assert errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_view_of_a_report_is_readable(tmp_path: Path, dark: bool) -> None:
    config = load('run.steps = 4\nmodel.path = "tiny"\ndata.source = "addition"\nreward.name = "addition"')
    (tmp_path / "config.json").write_text(config.model_dump_json())
    counts = {"published": 12, "trained": 8, "dropped": 4, "in_flight": 0, "dropped_by_reason": {"zero_variance": 4}}
    summary = {"run_id": "r", "state": "stopped", "reason": "completed", "steps": 4, "wall_seconds": 99.0, **counts}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"step": step, "reward_mean": 0.5, "step_seconds": 3.0, "train_seconds": 2.0, "trainer_idle_share": 0.2}
        for step in range(1, 5)
    ]
    lines[-1] |= {"eval_reward": 0.5, "eval_prompts": 9}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = [{"role": role, "content": "word " * 99, "tool_calls": ["add {}"]} for role in ("user", "assistant")]
    sample = {"step": 4, "reward": 0.5, "advantage": 1.0, **dict.fromkeys(TEXTS, "x" * 99), "conversation": said}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample | {"turns": 1, "finish_reason": "length"}) + "\n")
    (tmp_path / "groups.jsonl").write_text(
        json.dumps({"group": "0-000001", "index": 1, "step": 1, "tokens": 9.0}) + "\n"
    )
    (tmp_path / "evaluations").mkdir()
    answer = {"index": 0, "prompt": "1 + 1", "answer": "2", "response": "word " * 99, "reward": 1.0, "error": ""}
    (tmp_path / "evaluations" / "step-000004.jsonl").write_text(json.dumps(answer) + "\n")
    shown = {
        "results": "forward, backward, optimizer",
        "curves": "the trainer's step",
        "samples": "Conversation, 1 turn",
        "evaluations": "response, step 4",
        "ledger": "zero variance",
        "configuration": "trainer.groups_per_step",
    }
    with browser_page(width=390, height=844, dark=dark) as (page, errors):
        page.goto(write_report(tmp_path).as_uri())
        for number, (view, text) in enumerate(shown.items(), 1):
            page.keyboard.press(str(number))
            expect(page.locator("main")).to_contain_text(text)
            assert unreadable(page) == [], view
        page.keyboard.press("/")
        page.keyboard.type("groups_per")
        expect(page.locator("main tbody tr")).to_have_count(1)
        assert errors == []
