"""The few calls of the Kubernetes API that the launcher makes, with the service account of its pod."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from relaxd.rpc.errors import FailedPrecondition, Unavailable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder in which Kubernetes mounts a service account's token, CA and namespace."""
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
"""Timeouts of a call: to connect, and between two parts of the answer."""
PASSING = {401, 408, 429, 500, 502, 503, 504}
"""HTTP statuses that a retry may resolve; 401 because the token's file is replaced before the token expires."""
Object = dict[str, Any]


class KubernetesApi:
    """A client for objects of one namespace. Calls raise FailedPrecondition, or Unavailable if a retry may succeed."""

    def __init__(self, url: str, namespace: str, *, token_file: Path, ca_file: Path) -> None:
        """`token_file` is read for each call, because Kubernetes renews its token."""
        self.namespace = namespace
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._session = requests.Session()
        self._session.trust_env = False  # no proxies, and no credentials of .netrc
        self._session.verify = str(ca_file)

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT) -> "KubernetesApi":
        """Use this pod's server and service account. Raises FailedPrecondition outside of a pod."""
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
        """Return a Deployment; None if there is none."""
        return self._call("GET", f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{name}", none_for="NotFound")

    def pod(self, name: str) -> Object | None:
        """Return a pod; None if there is none."""
        return self._call("GET", self._pods(name), none_for="NotFound")

    def pods(self, selector: str) -> list[Object]:
        """Return the pods with some labels."""
        listed = self._call("GET", self._pods(), parameters={"labelSelector": selector})
        assert listed is not None
        found: list[Object] = listed.get("items") or []
        return found

    def create_pod(self, manifest: Object) -> Object | None:
        """Create a pod and return it; None if the name is taken."""
        return self._call("POST", self._pods(), body=manifest, none_for="AlreadyExists")

    def delete_pod(self, pod: Object, grace_seconds: int) -> None:
        """Start ending a pod, unless it is gone or another pod has its name."""
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
        """Make a call. Returns the answered object; None for an error of the reason `none_for`."""
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
