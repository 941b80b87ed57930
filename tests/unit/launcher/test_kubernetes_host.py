"""Replicas as pods, by a server in memory that answers as Kubernetes does, also badly."""

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relaxd.rpc.errors import FailedPrecondition, NotFound, RpcError, Unavailable
from relaxd.v1 import launcher_pb2 as pb
from services.launcher import __main__ as program
from services.launcher import kubernetes_host
from services.launcher.kubernetes_host import KubernetesApi, KubernetesHost, pod_instance, pod_manifest, pod_name
from tests.kit.cases import each

DEPLOYMENT: dict[str, Any] = {
    "metadata": {"name": "r-rollout", "uid": "d-1"},
    "spec": {
        "replicas": 1,
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/instance": "r", "relaxd.dev/role": "rollout"}},
            "spec": {
                "terminationGracePeriodSeconds": 135,
                "containers": [
                    {
                        "name": "rollout",
                        "image": "relaxd/rollout-gpu:1.0",
                        "env": [
                            {"name": "RELAXD_REDIS", "value": "redis://r-redis:6379/0"},
                            {"name": "RELAXD_SGLANG_URL", "value": "http://old:30000"},
                        ],
                        "resources": {"limits": {"nvidia.com/gpu": "1"}},
                    }
                ],
            },
        },
    },
}
REQUEST = pb.LaunchRequest(launch_id="scale-1", role="rollout")


class Server(ThreadingHTTPServer):
    """Deployments and pods of one namespace."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.deployments = {"r-rollout": DEPLOYMENT}
        self.pods: dict[str, dict[str, Any]] = {}
        self.made = 0
        self.answer: tuple[int, str] | None = None
        """Status and text of all answers, if they are bad."""
        self.hold = threading.Event()
        """Set once answers aren't held back any more."""
        self.hold.set()
        self.calls: list[str] = []
        self.lingering = False
        """Pods that are deleted stay, as while their kubelet ends them."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.hold.wait(20)
        self.server.calls.append(f"{self.command} {self.path}")
        assert self.headers["Authorization"] == "Bearer secret"
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        if self.server.answer is not None:
            return self._send(*self.server.answer)
        path, _, query = self.path.partition("?")
        kind, _, name = path.partition("/namespaces/n/")[2].partition("/")
        if self.command == "GET" and not name:
            assert query == "labelSelector=app.kubernetes.io%2Finstance%3Dr%2Crelaxd.dev%2Fscaled"
            return self._send(200, json.dumps({"items": list(self.server.pods.values())}))
        if self.command == "POST":
            name = body["metadata"]["name"]
            if name in self.server.pods:
                return self._refuse(409, "AlreadyExists", f'pods "{name}" already exists')
            self.server.made += 1
            body["metadata"]["uid"] = f"u-{self.server.made}"
            self.server.pods[name] = body
            return self._send(201, json.dumps(body))
        there = {"pods": self.server.pods, "deployments": self.server.deployments}[kind]
        if name not in there:
            return self._refuse(404, "NotFound", f'{kind} "{name}" not found')
        found = there[name]
        if self.command == "DELETE":
            if body["preconditions"]["uid"] != found["metadata"]["uid"]:
                return self._refuse(409, "Conflict", "the UID in the precondition does not match")
            found["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
            found["metadata"]["deletionGracePeriodSeconds"] = body["gracePeriodSeconds"]
            if not self.server.lingering:
                del there[name]
        return self._send(200, json.dumps(found))

    do_POST = do_DELETE = do_GET

    def _refuse(self, status: int, reason: str, message: str) -> None:
        self._send(status, json.dumps({"kind": "Status", "reason": reason, "message": message}))

    def _send(self, status: int, text: str) -> None:
        with suppress(BrokenPipeError):  # the caller waits no more
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, args=(0.02,))
    thread.start()
    yield running
    running.hold.set()
    running.shutdown()
    thread.join(20)
    running.server_close()


@pytest.fixture
def host(server: Server, tmp_path: Path) -> KubernetesHost:
    (tmp_path / "token").write_text("secret\n")
    url = f"http://127.0.0.1:{server.server_port}"
    return KubernetesHost(KubernetesApi(url, "n", token_file=tmp_path / "token", ca_file=tmp_path / "ca"), "r")


def test_a_pod_is_like_the_deployment_s_under_a_name_of_its_own() -> None:
    made = pod_manifest(DEPLOYMENT, REQUEST, "r-scale-1")
    # Neither the Deployment nor a disruption budget selects it; the release's network policy does.
    assert made["metadata"]["labels"] == {"app.kubernetes.io/instance": "r", "relaxd.dev/scaled": "rollout"}
    assert made["metadata"]["ownerReferences"] == [
        {"apiVersion": "apps/v1", "kind": "Deployment", "name": "r-rollout", "uid": "d-1"}
    ]
    (container,) = made["spec"]["containers"]
    (original,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
    assert {**container, "env": None} == {**original, "env": None}
    assert container["env"] == [*original["env"], {"name": "RELAXD_LAUNCH_ID", "value": "scale-1"}]
    request = pb.LaunchRequest(launch_id="scale-1", role="rollout", sglang_url="http://gpu-1:30000")
    (container,) = pod_manifest(DEPLOYMENT, request, "r-scale-1")["spec"]["containers"]
    urls = [one["value"] for one in container["env"] if one["name"] == "RELAXD_SGLANG_URL"]
    assert urls == ["http://gpu-1:30000"]


@pytest.mark.parametrize(
    ("launch_id", "name"),
    [
        ("rollout-scale-c5a1d5-1", "r-rollout-scale-c5a1d5-1"),
        ("sglang-gpu-1.example-30000", "r-sglang-gpu-1-example-30000-bfdb0ab662"),
        ("Ends_", "r-ends-85ae8b603c"),
        ("a" * 100, "r-" + "a" * 50 + "-2816597888"),
    ],
)
def test_each_launch_id_has_a_pod_s_name(launch_id: str, name: str) -> None:
    made = pod_name("r", launch_id)
    assert (made, len(made) <= 63) == (name, True)


def test_launched_listed_restarted_and_removed(host: KubernetesHost, server: Server) -> None:
    made = host.launch(REQUEST)
    assert (made.launch_id, made.role, made.state) == ("scale-1", "rollout", pb.INSTANCE_STATE_PENDING)
    assert host.launch(REQUEST) == made
    assert host.instances() == [made]
    assert server.made == 1
    assert host.restart("r-scale-1", "") == "pod r-scale-1 was pending"
    assert server.made == 2
    assert host.instances() == [made]
    host.remove("scale-1", 3.2)
    host.remove("scale-1", 3.2)
    assert server.pods == {}


def test_a_restart_keeps_the_sglang_server(host: KubernetesHost, server: Server) -> None:
    host.launch(pb.LaunchRequest(launch_id="scale-1", role="rollout", sglang_url="http://gpu-1:30000"))
    before = server.pods["r-scale-1"]["spec"]
    host.restart("r-scale-1", "")
    assert server.pods["r-scale-1"]["spec"] == before


def test_a_pod_of_a_deployment_is_only_deleted(host: KubernetesHost, server: Server) -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    server.pods["r-rollout-x"] = {"metadata": {"name": "r-rollout-x", "uid": "u", "labels": labels}, "spec": {}}
    server.pods["r-cli-x"] = {
        "metadata": {"name": "r-cli-x", "uid": "u", "labels": {**labels, "relaxd.dev/role": "cli"}}
    }
    server.pods["else"] = {"metadata": {"name": "else", "uid": "u"}}
    host.restart("r-rollout-x", "")
    assert (server.pods.keys(), server.made) == ({"r-cli-x", "else"}, 0)
    with pytest.raises(FailedPrecondition, match="pod r-cli-x is of cli: only trainer"):
        host.restart("r-cli-x", "")
    for unknown in ("else", "r-rollout-x"):
        with pytest.raises(NotFound, match=f"release 'r' has no pod '{unknown}'"):
            host.restart(unknown, "")


def test_a_pod_that_does_not_end_is_told(host: KubernetesHost, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_host, "ENDING_SECONDS", -0.9)
    host.launch(REQUEST)
    server.lingering = True
    with pytest.raises(Unavailable, match=r"pod r-scale-1 on no node has not ended within 0.1 s"):
        host.remove("scale-1", 0.0)
    assert server.pods["r-scale-1"]["metadata"]["deletionGracePeriodSeconds"] == 1
    with pytest.raises(Unavailable, match="pod r-scale-1 of an earlier launch is still ending"):
        host.launch(REQUEST)


def test_launches_that_cannot_be(host: KubernetesHost, server: Server) -> None:
    with pytest.raises(FailedPrecondition, match="gpu_uuids can't be chosen on Kubernetes"):
        host.launch(pb.LaunchRequest(launch_id="scale-1", role="rollout", gpu_uuids=["GPU-a"]))
    with pytest.raises(FailedPrecondition, match=r"no Deployment of role 'judge' to copy.*roles\.judge\.replicas"):
        host.launch(pb.LaunchRequest(launch_id="scale-1", role="judge"))
    server.pods["r-scale-1"] = {"metadata": {"name": "r-scale-1", "uid": "u"}}
    for call in (lambda: host.launch(REQUEST), lambda: host.remove("scale-1", 1.0)):
        with pytest.raises(FailedPrecondition, match="pod r-scale-1 is not one that this launcher started"):
            call()


def status(reason: str, message: str) -> str:
    return json.dumps({"kind": "Status", "reason": reason, "message": message})


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        (
            (403, status("Forbidden", "no verb")),
            FailedPrecondition,
            "refuses: GET .*/pods/r-scale-1: HTTP 403 Forbidden",
        ),
        ((422, status("Invalid", "spec")), FailedPrecondition, "HTTP 422 Invalid: spec"),
        ((401, status("Unauthorized", "expired")), Unavailable, "refuses for now: .*HTTP 401 Unauthorized: expired"),
        ((409, status("Conflict", "quota")), Unavailable, "HTTP 409 Conflict: quota"),
        ((429, status("TooManyRequests", "")), Unavailable, "HTTP 429"),
        ((500, status("InternalError", "etcd")), Unavailable, "HTTP 500 InternalError: etcd"),
        ((502, "<html>proxy</html>"), Unavailable, "HTTP 502 with no JSON: '<html>proxy</html>'"),
        ((307, status("", "elsewhere")), FailedPrecondition, "HTTP 307"),
        ((200, "[]"), Unavailable, "HTTP 200 with no object"),
    ],
)
def test_bad_answers_are_named(
    host: KubernetesHost, server: Server, answer: tuple[int, str], error: type[RpcError], told: str
) -> None:
    server.answer = answer
    with pytest.raises(error, match=told):
        host.launch(REQUEST)
    with pytest.raises(error):
        host.instances()


def test_a_server_that_is_away_or_silent_is_told(
    host: KubernetesHost, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_host, "READ_SECONDS", 0.2)
    server.hold.clear()
    with pytest.raises(Unavailable, match=r"the Kubernetes API does not answer: GET .*timed out"):
        host.instances()
    server.hold.set()
    away = KubernetesApi("http://127.0.0.1:9", "n", token_file=host._api._token_file, ca_file=Path("ca"))
    with pytest.raises(Unavailable, match=r"the Kubernetes API does not answer: GET http://127.0.0.1:9/.*refused"):
        away.pods("")


STATES: list[tuple[dict[str, Any], int, str]] = [
    ({}, pb.INSTANCE_STATE_PENDING, "pending"),
    (
        {"phase": "Pending", "conditions": [{"status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}]},
        pb.INSTANCE_STATE_PENDING,
        "pending: 0/3 nodes: insufficient nvidia.com/gpu",
    ),
    (
        {
            "phase": "Pending",
            "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "404"}}}],
        },
        pb.INSTANCE_STATE_PENDING,
        "ErrImagePull: 404",
    ),
    (
        {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]},
        pb.INSTANCE_STATE_RUNNING,
        "running on node-1",
    ),
    (
        {
            "phase": "Running",
            "containerStatuses": [{"restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}],
        },
        pb.INSTANCE_STATE_RESTARTING,
        "CrashLoopBackOff (2 restarts)",
    ),
    (
        {
            "phase": "Running",
            "containerStatuses": [{"restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}],
        },
        pb.INSTANCE_STATE_FAILED,
        "CrashLoopBackOff (5 restarts)",
    ),
    (
        {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
        pb.INSTANCE_STATE_FAILED,
        "Evicted: low on memory",
    ),
    (
        {
            "phase": "Failed",
            "containerStatuses": [{"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}],
        },
        pb.INSTANCE_STATE_FAILED,
        "OOMKilled, exit code 137",
    ),
]


@each(("status", "state", "detail"), STATES)
def test_a_pod_s_state(status: dict[str, Any], state: int, detail: str) -> None:
    pod = pod_manifest(DEPLOYMENT, REQUEST, "p")
    pod["spec"]["nodeName"], pod["status"] = "node-1", status
    made = pod_instance(pod)
    assert (made.state, made.detail) == (state, f"pod p: {detail}")


def test_a_process_that_is_in_no_pod_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("sys.argv", ["launcher", "--platform", "kubernetes", "--project", "r"])
    assert program.main() == 1
    assert "this process runs in no pod: KUBERNETES_SERVICE_HOST" in capsys.readouterr().err


def test_the_service_account_of_a_pod(tmp_path: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(FailedPrecondition, match="this pod has no service account"):
        KubernetesApi.of_pod(environment, tmp_path)
    (tmp_path / "namespace").write_text("n\n")
    api = KubernetesApi.of_pod(environment, tmp_path)
    assert (api.namespace, api._url) == ("n", "https://[fd00::1]:443")
    with pytest.raises(FailedPrecondition, match="name the Helm release"):
        KubernetesHost(api, "")
