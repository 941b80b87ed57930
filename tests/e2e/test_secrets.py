"""A whole run behind locked doors: mutual TLS, tokens, Redis by ACL and TLS. No secret is found anywhere after it."""

import base64
import hashlib
import os
import secrets
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, quote_plus

import psutil
import pytest

from relaxd.local.state_folder import StateFolder
from tests.e2e.conftest import Workplace
from tests.kit.certificates import CertificateAuthority, environment
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.otlp import otlp_receiver
from tests.kit.redis.redis_acl import USER, apply_acl
from tests.kit.redis.redis_server import RedisServer
from tests.kit.tls_proxy import tls_proxy


@contextmanager
def command_lines() -> Iterator[set[str]]:
    """The arguments of every process of this machine that is seen while the block runs."""
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for process in psutil.process_iter(["cmdline"]):
                seen.add("\0".join(process.info["cmdline"] or ()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_behind_locked_doors_leaves_no_secret(workplace: Workplace, redis_server) -> None:
    place = workplace.folder
    ca = CertificateAuthority.create(place / "certificates")
    files = ca.files("service", clients=True)
    token, password, key = (f"{name}/+ {secrets.token_urlsafe(18)}" for name in ("token", "password", "key"))
    hidden = place / "hidden"
    hidden.mkdir()
    for name, secret in {"token": token, "password": password, "key": key}.items():
        (hidden / name).write_text(secret)
    (hidden / "tokens").write_text(f"admin everyone sha256:{hashlib.sha256(token.encode()).hexdigest()}\n")
    server: RedisServer = redis_server(append_only=False)
    apply_acl(server.url, password)

    with otlp_receiver() as receiver, tls_proxy(server.port, files) as redis_port, command_lines() as seen:
        variables = receiver.environment() | environment(files)
        variables |= {
            "REDIS_URL": f"rediss://{USER}@localhost:{redis_port}/0",
            "RELAXD_REDIS_PASSWORD_FILE": str(hidden / "password"),
            "RELAXD_REDIS_CA": ca.certificate,
            "RELAXD_REDIS_CERTIFICATE": files.certificate,
            "RELAXD_REDIS_KEY": files.key,
            "RELAXD_TOKENS_FILE": str(hidden / "tokens"),
            "RELAXD_TOKEN_FILE": str(hidden / "token"),
            "RELAXD_SGLANG_KEY_FILE": str(hidden / "key"),
            "RELAXD_LOG_LEVEL": "debug",
        }
        process = workplace.start("run", "tiny.toml", "--run-id", "locked", **variables)
        assert process.stdout is not None
        output, status = "", ""
        for line in process.stdout:
            output += line
            if line.startswith("up: "):
                # The command would take the services down at the end of the run, which may come before the answer.
                process.send_signal(signal.SIGSTOP)
                _, status = workplace.relaxd("status", **variables)
                process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=60) == 0, output
        assert "trainer" in status
        assert {span.name for span in receiver.spans()} >= {"create rollout", "process train", "step"}
        exported = list(receiver.exports)
    check_books(read_summary(place / "runs" / "locked"), steps=3)

    private = "".join(Path(files.key).read_text().splitlines()[1:-1])
    forms = [text for secret in (token, password, key) for text in spellings(secret)] + [private[:40].encode()]
    texts = {"the command's output": (output + status).encode(), "command lines": "\n".join(seen).encode()}
    texts |= {f"export {number}": data for number, data in enumerate(exported)}
    texts["config show"] = workplace.relaxd("config", "show", "tiny.toml", **variables)[1].encode()
    for path in place.rglob("*"):
        if path.is_file() and not path.is_relative_to(hidden) and not path.is_relative_to(ca.folder):
            texts[str(path)] = path.read_bytes()
    kept = {StateFolder(place / ".relaxd").redis_password}
    found = {Path(name) for name, text in texts.items() if any(form in text for form in forms)}
    assert found == kept
    assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in kept)
    assert any("services.trainer" in line for line in seen)
    assert any("/logs/trainer.log" in name for name in texts)


def spellings(secret: str) -> list[bytes]:
    """How a secret might be written: as it is, in a URL, or in base64 wherever it begins."""
    data = secret.encode()
    inside = [base64.b64encode(b"\0" * shift + data)[4 * (shift > 0) : -4] for shift in range(3)]
    return [data, quote(secret, safe="").encode(), quote(secret).encode(), quote_plus(secret).encode(), *inside]
