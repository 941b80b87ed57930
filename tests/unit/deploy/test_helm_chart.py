"""The Helm chart, rendered and checked against the schemas of Kubernetes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from relaxd.roles import REPLICA_ROLES, SCALABLE_ROLES
from relaxd.rpc.credentials import read_tokens
from relaxd.rpc.server import LIVENESS
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import launcher_pb2 as pb
from services.launcher.kubernetes_host import pod_manifest
from tests.kit.helm_chart import CHART, HelmUnavailable, Rendered, render_chart

DASHBOARD = CHART.parent / "compose" / "config" / "grafana" / "dashboards" / "relaxd.json"
PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"
TEN_LINES = PAGE.read_text().split("```yaml\n", 1)[1].split("```", 1)[0]
QUEUE = "kueue.x-k8s.io/queue-name"
ALL = {
    "image": {"registry": "registry.example.com/", "tag": "1.0"},
    "secret": "given",
    "redis": {"url": "redis+sentinel://a:26379,b:26379/relaxd"},
    "storage": {"runs": {"claim": "shared"}, "models": {"className": "nfs"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "keda": {"enabled": True},
    "portRange": "20000-29999",
    "defaults": {"labels": {QUEUE: "research"}},
    "roles": {role: {"replicas": 2} for role in (*REPLICA_ROLES, "launcher")}
    | {"trainer": {"gpus": 8}, "rollout": {"gpus": 1, "labels": {"team": "a"}}},
}
WRONG = [
    ({"roles": {"rolout": {"replicas": 1}}}, "additional properties 'rolout' not allowed"),
    ({"roles": {"rollout": {"replicas": -1}}}, "at '/roles/rollout/replicas'"),
    ({"image": {"registry": "example.com"}}, "at '/image/registry'"),
    ({"defaults": {"labels": {"relaxd.dev/role": "rollout"}}}, "at '/defaults/labels/relaxd.dev~1role'"),
    ({"portRange": "20000:29999"}, "at '/portRange'"),
]
Charts = tuple[list[str], list[Rendered]]


@pytest.fixture(scope="module")
def charts() -> Charts:
    try:
        return render_chart({}, ALL, TEN_LINES, *(values for values, _ in WRONG))
    except HelmUnavailable as error:
        pytest.skip(f"the chart is not rendered: {error}")


def container(rendered: Rendered, role: str) -> dict[str, Any]:
    (found,) = rendered.documents["Deployment", f"r-{role}"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(rendered: Rendered, role: str) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container(rendered, role)["env"]}


def test_the_chart_is_what_kubernetes_knows(charts: Charts) -> None:
    lint, (small, full, ten_lines, *wrong) = charts
    assert lint == []
    for rendered in (small, full, ten_lines):
        assert (rendered.refusal, rendered.problems) == ("", [])
    for rendered, (_, expected) in zip(wrong, WRONG, strict=True):
        assert expected in rendered.refusal


def test_a_field_that_a_kind_does_not_have_is_found(charts: Charts, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "chart")
    wrong = {
        "roles.yaml": ("maxUnavailable: 1\n", "maxUnavailble: 1\n"),
        "keda.yaml": ("minReplicaCount: ", "minReplicas: "),
        "monitoring.yaml": ("interval: 15s", "interval: 15"),
    }
    for name, change in wrong.items():
        template = tmp_path / "chart" / "templates" / name
        text = template.read_text()
        assert change[0] in text
        template.write_text(text.replace(*change))
    _, (rendered,) = render_chart(ALL, chart=tmp_path / "chart")
    for part in ("'maxUnavailble'", "ScaledObject r-rollout: ", "'minReplicas'", "ServiceMonitor r: 15 is not"):
        assert any(part in problem for problem in rendered.problems), rendered.problems


def test_the_default_brings_a_whole_stack_up(charts: Charts, tmp_path: Path) -> None:
    _, (small, *_) = charts
    names = {name.removeprefix("r-") for kind, name in small.documents if kind in ("Deployment", "StatefulSet")}
    assert names == {"redis", "coordinator", "trainer", "rollout", "reward", "advantage", "cli"}
    secret = small.documents["Secret", "r-secrets"]["stringData"]
    (tmp_path / "tokens").write_text(secret["tokens"])
    for role in (*REPLICA_ROLES, "coordinator", "admin"):
        assert read_tokens(role, str(tmp_path / "tokens"), secret[f"{role}.token"])  # else it raises
    used = environment(small, "rollout")
    assert used["RELAXD_REDIS"] == "redis://r-redis:6379/0"
    assert used["RELAXD_COORDINATOR"] == "r-coordinator:50050"
    assert not [kind for kind, _ in small.documents if kind in ("ScaledObject", "ServiceMonitor", "ConfigMap")]


def test_every_role_has_its_pod(charts: Charts) -> None:
    _, (_, full, *_) = charts
    for role in (*REPLICA_ROLES, "coordinator"):
        pod = full.documents["Deployment", f"r-{role}"]["spec"]["template"]["spec"]
        (found,) = pod["containers"]
        gpu = "-gpu" if role in ("trainer", "rollout") else ""
        assert found["image"].startswith("registry.example.com/relaxd/")
        assert found["image"].endswith(f"{gpu}:1.0")
        # Draining takes as long as it may, and readiness is not a reason to kill a pod.
        assert pod["terminationGracePeriodSeconds"] == int(environment(full, role)["RELAXD_GRACE_SECONDS"]) + 15
        assert found["livenessProbe"]["grpc"]["service"] == found["startupProbe"]["grpc"]["service"] == LIVENESS
        assert "service" not in found["readinessProbe"]["grpc"]
        # Its own token, and no other role's.
        (secrets,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == "secrets")
        assert secrets["secretName"] == "given"
        assert [item["key"] for item in secrets["items"]] == [f"{role}.token", "tokens", "redis_password"]
        replicas = full.documents["Deployment", f"r-{role}"]["spec"].get("replicas")
        single = role not in SCALABLE_ROLES or role == "critic"
        assert replicas == (1 if single else None if role == "rollout" else 2)
        assert (("PodDisruptionBudget", f"r-{role}") in full.documents) == (not single)
    assert container(full, "trainer")["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container(full, "judge")["command"] == ["python", "-m", "services.rollout.judge"]


def test_services_accept_their_environment(charts: Charts, tmp_path: Path) -> None:
    _, (small, full, *_) = charts
    secret = small.documents["Secret", "r-secrets"]["stringData"]
    for key in ("tokens", "redis_password"):
        (tmp_path / key).write_text(secret[key])
    for rendered in (small, full):
        for role in (*REPLICA_ROLES, "coordinator", "launcher"):
            if ("Deployment", f"r-{role}") not in rendered.documents:
                continue
            (tmp_path / "token").write_text(secret.get(f"{role}.token", ""))
            given = {
                name: value.replace("/run/relaxd", str(tmp_path)).replace("$(POD_IP)", "10.0.0.1")
                for name, value in environment(rendered, role).items()
            }
            settings = parse_settings(role, [], given)
            assert settings.stack == "default.r"
            assert settings.advertise == ("10.0.0.1:50051" if role in REPLICA_ROLES else "")
            settings.security.check("0.0.0.0")  # else it would not listen there


def test_the_launcher_may_only_copy_pods(charts: Charts) -> None:
    _, (small, full, *_) = charts
    assert not [kind for kind, _ in small.documents if kind in ("Role", "RoleBinding", "ServiceAccount")]
    assert "RELAXD_LAUNCHER" not in environment(small, "coordinator")
    assert environment(full, "coordinator")["RELAXD_LAUNCHER"] == "r-launcher:50051"
    pods, deployments = full.documents["Role", "r-launcher"]["rules"]
    assert (pods["resources"], pods["verbs"]) == (["pods"], ["get", "list", "create", "delete"])
    assert (deployments["resources"], deployments["verbs"]) == (["deployments"], ["get"])
    assert deployments["resourceNames"] == [f"r-{role}" for role in SCALABLE_ROLES]
    given = environment(full, "launcher")
    assert (given["RELAXD_PLATFORM"], given["RELAXD_PROJECT"]) == ("kubernetes", "r")
    for role in (*REPLICA_ROLES, "coordinator", "launcher"):
        pod = full.documents["Deployment", f"r-{role}"]["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] == (role == "launcher")
        assert pod.get("serviceAccountName") == ("r-launcher" if role == "launcher" else None)
    deployment = full.documents["Deployment", "r-rollout"]
    deployment["metadata"]["uid"] = "u"
    request = pb.LaunchRequest(launch_id="scale-1", role="rollout")
    labels = pod_manifest(deployment, request, "r-scale-1")["metadata"]["labels"]
    chosen = deployment["spec"]["selector"]["matchLabels"].items()
    assert not chosen <= labels.items()
    assert full.documents["NetworkPolicy", "r"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert (labels[QUEUE], labels["team"]) == ("research", "a")


def test_workloads_and_pods_have_the_labels_that_are_given(charts: Charts) -> None:
    _, (_, full, *_) = charts
    for role in (*REPLICA_ROLES, "coordinator", "launcher"):
        deployment = full.documents["Deployment", f"r-{role}"]
        own = {QUEUE: "research"} | ({"team": "a"} if role == "rollout" else {})
        for labels in (deployment["metadata"]["labels"], deployment["spec"]["template"]["metadata"]["labels"]):
            assert {key: value for key, value in labels.items() if key in (QUEUE, "team")} == own
            assert labels["relaxd.dev/role"] == role
        # An upgrade can't change a selector, but it can these labels.
        assert QUEUE not in deployment["spec"]["selector"]["matchLabels"]


def test_one_range_has_the_ports_that_are_chosen(charts: Charts) -> None:
    _, (small, full, *_) = charts
    assert "ports" not in small.documents["NetworkPolicy", "r"]["spec"]["ingress"][0]
    allowed = full.documents["NetworkPolicy", "r"]["spec"]["ingress"][0]["ports"]
    assert allowed[-1] == {"protocol": "TCP", "port": 20000, "endPort": 29999}
    fixed = {one["port"] for one in allowed[:-1]}
    for role in (*REPLICA_ROLES, "coordinator"):
        pod = full.documents["Deployment", f"r-{role}"]["spec"]["template"]["spec"]
        assert pod["securityContext"]["sysctls"] == [{"name": "net.ipv4.ip_local_port_range", "value": "20000 29999"}]
        listened = {port["containerPort"] for one in pod["containers"] for port in one.get("ports", ())}
        assert listened - {50052} <= fixed  # KEDA's port has a policy of its own


def test_what_is_optional(charts: Charts) -> None:
    _, (_, full, *_) = charts
    assert ("StatefulSet", "r-redis") not in full.documents
    claims = {name for kind, name in full.documents if kind == "PersistentVolumeClaim"}
    assert claims == {"r-models"}
    (trigger,) = full.documents["ScaledObject", "r-rollout"]["spec"]["triggers"]
    port = environment(full, "coordinator")["RELAXD_KEDA_PORT"]
    assert trigger == {"type": "external", "metadata": {"scalerAddress": f"r-coordinator.default:{port}"}}
    policy = full.documents["NetworkPolicy", "r-keda"]["spec"]["ingress"]
    assert policy[0]["ports"] == [{"protocol": "TCP", "port": int(port)}]
    assert full.documents["ServiceMonitor", "r"]["metadata"]["labels"]["release"] == "prometheus"
    dashboards = full.documents["ConfigMap", "r-dashboards"]
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboards["data"]["relaxd.json"]) == json.loads(DASHBOARD.read_text())
    assert environment(full, "rollout")["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://r-collector:4317"


def test_ten_lines_of_values_are_enough_for_gpus(charts: Charts) -> None:
    _, (_, _, rendered, *_) = charts
    assert len(TEN_LINES.splitlines()) <= 10
    assert container(rendered, "trainer")["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert rendered.documents["Deployment", "r-rollout"]["spec"]["replicas"] == 4
