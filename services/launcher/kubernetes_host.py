"""A host that runs replicas as pods: each is a copy of a role's Deployment in a release of deploy/helm."""

import copy
import hashlib
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from relaxd.roles import REPLICA_ROLES, SCALABLE_ROLES
from relaxd.rpc.errors import FailedPrecondition, NotFound, Unavailable
from relaxd.v1 import launcher_pb2 as pb

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which Kubernetes mounts a service account's token, CA and namespace."""
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
"""Timeouts of a call to Kubernetes, in seconds: CONNECT_SECONDS to connect, READ_SECONDS between two parts of the
answer."""
PASSING = {401, 408, 429, 500, 502, 503, 504}
"""HTTP statuses after which a retry may succeed. 401 is among them because the token's file is replaced before the
token expires."""
Object = dict[str, Any]


class KubernetesApi:
    """Client of the Kubernetes API for one namespace. Calls raise FailedPrecondition, or Unavailable if a retry may
    succeed."""

    def __init__(self, url: str, namespace: str, *, token_file: Path, ca_file: Path) -> None:
        """`token_file` is read for each call, because Kubernetes renews the token in it."""
        self.namespace = namespace
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._session = requests.Session()
        self._session.trust_env = False  # no proxies, and no credentials of .netrc
        self._session.verify = str(ca_file)

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> "KubernetesApi":
        """Return a client for the Kubernetes server and service account of this pod. Raises FailedPrecondition outside
        of a pod."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise FailedPrecondition(
                "this process runs in no pod: KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set"
            )
        try:
            namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise FailedPrecondition(
                f"this pod has no service account ({error}): set serviceAccountName and automountServiceAccountToken"
            ) from error
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        return cls(url, namespace, token_file=folder / "token", ca_file=folder / "ca.crt")

    def deployment(self, name: str) -> Object | None:
        """Return a Deployment by its name; None if there is none."""
        return self._call("GET", f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}", none_for="NotFound")

    def pod(self, name: str) -> Object | None:
        """Return a pod by its name; None if there is none."""
        return self._call("GET", self._pods(name), none_for="NotFound")

    def pods(self, selector: str) -> list[Object]:
        """Return the pods that match a label selector."""
        listed = self._call("GET", self._pods(), parameters={"labelSelector": selector})
        assert listed is not None
        found: list[Object] = listed.get("items") or []
        return found

    def create_pod(self, manifest: Object) -> Object | None:
        """Create a pod from a manifest and return the pod; None if its name is taken."""
        return self._call("POST", self._pods(), body=manifest, none_for="AlreadyExists")

    def delete_pod(self, pod: Object, grace_seconds: int) -> None:
        """Ask Kubernetes to end a pod. Does nothing if the pod is gone or another pod has its name."""
        body = {"gracePeriodSeconds": grace_seconds, "preconditions": {"uid": pod["metadata"]["uid"]}}
        name = pod["metadata"]["name"]
        self._call("DELETE", self._pods(name), body=body, none_for="NotFound", conflict_is_none=True)

    def _pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{name}" if name else "")

    def _call(
        self,
        verb: str,
        path: str,
        *,
        parameters: Mapping[str, str] | None = None,
        body: Object | None = None,
        none_for: str = "",
        conflict_is_none: bool = False,
    ) -> Object | None:
        """Call the Kubernetes API. Returns the object in the answer; None if the call fails for the reason `none_for`,
        or with HTTP 409 if `conflict_is_none` is set."""
        place = f"{verb} {self._url}{path}"
        try:
            token = self._token_file.read_text(encoding="utf-8").strip()
            answer = self._session.request(
                verb,
                self._url + path,
                params=parameters,
                json=body,
                headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
                timeout=(CONNECT_SECONDS, READ_SECONDS),
                allow_redirects=False,  # the token is for this server only
            )
            answered = answer.json()
        except requests.exceptions.JSONDecodeError as error:
            raise Unavailable(f"{place}: HTTP {answer.status_code} with no JSON: {answer.text[:200]!r}") from error
        except (OSError, requests.exceptions.RequestException) as error:
            raise Unavailable(f"the Kubernetes API does not answer: {place}: {error}") from error
        if not isinstance(answered, dict):
            raise Unavailable(f"{place}: HTTP {answer.status_code} with no object: {answer.text[:200]!r}")
        status, reason = answer.status_code, answered.get("reason", "")
        if 200 <= status < 300:
            return answered
        if (none_for and reason == none_for) or (status == 409 and conflict_is_none):
            return None
        message = f"{place}: HTTP {status} {reason}: {answered.get('message', '')}"
        if status in PASSING or status == 409:  # 409: another change of the same object, such as of a quota
            raise Unavailable(f"the Kubernetes API refuses for now: {message}")
        raise FailedPrecondition(f"the Kubernetes API refuses: {message}")


RELEASE = "app.kubernetes.io/instance"
ROLE = "relaxd.dev/role"
SCALED = "relaxd.dev/scaled"
"""Name of the label that holds a launched pod's role. Launched pods lack the label ROLE, so that neither the role's
Deployment nor its disruption budget nor an autoscaler of Kubernetes counts them."""
LAUNCH_ID, SGLANG_URL = "relaxd.dev/launch-id", "relaxd.dev/sglang-url"
"""Annotations of launched pods: launch id and URL of the SGLang server. (Labels can't contain URLs, nor every launch
id.)"""
MAX_NAME = 63
"""Maximum number of characters of a pod's name, which is also the pod's host name."""
MAX_RESTARTS = 5
"""Number of container restarts after which a pod counts as failed, if its container is waiting to be restarted."""
KILL_SECONDS = 1
"""Grace period of a killed pod, in seconds. With 0, Kubernetes would forget the pod while its processes may still
run."""
ENDING_SECONDS = 30.0
"""Maximum seconds that a pod may take to disappear after its grace period."""
POLL_SECONDS = 0.25


def pod_name(release: str, launch_id: str) -> str:
    """Return the name of the pod for a launch id. Pod names may have only lower-case letters, digits and dashes."""
    wanted = f"{release}-{launch_id}"
    name = re.sub(r"[^a-z0-9-]", "-", wanted.lower()).strip("-")
    if name == wanted and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(launch_id.encode()).hexdigest()[:10]
    return f"{name[: MAX_NAME - 11].rstrip('-')}-{digest}"


def pod_manifest(deployment: Object, request: pb.LaunchRequest, name: str) -> Object:
    """Return the manifest of a launched pod.

    Args:
        deployment: the role's Deployment; the new pod is a copy of its pods.
        request: launch id, role and SGLang server of the replica; without a server, the Deployment's is used.
        name: name of the new pod.

    Raises FailedPrecondition if the Deployment's pods have no container of the role's name.
    """
    metadata, template = deployment["metadata"], deployment["spec"]["template"]
    spec = copy.deepcopy(template["spec"])
    given = {"RELAXD_LAUNCH_ID": request.launch_id}
    annotations = {LAUNCH_ID: request.launch_id}
    if request.sglang_url:
        given["RELAXD_SGLANG_URL"] = annotations[SGLANG_URL] = request.sglang_url
    container = next((one for one in spec["containers"] if one["name"] == request.role), None)
    if container is None:
        raise FailedPrecondition(f"Deployment {metadata['name']!r} has no container {request.role!r} to copy")
    kept = [variable for variable in container.get("env") or () if variable["name"] not in given]
    container["env"] = kept + [{"name": variable, "value": value} for variable, value in given.items()]
    labels = {key: value for key, value in template["metadata"]["labels"].items() if key != ROLE}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels | {SCALED: request.role},
            "annotations": (template["metadata"].get("annotations") or {}) | annotations,
            # Deleting the Deployment, and so the release, deletes the pod.
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
            ],
        },
        "spec": spec,
    }


def pod_instance(pod: Object) -> pb.Instance:
    """Return a launched pod as an Instance message."""
    metadata = pod["metadata"]
    state, detail = _state(pod)
    return pb.Instance(
        launch_id=metadata["annotations"][LAUNCH_ID],
        role=metadata["labels"][SCALED],
        state=state,
        detail=f"pod {metadata['name']}: {detail}",
    )


class KubernetesHost:
    """Runs replicas as pods of one release: copies of its Deployments' pods."""

    roles = frozenset(SCALABLE_ROLES)

    def __init__(self, api: KubernetesApi, release: str) -> None:
        """`release`: the Helm release. Raises FailedPrecondition if it is empty."""
        if not release:
            raise FailedPrecondition("name the Helm release whose roles are scaled with --project / RELAXD_PROJECT")
        self._api = api
        self._release = release

    def launch(self, request: pb.LaunchRequest) -> pb.Instance:
        if request.gpu_uuids:
            raise FailedPrecondition(
                "gpu_uuids can't be chosen on Kubernetes, whose device plugin gives GPUs to pods: leave them out"
            )
        name = pod_name(self._release, request.launch_id)
        pod = self._launched(name) or self._create(request, name)
        if pod["metadata"]["annotations"][LAUNCH_ID] != request.launch_id:
            raise FailedPrecondition(f"pod {name} has launch id {pod['metadata']['annotations'][LAUNCH_ID]}")
        if pod["metadata"].get("deletionTimestamp"):
            raise Unavailable(f"pod {name} of an earlier launch is still ending")
        return pod_instance(pod)

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        pod = self._launched(pod_name(self._release, launch_id))
        if pod is not None:
            self._end(pod, max(KILL_SECONDS, math.ceil(grace_seconds)))

    def restart(self, instance: str, replica_id: str) -> str:
        """Restart the pod named `instance`. `replica_id` is ignored, because Kubernetes does not know it."""
        pod = self._api.pod(instance)
        labels = {} if pod is None else pod["metadata"].get("labels") or {}
        if pod is None or labels.get(RELEASE) != self._release:
            raise NotFound(f"release {self._release!r} has no pod {instance!r}")
        scaled = SCALED in labels
        role = labels[SCALED] if scaled else labels.get(ROLE)
        if role not in REPLICA_ROLES:
            raise FailedPrecondition(
                f"pod {instance} is of {role or 'no role'}: only {', '.join(REPLICA_ROLES)} can be restarted"
            )
        _, was = _state(pod)
        if scaled:
            annotations = pod["metadata"]["annotations"]
            again = pb.LaunchRequest(
                launch_id=annotations[LAUNCH_ID], role=role, sglang_url=annotations.get(SGLANG_URL, "")
            )
            self._end(pod, KILL_SECONDS)
            self._create(again, instance)
        else:  # its ReplicaSet makes another
            self._api.delete_pod(pod, KILL_SECONDS)
        return f"pod {instance} was {was}"

    def instances(self) -> list[pb.Instance]:
        return [pod_instance(pod) for pod in self._api.pods(f"{RELEASE}={self._release},{SCALED}")]

    def _create(self, request: pb.LaunchRequest, name: str) -> Object:
        deployment = self._api.deployment(f"{self._release}-{request.role}")
        if deployment is None:
            raise FailedPrecondition(
                f"release {self._release!r} has no Deployment of role {request.role!r} to copy: give it one replica "
                f"(helm upgrade, roles.{request.role}.replicas)"
            )
        pod = self._api.create_pod(pod_manifest(deployment, request, name)) or self._launched(name)
        if pod is None:
            raise Unavailable(f"pod {name} of an earlier launch was still ending")
        return pod

    def _launched(self, name: str) -> Object | None:
        """Return a launched pod by its name; None if there is none. Raises FailedPrecondition if another pod has the
        name."""
        pod = self._api.pod(name)
        if pod is not None:
            metadata = pod["metadata"]
            ours = (metadata.get("labels") or {}).get(RELEASE) == self._release
            if not ours or LAUNCH_ID not in (metadata.get("annotations") or {}):
                raise FailedPrecondition(f"pod {name} is not one that this launcher started: remove or rename it")
        return pod

    def _end(self, pod: Object, grace_seconds: int) -> None:
        """End a pod, and wait until it is gone. Raises Unavailable if the pod is still there ENDING_SECONDS after its
        grace period."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self._api.delete_pod(pod, grace_seconds)
        deadline = time.monotonic() + grace_seconds + ENDING_SECONDS
        while True:
            found = self._api.pod(name)
            if found is None or found["metadata"]["uid"] != uid:
                return
            if time.monotonic() > deadline:
                node = found["spec"].get("nodeName") or "no node"
                raise Unavailable(f"pod {name} on {node} has not ended within {grace_seconds + ENDING_SECONDS:g} s")
            time.sleep(POLL_SECONDS)  # brief: the grace period, and ENDING_SECONDS


def _state(pod: Object) -> tuple["pb.InstanceState.ValueType", str]:
    """Return the state of a pod's instance, and the reason for it in words."""
    status: dict[str, Any] = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    container: dict[str, Any] = next(iter(status.get("containerStatuses") or ()), {})
    told: dict[str, Any] = container.get("state") or {}
    if phase in ("Failed", "Succeeded"):
        ended = told.get("terminated") or {}
        reason = status.get("reason") or ended.get("reason") or "ended"
        code = f", exit code {ended['exitCode']}" if "exitCode" in ended else ""
        return pb.INSTANCE_STATE_FAILED, _line(f"{reason}{code}", status.get("message") or ended.get("message"))
    if waiting := told.get("waiting"):
        words = _line(waiting.get("reason") or "waiting", waiting.get("message"))
        restarts = container.get("restartCount", 0)
        if not restarts:
            return pb.INSTANCE_STATE_PENDING, words
        failed = restarts >= MAX_RESTARTS
        return pb.INSTANCE_STATE_FAILED if failed else pb.INSTANCE_STATE_RESTARTING, f"{words} ({restarts} restarts)"
    if phase == "Pending":
        problems = [
            one for one in status.get("conditions") or () if one.get("status") == "False" and one.get("message")
        ]
        return pb.INSTANCE_STATE_PENDING, _line("pending", problems[0]["message"] if problems else "")
    return pb.INSTANCE_STATE_RUNNING, f"{phase.lower()} on {pod['spec'].get('nodeName', 'no node')}"


def _line(words: str, message: str | None) -> str:
    return f"{words}: {message}" if message else words
