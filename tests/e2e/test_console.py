"""The console in a real browser, beside a real run: what people see, press and type."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import StackState, StateFolder
from relaxd.v1 import coordinator_pb2 as pb
from tests.e2e.conftest import Workplace, open_workplace
from tests.kit.browser import browser_page, require_browser, unreadable
from tests.kit.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_MS = 30_000 * PATIENCE
STEPS = 400
VIEWS = ("run", "curves", "samples", "ledger", "replicas", "scaling", "logs", "configuration")
TRACES = "http://traces.example/trace/{trace_id}"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Workplace, StackState]]:
    """Services with a console, a run that has ended, and one that goes on."""
    require_browser()
    with open_workplace(tmp_path_factory.mktemp("console"), tiny_model) as place:
        code, output = place.relaxd("up", "--port", "0", RELAXD_CONSOLE="yes", RELAXD_TRACE_URL=TRACES)
        assert code == 0, output
        state = StateFolder(place.folder / ".relaxd").read()
        assert state is not None
        assert f"the console is at {state.console}" in output
        assert place.relaxd("console") == (0, f"the console is at {state.console}\n")
        code, output = place.relaxd("run", "tiny.toml", "--run-id", "first", "--run.steps", "2")
        assert code == 0, output
        settings = ("--run.steps", str(STEPS), "--rollout.max_new_tokens", "24", "--telemetry.traces", "file")
        place.start("run", "tiny.toml", "--run-id", "seen", *settings)
        with CoordinatorClient(state.coordinator) as client:
            wait_until(lambda: _step(client) >= 3, "three steps", 240 * PATIENCE)
        yield place, state


def _step(client: CoordinatorClient) -> int:
    """Return the step of the run that goes on; 0 before it is there."""
    return max((run.step for run in client.runs() if run.run_id == "seen"), default=0)


@pytest.fixture
def page(stack: tuple[Workplace, StackState]) -> Iterator[Page]:
    """A page with the run; no script may have failed at the end."""
    with browser_page(width=1360, height=900) as (page, errors):
        page.set_default_timeout(PATIENCE_MS)
        page.goto(stack[1].console)
        expect(page.locator("h1")).to_have_text("seen", timeout=PATIENCE_MS)
        yield page
        assert errors == []


def test_the_run_is_a_picture_that_moves(page: Page) -> None:
    stages = page.locator("[data-stage]")
    expect(stages).to_have_count(4)
    assert [stages.nth(place).get_attribute("data-stage") for place in range(4)] == [
        *("rollout", "reward", "advantage", "train")
    ]
    steps = page.locator("[role=progressbar]")
    expect(steps).not_to_have_attribute("aria-valuenow", steps.get_attribute("aria-valuenow") or "")
    expect(page.locator(".spark canvas").first).to_be_visible()
    expect(page.locator(".engines i").first).to_have_attribute("title", re.compile(r"rollout: .*version \d+"))


def test_curves_are_smoothed_filtered_and_drawn_by_time(page: Page) -> None:
    page.keyboard.press("2")
    expect(page.locator(".chart canvas").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("grad_norm")
    expect(page.locator(".chart:visible")).to_have_count(1)
    page.get_by_label("smoothing").fill("0.8")
    page.get_by_role("button", name="By time").click()
    legend = page.locator(".chart:visible .u-legend")
    expect(legend).to_contain_text("time")
    page.get_by_role("button", name="Log scale").click()
    expect(page.locator(".chart:visible canvas")).to_be_visible()


def test_every_view_and_run_is_reached_by_keys(page: Page) -> None:
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        expect(page.locator("#views a[aria-current=page]")).to_have_attribute("href", f"#/seen/{view}")
    page.keyboard.press("]")
    expect(page.locator("h1")).to_have_text("first")
    expect(page.locator(".pill").first).to_have_text("stopped")
    page.keyboard.press("[")
    expect(page.locator("h1")).to_have_text("seen")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next, previous sample")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.reload()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    box = page.locator(".skip").bounding_box()
    assert box is not None
    assert box["x"] >= 0  # it is seen while it has the focus
    assert page.locator(".skip:focus-visible").count() == 1


def test_runs_are_compared(page: Page) -> None:
    page.keyboard.press("2")
    page.get_by_label("compare with a run").select_option("first")
    expect(page.get_by_role("button", name="no longer compare with first")).to_be_visible()
    expect(page.locator(".u-legend").first).to_contain_text("first")
    page.keyboard.press("8")
    page.get_by_label("compare with a run").select_option("first")
    differences = page.locator("main table").last.locator("tbody tr")
    expect(differences).to_contain_text(["rollout.max_new_tokens", "run.steps", "telemetry.traces"])


def test_samples_are_searched_and_their_tokens_coloured(page: Page) -> None:
    page.keyboard.press("3")
    rows = page.get_by_role("option").filter(has_text="tokens")
    expect(rows.first).to_be_visible()
    coloured = page.locator(".written span[style*=background]")  # one of an incomplete character is empty
    expect(coloured.filter(has_text=re.compile(r"\S")).first).to_be_visible()
    first = page.locator("article dd").first.text_content()
    page.keyboard.press("j")
    expect(page.locator(".list [aria-selected=true]")).to_have_count(1)
    page.keyboard.press("k")
    expect(page.locator("article dd").first).to_have_text(str(first))
    for colour in ("advantage", "version", "none"):
        page.get_by_label("colour of the tokens").select_option(colour)
    expect(coloured).to_have_count(0)
    page.get_by_label("sort").select_option("worst")
    rewards = [float(text) for text in page.locator(".list .facts b").all_text_contents()]
    assert rewards == sorted(rewards)
    page.get_by_label("search").fill("no sample has this")
    expect(page.locator(".list")).to_contain_text("No sample matches")


def test_the_ledger_answers_conditions(page: Page) -> None:
    page.keyboard.press("4")
    table = page.locator("main table").last
    expect(table).to_contain_text("trained in step")
    page.get_by_label("condition").fill("step = 2")
    page.keyboard.press("Enter")
    expect(table.locator("tbody tr")).to_have_count(2)
    page.get_by_label("condition").fill("nonsense = 2")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_contain_text("'nonsense' is unknown")


def test_logs_are_searched_by_service_and_text(page: Page, stack: tuple[Workplace, StackState]) -> None:
    page.keyboard.press("7")
    lines = page.locator(".log .line")
    expect(lines.filter(has_text=re.compile(r"INFO trainer.* step \d+: reward")).first).to_be_visible()
    page.get_by_label("service").select_option("coordinator")
    expect(lines.filter(has_text="INFO trainer")).to_have_count(0)
    expect(lines.filter(has_text="INFO coordinator").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("no line has this")
    page.keyboard.press("Enter")
    expect(page.locator(".log")).to_have_text("No line matches.")
    newest = stack[0].folder / ".relaxd" / "logs" / "coordinator.log"
    with newest.open("a") as file:
        file.write("    no line has this <b>but one</b>\n")  # as a service writes it: the page asks again
    expect(lines).to_have_text([re.compile("no line has this <b>but one</b>")])


def test_samples_and_groups_lead_to_their_traces(page: Page) -> None:
    page.keyboard.press("3")
    links = page.locator("article a[target=_blank]")
    expect(links).to_have_text(["group", "step"])
    of_group = str(links.first.get_attribute("href"))
    assert re.fullmatch(r"http://traces\.example/trace/[0-9a-f]{32}", of_group)
    group = page.locator("article dd").first.text_content()
    page.keyboard.press("4")
    page.get_by_label("prompt").fill(str(group))
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name=str(group))).to_have_attribute("href", of_group)


def test_an_operator_pauses_and_resumes(page: Page, stack: tuple[Workplace, StackState]) -> None:
    page.get_by_role("button", name="Pause").click()
    page.get_by_label("Reason").fill("to look at it")
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(page.locator(".says").filter(has_text="to look at it")).to_be_visible()
    with CoordinatorClient(stack[1].coordinator) as client:
        assert client.run("seen").state == pb.RUN_STATE_PAUSED
        page.get_by_role("button", name="Checkpoint").click()
        expect(page.locator("#notice")).to_contain_text("Saved: ")
        page.get_by_role("button", name="Resume").click()
        wait_until(lambda: client.run("seen").state == pb.RUN_STATE_RUNNING, "the run goes on")
    page.keyboard.press("6")
    page.get_by_role("button", name="Say only").click()
    expect(page.get_by_role("button", name="Say only")).to_have_attribute("aria-pressed", "true")


def test_the_page_says_that_the_coordinator_is_away(page: Page, stack: tuple[Workplace, StackState]) -> None:
    folder = StateFolder(stack[0].folder / ".relaxd")
    (coordinator,) = [one for one in folder.read().services if one.role == "coordinator"]
    os.kill(coordinator.pid, signal.SIGKILL)
    expect(page.locator("#away")).to_contain_text("The coordinator has not answered", timeout=PATIENCE_MS)
    expect(page.locator("#away")).to_be_hidden(timeout=PATIENCE_MS)
    expect(page.locator(".pill").first).to_have_text("running", timeout=PATIENCE_MS)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_view_is_readable(stack: tuple[Workplace, StackState], dark: bool) -> None:
    with browser_page(width=390, height=844, dark=dark) as (page, errors):
        page.set_default_timeout(PATIENCE_MS)
        for view in VIEWS:
            page.goto(f"{stack[1].console}#/seen/{view}")
            expect(page.locator(".pill").first).to_be_visible()
            expect(page.locator("main > *").first).to_be_visible()
            assert unreadable(page) == [], view
        assert errors == []


def test_the_run_does_not_need_the_console(stack: tuple[Workplace, StackState]) -> None:
    folder = StateFolder(stack[0].folder / ".relaxd")

    def console() -> Any:
        (found,) = [one for one in folder.read().services if one.role == "console"]
        return found

    pid = console().pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: console().pid not in (None, pid) and console().phase == "running", "another console")
    with CoordinatorClient(stack[1].coordinator) as client:
        step = client.run("seen").step
        wait_until(lambda: client.run("seen").step > step or client.run("seen").step == STEPS, "another step")
    assert json.loads(folder.plan.read_text())["console"] == stack[1].console
