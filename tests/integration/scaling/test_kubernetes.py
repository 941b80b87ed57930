"""Replicas as pods, by a real Kubernetes API server and the roles of deploy/helm."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relaxd.rpc.errors import FailedPrecondition, NotFound, Unavailable
from relaxd.v1 import launcher_pb2 as pb
from services.launcher import kubernetes_host
from services.launcher.kubernetes_host import KubernetesApi, KubernetesHost
from tests.kit.helm_chart import HelmUnavailable, render_chart
from tests.kit.kubernetes_server import FOLDER, MISSING, KubernetesServer, kubernetes_server
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]

PODS = "/api/v1/namespaces/default/pods"
REQUEST = pb.LaunchRequest(launch_id="scale-1", role="rollout", sglang_url="http://gpu-1:30000")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    """A server with the release `r`."""
    if not all((FOLDER / name).exists() for name in ("kube-apiserver", "etcd")):
        pytest.skip(MISSING)
    try:
        _, (rendered,) = render_chart({"roles": {"launcher": {"replicas": 1}, "rollout": {"gpus": 1}}})
    except HelmUnavailable as error:
        pytest.skip(f"the chart is not rendered: {error}")
    with kubernetes_server(tmp_path_factory.mktemp("kubernetes")) as running:
        for (kind, _), document in rendered.documents.items():
            if kind == "Deployment":  # this server is older than gRPC's probes, which tests/unit/deploy checks
                for container in document["spec"]["template"]["spec"]["containers"]:
                    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                        container.pop(probe, None)
            if kind in ("ServiceAccount", "Role", "RoleBinding", "Deployment"):
                running.create(document)
        yield running


@pytest.fixture
def api(server: KubernetesServer, tmp_path: Path) -> KubernetesApi:
    """The API with the launcher's own credentials."""
    (tmp_path / "token").write_text(server.token_of("r-launcher"))
    return KubernetesApi(server.url, "default", token_file=tmp_path / "token", ca_file=server.ca_file)


@pytest.fixture
def host(api: KubernetesApi, server: KubernetesServer) -> Iterator[KubernetesHost]:
    yield KubernetesHost(api, "r")
    server.call("DELETE", PODS, {"gracePeriodSeconds": 0})


def bind(server: KubernetesServer, name: str) -> None:
    """Give a pod a node, so that it ends only when the node's kubelet says so."""
    target = {"kind": "Node", "name": "node-1"}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    server.call("POST", f"{PODS}/{name}/binding", body)


def say(server: KubernetesServer, name: str, status: dict[str, Any]) -> None:
    """Write a pod's status as kubelet does."""
    server.call("PATCH", f"{PODS}/{name}/status", {"status": status}, "application/merge-patch+json")


@contextmanager
def kubelet(server: KubernetesServer, seconds: float) -> Iterator[list[int]]:
    """End each pod some seconds after its deletion; yields the grace periods that they had."""
    ended, stop = list[int](), threading.Event()

    def work() -> None:
        seen: dict[str, float] = {}
        while not stop.wait(0.05):
            for pod in server.call("GET", PODS)["items"]:
                metadata = pod["metadata"]
                if "deletionTimestamp" in metadata:
                    since = seen.setdefault(metadata["uid"], time.monotonic())
                    if time.monotonic() - since > seconds:
                        ended.append(metadata["deletionGracePeriodSeconds"])
                        server.call("DELETE", f"{PODS}/{metadata['name']}", {"gracePeriodSeconds": 0})

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join(30)


def test_a_pod_is_launched_once_and_removed_once_its_kubelet_has_ended_it(
    host: KubernetesHost, server: KubernetesServer
) -> None:
    made = host.launch(REQUEST)
    assert (made.launch_id, made.role, made.state) == ("scale-1", "rollout", pb.INSTANCE_STATE_PENDING)
    assert host.launch(REQUEST) == made
    assert host.instances() == [made]
    pod = server.call("GET", f"{PODS}/r-scale-1")
    deployment = server.call("GET", "/apis/apps/v1/namespaces/default/deployments/r-rollout")
    (container,) = pod["spec"]["containers"]
    (original,) = deployment["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["resources"]["limits"]) == (
        original["image"],
        original["resources"]["limits"],
    )
    assert container["env"][-2:] == [
        {"name": "RELAXD_LAUNCH_ID", "value": "scale-1"},
        {"name": "RELAXD_SGLANG_URL", "value": "http://gpu-1:30000"},
    ]
    assert pod["metadata"]["ownerReferences"][0]["uid"] == deployment["metadata"]["uid"]
    selector = ",".join(f"{key}={value}" for key, value in deployment["spec"]["selector"]["matchLabels"].items())
    assert server.call("GET", f"{PODS}?labelSelector={selector}")["items"] == []

    bind(server, "r-scale-1")
    with kubelet(server, 0.5) as ended:
        began = time.monotonic()
        host.remove("scale-1", 15.0)
        assert time.monotonic() - began > 0.5
        host.remove("scale-1", 15.0)
    assert ended == [15]
    assert host.instances() == []


def test_a_pod_is_restarted_under_its_name(host: KubernetesHost, server: KubernetesServer) -> None:
    host.launch(REQUEST)
    bind(server, "r-scale-1")
    say(server, "r-scale-1", {"phase": "Running"})
    before = server.call("GET", f"{PODS}/r-scale-1")
    with kubelet(server, 0.2) as ended:
        assert host.restart("r-scale-1", "") == "pod r-scale-1 was running on node-1"
    after = server.call("GET", f"{PODS}/r-scale-1")
    assert ended == [1]
    assert before["metadata"]["uid"] != after["metadata"]["uid"]
    del before["spec"]["nodeName"]
    assert after["spec"] == before["spec"]
    with pytest.raises(NotFound, match="release 'r' has no pod 'r-scale-2'"):
        host.restart("r-scale-2", "")


def test_a_pod_s_state_is_that_which_kubelet_wrote(host: KubernetesHost, server: KubernetesServer) -> None:
    host.launch(REQUEST)
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes have a GPU",
    }
    say(server, "r-scale-1", {"conditions": [unschedulable]})
    (instance,) = host.instances()
    assert instance.detail == "pod r-scale-1: pending: 0/2 nodes have a GPU"
    crashing = {"name": "rollout", "image": "x", "imageID": "", "ready": False, "restartCount": 5}
    crashing["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m"}}
    say(server, "r-scale-1", {"phase": "Running", "containerStatuses": [crashing]})
    (instance,) = host.instances()
    assert (instance.state, instance.detail) == (
        pb.INSTANCE_STATE_FAILED,
        "pod r-scale-1: CrashLoopBackOff: back-off 5m (5 restarts)",
    )


def test_its_role_allows_what_it_does_and_nothing_else(
    api: KubernetesApi, host: KubernetesHost, server: KubernetesServer
) -> None:
    for verb, path in (
        ("GET", "/api/v1/namespaces/default/secrets"),
        ("GET", "/apis/apps/v1/namespaces/default/deployments"),
        ("GET", "/apis/apps/v1/namespaces/default/deployments/r-coordinator"),
        ("DELETE", "/apis/apps/v1/namespaces/default/deployments/r-rollout"),
        ("DELETE", PODS),
        ("GET", "/api/v1/namespaces/kube-system/pods"),
        ("GET", "/api/v1/nodes"),
    ):
        with pytest.raises(FailedPrecondition, match=r"HTTP 403 Forbidden.*cannot"):
            api._call(verb, path)
    binding = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings"
    document = server.call("GET", f"{binding}/r-launcher")
    server.call("DELETE", f"{binding}/r-launcher")
    try:
        wait_until(lambda: refusal(host), "the role is gone", 30)
        assert "/pods/r-scale-1: HTTP 403 Forbidden" in refusal(host)
        assert '"system:serviceaccount:default:r-launcher" cannot get' in refusal(host)
    finally:
        del document["metadata"]["resourceVersion"]
        server.call("POST", binding, document)
    wait_until(lambda: not refusal(host), "the role is back", 30)


def refusal(host: KubernetesHost) -> str:
    """Return the server's refusal of a launch; "" if there was none."""
    try:
        host.launch(REQUEST)
    except FailedPrecondition as error:
        return error.message
    return ""


def test_what_the_server_refuses_is_named(
    api: KubernetesApi, host: KubernetesHost, server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FailedPrecondition, match="release 'r' has no Deployment of role 'judge'"):
        host.launch(pb.LaunchRequest(launch_id="scale-1", role="judge"))
    server.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "r-scale-1"}, "spec": FOREIGN})
    with pytest.raises(FailedPrecondition, match="pod r-scale-1 is not one that this launcher started"):
        host.launch(REQUEST)
    # As if the other pod had come between the look and the creation.
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "r-scale-1"}, "spec": FOREIGN}
    assert api.create_pod(manifest) is None
    manifest["metadata"] = {"name": "no_name"}
    with pytest.raises(FailedPrecondition, match=r"HTTP 422 Invalid: .*no_name"):
        api.create_pod(manifest)
    # A pod that has the name of one that is gone is left alone.
    api.delete_pod({"metadata": {"name": "r-scale-1", "uid": "older"}}, 1)
    assert server.call("GET", f"{PODS}/r-scale-1")

    api._token_file.write_text("expired")
    with pytest.raises(Unavailable, match=r"refuses for now: .*HTTP 401 Unauthorized"):
        host.instances()
    api._token_file.write_text(server.token_of("r-launcher"))
    host.instances()

    monkeypatch.setattr(kubernetes_host, "READ_SECONDS", 1.0)
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable, match=r"the Kubernetes API does not answer: GET .*timed out"):
            host.instances()
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: host.instances() == [], "it answers again", 30)


def test_a_pod_whose_node_is_gone_is_told(
    host: KubernetesHost, server: KubernetesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_host, "ENDING_SECONDS", 0.5)
    host.launch(REQUEST)
    bind(server, "r-scale-1")
    with pytest.raises(Unavailable, match=r"pod r-scale-1 on node-1 has not ended within 1\.5 s"):
        host.remove("scale-1", 0.0)
    with pytest.raises(Unavailable, match="pod r-scale-1 of an earlier launch is still ending"):
        host.launch(REQUEST)


FOREIGN = {"containers": [{"name": "other", "image": "other"}]}
