"""The console's JSON API: runs, replicas, scaling, and operators' actions."""

import asyncio
import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import grpc
from aiohttp import web
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from relaxd import __version__
from relaxd.client.metric_series import rows
from relaxd.report.charts import chart_data
from relaxd.rpc.message_parts import plain
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from services.console.guard import VIEWER, Refusal, Viewers
from services.console.live_changes import all_replicas


@dataclass(frozen=True)
class Action:
    """An operator's action: a call of the coordinator that changes something."""

    method: str
    request: type[Message]
    seconds: float = 30.0
    """Deadline of the action's call, in seconds."""

    async def take(self, stub: CoordinatorStub, fields: dict[str, Any]) -> dict[str, Any]:
        """Call the coordinator. `fields` are the request's fields as JSON values. Raises Refusal, AioRpcError."""
        try:
            request = ParseDict(fields, self.request())
        except ParseError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{self.method}: {error}") from error
        return plain(await getattr(stub, self.method)(request, timeout=self.seconds))


ACTIONS = {
    "pause": Action("PauseRun", pb.PauseRunRequest),
    "resume": Action("ResumeRun", pb.ResumeRunRequest),
    "stop": Action("StopRun", pb.StopRunRequest),
    "checkpoint": Action("SaveCheckpoint", pb.SaveCheckpointRequest, seconds=3600.0),
    "sync-weights": Action("SyncWeights", pb.SyncWeightsRequest, seconds=600.0),
    "drain": Action("DrainReplica", pb.DrainReplicaRequest),
    "scale-out": Action("ScaleOut", scaling_pb2.ScaleOutRequest),
    "scale-in": Action("ScaleIn", scaling_pb2.ScaleInRequest),
    "cancel-scaling": Action("CancelScaleRequest", scaling_pb2.CancelScaleRequestRequest),
    "autoscaler": Action("SetAutoscaler", scaling_pb2.SetAutoscalerRequest),
}
"""Operators' actions by name, which is part of the action's URL."""


CALL_SECONDS = 30.0
"""Deadline of each call to the coordinator that an answer needs, in seconds."""
MAX_RUNS = 500
MAX_SAMPLES = 500
SHOWN_GROUPS = 200
SHOWN_LOG_LINES = 1000
SHOWN_SCALE_REQUESTS = 50
MAX_DRAWN = 8
"""Maximum number of runs whose charts are cached."""
LARGE = ("config_json", "health", "metrics", "wait", "alarms")
"""Large fields of a run, which the console's list of runs omits."""


class Pages:
    """The console's JSON API. Each answer is read from the coordinator, without a cache, with the viewer's token."""

    def __init__(self, viewers: Viewers, coordinator: str, trace_url: str = "") -> None:
        self._viewers = viewers
        self._coordinator = coordinator
        self._trace_url = trace_url
        self._charts: dict[str, tuple[tuple[int, int], str]] = {}
        """Charts of each run as JSON, with the step and the number of metrics for which they were drawn."""
        self._drawing = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes of the JSON API."""
        return [
            web.get("/api/session", self.session),
            web.post("/api/login", self.log_in),
            web.post("/api/logout", self.log_out),
            web.get("/api/runs", self.runs),
            web.get("/api/runs/{run}/config", self.config),
            web.get("/api/runs/{run}/charts", self.charts),
            web.get("/api/runs/{run}/series", self.series),
            web.get("/api/runs/{run}/samples", self.samples),
            web.get("/api/runs/{run}/groups", self.groups),
            web.get("/api/runs/{run}/logs", self.logs),
            web.get("/api/replicas", self.replicas),
            web.get("/api/scaling", self.scaling),
            web.post("/api/actions/{action}", self.act),
        ]

    async def session(self, request: web.Request) -> web.Response:
        """Answer whether a login is needed and whether the viewer may act, with the versions and addresses that the
        page shows."""
        viewer = self._viewers.find(request)
        answer: dict[str, Any] = {"log_in": viewer is None, "may_log_out": self._viewers.log_in}
        answer |= {"version": __version__, "coordinator": self._coordinator, "trace_url": self._trace_url}
        if viewer is not None:
            try:
                answer |= {"csrf": viewer.csrf, "may_act": await viewer.may_act()}
            except grpc.aio.AioRpcError:  # it is away: the page says so, and asks again
                answer |= {"csrf": viewer.csrf, "may_act": None}
        return web.json_response(answer)

    async def log_in(self, request: web.Request) -> web.Response:
        """Begin a viewer's session with the token in the request."""
        if not self._viewers.log_in:
            raise Refusal(HTTPStatus.CONFLICT, "this console needs no token")
        token = (await _body(request)).get("token")
        if not isinstance(token, str) or not token.strip() or not token.isascii() or not token.isprintable():
            raise Refusal(HTTPStatus.BAD_REQUEST, "token must be printable ASCII, such as the contents of admin.token")
        response = web.json_response({})
        await self._viewers.begin(token.strip(), response)
        return response

    async def log_out(self, request: web.Request) -> web.Response:
        """End the viewer's session."""
        await self._viewers.end(request)
        return web.json_response({})

    async def runs(self, request: web.Request) -> web.Response:
        """Answer with a list of the runs, newest first."""
        found = await _stub(request).ListRuns(pb.ListRunsRequest(page_size=MAX_RUNS), timeout=CALL_SECONDS)
        return web.json_response({"runs": [plain(run, without=LARGE) for run in found.runs]})

    async def config(self, request: web.Request) -> web.Response:
        """Answer with a run's configuration."""
        run = await _run(request)
        return web.json_response({"run_id": run.run_id, "config": json.loads(run.config_json or "{}")})

    async def charts(self, request: web.Request) -> web.Response:
        """Answer with all charts of a run, with at most 500 points in a line."""
        run = await _run(request)
        shown = (run.step, len(run.metrics))
        async with self._drawing:  # concurrent requests share one read
            known = self._charts.get(run.run_id)
            if known is None or known[0] != shown:
                answer = await _stub(request).GetMetrics(pb.GetMetricsRequest(run_id=run.run_id), timeout=CALL_SECONDS)
                known = shown, await asyncio.to_thread(_charts_json, answer)
                self._charts.pop(run.run_id, None)
                self._charts[run.run_id] = known
                if len(self._charts) > MAX_DRAWN:
                    del self._charts[next(iter(self._charts))]
        return _compressed(web.Response(text=known[1], content_type="application/json"))

    async def series(self, request: web.Request) -> web.Response:
        """Answer with the metrics of a run that the parameters `name` list, with at most 500 points each."""
        names = request.query.getall("name", [])
        metrics = pb.GetMetricsRequest(run_id=request.match_info["run"], names=names, max_points=500)
        answer = await _stub(request).GetMetrics(metrics, timeout=CALL_SECONDS)
        return _compressed(web.json_response({one.name: plain(one, without=("name",)) for one in answer.series}))

    async def samples(self, request: web.Request) -> web.Response:
        """Answer with the newest samples of a run, or with those of one `step`, at most `limit`.

        With the parameter `tokens`, samples include their tokens.
        """
        asked = pb.ListSamplesRequest(
            run_id=request.match_info["run"],
            step=_number(request, "step", 0),
            page_size=_number(request, "limit", 100, MAX_SAMPLES),
            with_tokens="tokens" in request.query,
        )
        found: list[pb.TrainedSample] = []
        while len(found) < asked.page_size:
            page = await _stub(request).ListSamples(asked, timeout=CALL_SECONDS)
            found += page.samples
            if not page.next_page_token:
                break
            asked.page_token = page.next_page_token
        return _compressed(web.json_response({"samples": [plain(one) for one in found[: asked.page_size]]}))

    async def groups(self, request: web.Request) -> web.Response:
        """Answer with the newest closed groups of a run, or with those that the parameters `prompt` and `where`
        select."""
        asked = pb.GetGroupsRequest(
            run_id=request.match_info["run"],
            prompt=request.query.get("prompt", ""),
            where=request.query.get("where", ""),
            max_groups=SHOWN_GROUPS,
        )
        found = await _stub(request).GetGroups(asked, timeout=CALL_SECONDS)
        return _compressed(web.json_response(plain(found)))

    async def logs(self, request: web.Request) -> web.Response:
        """Answer with the newest log lines of all services, or of the service that the parameter `service` names.

        With the parameter `problems`, answer only with warnings and errors.
        """
        asked = pb.GetLogsRequest(
            run_id=request.match_info["run"],
            service=request.query.get("service", ""),
            text=request.query.get("text", ""),
            only_problems="problems" in request.query,
            max_lines=SHOWN_LOG_LINES,
        )
        return _compressed(web.json_response(plain(await _stub(request).GetLogs(asked, timeout=CALL_SECONDS))))

    async def replicas(self, request: web.Request) -> web.Response:
        """Answer with a list of the replicas with all their fields."""
        found = await all_replicas(_stub(request))
        return _compressed(web.json_response({"replicas": [plain(one) for one in found]}))

    async def scaling(self, request: web.Request) -> web.Response:
        """Answer with the active run's autoscaler, if any, and the newest scale requests."""
        stub = _stub(request)
        asked = scaling_pb2.ListScaleRequestsRequest(page_size=SHOWN_SCALE_REQUESTS)
        found = await stub.ListScaleRequests(asked, timeout=CALL_SECONDS)
        answer: dict[str, Any] = {"requests": [plain(one) for one in found.requests], "autoscaler": None}
        try:
            now = await stub.GetAutoscaler(scaling_pb2.GetAutoscalerRequest(), timeout=CALL_SECONDS)
            answer["autoscaler"] = plain(now.autoscaler)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND):
                raise
        return web.json_response(answer)

    async def act(self, request: web.Request) -> web.Response:
        """Execute the operator's action that the URL names."""
        name = request.match_info["action"]
        if name not in ACTIONS:
            raise Refusal(HTTPStatus.NOT_FOUND, f"{name} is no action: there are {', '.join(ACTIONS)}")
        return web.json_response(await ACTIONS[name].take(_stub(request), await _body(request)))


def _stub(request: web.Request) -> CoordinatorStub:
    return request[VIEWER].stub


async def _run(request: web.Request) -> pb.Run:
    found = await _stub(request).GetRun(pb.GetRunRequest(run_id=request.match_info["run"]), timeout=CALL_SECONDS)
    return found.run


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
    return body


def _number(request: web.Request, name: str, default: int, most: int = 2**62) -> int:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > most:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"{name} is {text!r}: it must be a whole number of at most {most}")
    return int(text)


def _charts_json(answer: pb.GetMetricsResponse) -> str:
    return json.dumps(chart_data(rows(answer.series)), separators=(",", ":"), allow_nan=False)


def _compressed(response: web.Response) -> web.Response:
    response.enable_compression()
    return response
