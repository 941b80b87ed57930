"""A real Kubernetes API server without nodes: etcd and kube-apiserver, which tests/kit/kubernetes_build.sh builds.

Objects are checked, stored and guarded by roles as in a cluster. No controller acts on them: pods stay pending until a
test binds them, and a Deployment makes none.
"""

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from tests.kit.ports import free_port
from tests.kit.processes import kill
from tests.kit.waiting import wait_until

FOLDER = Path(os.environ.get("RELAXD_KUBERNETES", Path.home() / ".cache" / "relaxd" / "kubernetes-1.20.2"))
MISSING = f"{FOLDER} has no kube-apiserver and etcd: build them with tests/kit/kubernetes_build.sh (8 minutes)"


class KubernetesServer:
    """A running server, with an administrator's credentials."""

    def __init__(self, url: str, ca_file: Path, token: str, process: "subprocess.Popen[bytes]") -> None:
        self.url = url
        self.ca_file = ca_file
        self.process = process
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.verify = str(ca_file)
        self._session.headers["Authorization"] = f"Bearer {token}"

    def call(self, verb: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        """Make a call as the administrator; an error fails the test."""
        answer = self._session.request(verb, self.url + path, json=body, headers={"Content-Type": kind}, timeout=20)
        assert answer.ok, f"{verb} {path}: {answer.text}"
        found: dict[str, Any] = answer.json()
        return found

    def create(self, document: dict[str, Any], namespace: str = "default") -> dict[str, Any]:
        """Create an object of the kinds that deploy/helm has."""
        version = document["apiVersion"]
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        return self.call("POST", f"{root}/namespaces/{namespace}/{document['kind'].lower()}s", document)

    def token_of(self, service_account: str, namespace: str = "default") -> str:
        """Return a token of a service account, as Kubernetes mounts it into pods."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        return str(self.call("POST", path, body)["status"]["token"])


@contextmanager
def kubernetes_server(folder: Path) -> Iterator[KubernetesServer]:
    """Run etcd and an API server, with their files in `folder`."""
    store, peers, port = free_port(), free_port(), free_port()
    url, token = f"https://127.0.0.1:{port}", secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    key = folder / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60)
    etcd = [
        *(FOLDER / "etcd", "--data-dir", folder / "etcd", "--listen-peer-urls", f"http://127.0.0.1:{peers}"),
        *("--listen-client-urls", f"http://127.0.0.1:{store}", "--advertise-client-urls", f"http://127.0.0.1:{store}"),
    ]
    server = [
        *(FOLDER / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{store}", f"--cert-dir={folder}"),
        *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
        *(f"--service-account-issuer={url}", f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC"),
        *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--secure-port={port}"),
        *("--service-cluster-ip-range=192.0.2.128/25", "--disable-admission-plugins=ServiceAccount"),
    ]
    started = []
    try:
        for name, words in (("etcd", etcd), ("server", server)):
            with (folder / f"{name}.log").open("wb") as log:
                started.append(subprocess.Popen(list(map(str, words)), stdout=log, stderr=log))
        ca_file = folder / "apiserver.crt"
        wait_until(ca_file.exists, "the server has a certificate", 60)
        running = KubernetesServer(url, ca_file, token, started[1])
        wait_until(lambda: _ready(running), "the server is ready", 120)
        yield running
    finally:
        for process in reversed(started):
            kill(process)


def _ready(server: KubernetesServer) -> bool:
    try:
        # It makes this namespace once all else is ready.
        return server._session.get(f"{server.url}/api/v1/namespaces/default", timeout=5).ok
    except requests.exceptions.RequestException:
        return False
