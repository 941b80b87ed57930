"""The console's HTTP server before a real coordinator that asks for tokens: its guards, its answers, its events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest

from relaxd.rpc.errors import ServerError
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.run_folder import LOGS
from relaxd.v1 import coordinator_pb2 as pb
from services.console.__main__ import ConsoleServer
from services.console.guard import CSRF_HEADER, HEADERS
from services.console.pages import ACTIONS
from tests.integration.security.guarded_cluster import Guarded, guarded_cluster
from tests.kit.ports import free_port
from tests.kit.waiting import PATIENCE

RUN = "shown"
EVENT_SECONDS = 30.0 * PATIENCE


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A coordinator with a run that waits for its replicas."""
    with guarded_cluster(tmp_path_factory.mktemp("console")) as cluster:
        cluster.start_run(RUN)
        yield cluster


def settings_of(cluster: Guarded, **more: Any) -> ServiceSettings:
    address = f"127.0.0.1:{cluster.port}"
    return ServiceSettings(role="console", port=free_port(), coordinator=address, token=cluster.tokens["read"], **more)


class Browser:
    """A client with cookies, at the console's address."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self.client, self.url = client, url
        self.csrf = ""

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and answer."""
        more = {"Content-Type": "application/json"} if body is not None else {}
        data = None if body is None else json.dumps(body)
        async with self.client.request(method, self.url + path, data=data, headers=more | headers) as response:
            return response.status, await response.json()

    async def log_in(self, token: str) -> None:
        assert await self.ask("POST", "api/login", {"token": token}) == (200, {})
        _, session = await self.ask("GET", "api/session")
        self.csrf = session["csrf"]

    async def act(self, action: str, **fields: Any) -> tuple[int, Any]:
        return await self.ask("POST", f"api/actions/{action}", fields, **{CSRF_HEADER: self.csrf})


@pytest.fixture
async def console(cluster: Guarded) -> AsyncIterator[ConsoleServer]:
    server = ConsoleServer(settings_of(cluster))
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def visit(console: ConsoleServer) -> AsyncIterator[Callable[[], Browser]]:
    """Make browsers that have no cookie yet."""
    clients: list[aiohttp.ClientSession] = []

    def make() -> Browser:
        clients.append(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)))
        return Browser(clients[-1], console.url)

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
async def admin(cluster: Guarded, visit: Callable[[], Browser]) -> Browser:
    browser = visit()
    await browser.log_in(cluster.tokens["admin"])
    return browser


async def test_the_page_is_its_own_and_nobody_elses(visit: Callable[[], Browser]) -> None:
    browser = visit()
    async with browser.client.get(browser.url) as page:
        text = await page.text()
        assert page.status == 200
        assert {name: page.headers[name] for name in HEADERS} == HEADERS
    assert "script-src 'self';" in HEADERS["Content-Security-Policy"]
    assert "media-src data:;" in HEADERS["Content-Security-Policy"]
    assert "<style" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    for asset in (
        "console.js",
        "icon.svg",
        "shared/page.css",
        "shared/samples_view.js",
        "shared/charts.js",
        "shared/uplot/uPlot.iife.min.js",
    ):
        async with browser.client.get(f"{browser.url}assets/{asset}") as answer:
            assert answer.status == 200, asset
    for place in ("assets/../__main__.py", "assets/%2e%2e/__main__.py", "assets/shared/../report_files.py", "nowhere"):
        async with browser.client.get(browser.url + place) as answer:
            assert answer.status == 404, place


async def test_another_name_for_the_server_is_refused(visit: Callable[[], Browser]) -> None:
    browser = visit()
    status, answer = await browser.ask("GET", "api/session", Host="evil.example")
    assert status == 403
    assert "RELAXD_CONSOLE_HOSTS" in answer["error"]
    port = browser.url.rsplit(":", 1)[1].rstrip("/")
    assert (await browser.ask("GET", "api/session", Host=f"localhost:{port}"))[0] == 200


async def test_a_viewer_needs_a_token_and_has_its_rights(cluster: Guarded, visit: Callable[[], Browser]) -> None:
    stranger = visit()
    _, session = await stranger.ask("GET", "api/session")
    assert (session["log_in"], session["may_log_out"], "csrf" in session) == (True, True, False)
    for path in ("api/runs", f"api/runs/{RUN}/events", f"api/runs/{RUN}/samples", "api/replicas"):
        assert (await stranger.ask("GET", path))[0] == 401
    status, answer = await stranger.ask("POST", "api/login", {"token": "wrong-token-of-many-letters"})
    assert (status, "the token is wrong" in answer["error"]) == (401, True)

    reader = visit()
    await reader.log_in(cluster.tokens["read"])
    (cookie,) = reader.client.cookie_jar
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/")
    assert (await reader.ask("GET", "api/session"))[1]["may_act"] is False
    assert [run["run_id"] for run in (await reader.ask("GET", "api/runs"))[1]["runs"]] == [RUN]
    status, answer = await reader.act("pause", run_id=RUN)
    assert (status, "PauseRun is for admin" in answer["error"]) == (403, True)
    assert cluster.run(RUN).state == pb.RUN_STATE_PENDING

    assert (await reader.ask("POST", "api/logout", {}, **{CSRF_HEADER: reader.csrf}))[0] == 200
    assert (await reader.ask("GET", "api/runs"))[0] == 401


async def test_only_the_page_itself_can_change_something(cluster: Guarded, admin: Browser) -> None:
    pause = ("POST", "api/actions/pause", {"run_id": RUN})
    origin = {"Origin": "https://evil.example", CSRF_HEADER: admin.csrf}
    assert (await admin.ask(*pause))[0] == 403
    assert (await admin.ask(*pause, **{CSRF_HEADER: admin.csrf + "x"}))[0] == 403
    assert (await admin.ask(*pause, **origin))[0] == 403
    assert (await admin.ask("POST", "api/actions/pause", **{CSRF_HEADER: admin.csrf}))[0] == 415
    assert cluster.run(RUN).state == pb.RUN_STATE_PENDING

    status, answer = await admin.act("pause", run_id=RUN, reason="a look")
    assert (status, answer["run"]["state"], answer["run"]["reason"]) == (200, "paused", "a look")
    assert (await admin.act("resume", run_id=RUN))[1]["run"]["state"] == "pending"
    assert (await admin.act("resume", run_id="another"))[0] in (404, 409)
    assert (await admin.act("pause", no_such_field=1))[0] == 400
    status, answer = await admin.act("explode")
    assert (status, [name in answer["error"] for name in ACTIONS]) == (404, [True] * len(ACTIONS))


async def test_pages_see_what_the_coordinator_knows(admin: Browser) -> None:
    _, config = await admin.ask("GET", f"api/runs/{RUN}/config")
    assert config["config"]["trainer"]["groups_per_step"] == 4
    assert (await admin.ask("GET", f"api/runs/{RUN}/charts"))[1] == {"steps": [], "times": [], "sections": []}
    assert (await admin.ask("GET", f"api/runs/{RUN}/series?name=loss"))[1] == {}
    assert (await admin.ask("GET", f"api/runs/{RUN}/samples"))[1] == {"samples": []}
    assert (await admin.ask("GET", f"api/runs/{RUN}/groups"))[1] == {"groups": [], "complete": True}
    status, answer = await admin.ask("GET", f"api/runs/{RUN}/groups?where=reazon%20=%20stale")
    assert (status, "did you mean reason?" in answer["error"]) == (400, True)
    assert (await admin.ask("GET", "api/replicas"))[1] == {"replicas": []}
    assert (await admin.ask("GET", "api/scaling"))[1]["autoscaler"]["mode"] == "off"
    for number in ("9999", "-1", "", "9" * 5000):
        status, answer = await admin.ask("GET", f"api/runs/{RUN}/samples?limit={number}")
        assert (status, answer["error"].startswith("limit is ")) == (400, True)
    assert (await admin.ask("GET", "api/runs/nobody/events"))[0] == 404


async def test_logs_are_those_of_the_runs_folder(cluster: Guarded, admin: Browser) -> None:
    status, answer = await admin.ask("GET", f"api/runs/{RUN}/logs")
    assert (status, "has no logs of run shown" in answer["error"]) == (409, True)
    logs = Path(cluster.run(RUN).folder) / LOGS
    logs.mkdir()
    usual, failed = "INFO trainer step 1", ["ERROR trainer <b>it</b> failed", "    why"]
    lines = (f"2026-01-01T12:00:01.000Z {usual}", f"2026-01-01T12:00:03.000Z {failed[0]}", failed[1], "")
    (logs / "trainer.log").write_text("\n".join(lines))
    (logs / "rollout-1.log").write_text("2026-01-01T12:00:02.000Z WARNING rollout-1 slow\n")

    async def texts(**query: str) -> list[str]:
        _, answer = await admin.ask("GET", f"api/runs/{RUN}/logs?{urlencode(query)}")
        assert answer["services"] == ["rollout-1", "trainer"]
        return [line["text"].rpartition("Z ")[2] for line in answer["lines"]]

    assert await texts() == [usual, "WARNING rollout-1 slow", *failed]
    assert await texts(problems="") == ["WARNING rollout-1 slow", *failed]
    assert await texts(service="rollout") == ["WARNING rollout-1 slow"]
    assert await texts(service="trainer", text="FAILED") == failed[:1]
    _, answer = await admin.ask("GET", f"api/runs/{RUN}/logs?service=trainer&problems")
    assert answer["lines"][1] == {"service": "trainer", "log_time": 1767268803.0, "text": "    why", "is_problem": True}
    status, answer = await admin.ask("GET", f"api/runs/{RUN}/logs?service=nobody")
    assert (status, "service: is 'nobody': there are logs of rollout-1, trainer" in answer["error"]) == (400, True)


async def test_events_go_on_after_the_coordinator_has_restarted(cluster: Guarded, admin: Browser) -> None:
    async with admin.client.get(f"{admin.url}api/runs/{RUN}/events") as response:
        assert response.content_type == "text/event-stream"
        events = Events(response)
        run = await events.until("run", lambda state: state["run_id"] == RUN)
        assert (run["state"], "config_json" in run) == ("pending", False)

        cluster.kill("coordinator")
        away = await events.until("connection", lambda state: state["away_since"])
        assert away["reason"]
        assert await admin.ask("GET", "api/runs") == (503, {"error": "the coordinator does not answer"})
        assert (await admin.ask("GET", "api/session"))[1]["may_act"] is None

        cluster.coordinator()
        await events.until("connection", lambda state: state["away_since"] is None)
        await until_acts(admin, "pause")
        await events.until("run", lambda state: state["state"] == "paused")
        await until_acts(admin, "resume")


async def until_acts(admin: Browser, action: str) -> None:
    """Do something as soon as the coordinator answers."""
    async with asyncio.timeout(EVENT_SECONDS):
        while (await admin.act(action, run_id=RUN))[0] != 200:
            await asyncio.sleep(0.2)


class Events:
    """The events of a response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._lines = response.content

    async def until(self, topic: str, fits: Callable[[Any], object]) -> Any:
        """Return the next state of a topic that fits."""
        async with asyncio.timeout(EVENT_SECONDS):
            while True:
                name = (await self._lines.readline()).decode().strip()
                if not name.startswith("event: "):
                    continue
                state = json.loads((await self._lines.readline()).decode().removeprefix("data: "))
                if name == f"event: {topic}" and fits(state):
                    return state


@pytest.mark.parametrize(
    ("more", "says"),
    [({"host": "0.0.0.0", "token": None}, "without authentication"), ({"token": None}, "")],
)
async def test_a_console_for_others_needs_a_token(cluster: Guarded, more: dict[str, Any], says: str) -> None:
    server = ConsoleServer(ServiceSettings(role="console", port=free_port(), **more))
    try:
        if says:
            with pytest.raises(ServerError, match=says):
                await server.start()
        else:
            await server.start()
    finally:
        await server.close()


async def test_a_port_that_is_taken_is_said(console: ConsoleServer, cluster: Guarded) -> None:
    port = int(console.url.rsplit(":", 1)[1].rstrip("/"))
    server = ConsoleServer(ServiceSettings(role="console", port=port))
    with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1:{port}"):
        await server.start()
    await server.close()
