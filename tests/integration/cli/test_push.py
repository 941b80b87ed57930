"""`relaxd push` to a stand-in of the hub, with the real huggingface_hub: repository, upload modes, LFS, commit."""

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from relaxd.config.load_toml import load
from services.coordinator.state.records import Evaluation, Outcome
from tests.kit.processes import start_python
from tests.kit.run_folders import CONFIG, write_run

TOKEN = "hf_secret_of_the_test"
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 9}


class Hub:
    """Requests and files that the hub has received."""

    def __init__(self) -> None:
        self.url = ""
        self.created: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        """LFS objects by SHA-256."""
        self.files: dict[str, bytes] = {}
        self.message = ""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the answer to a request that is granted."""
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.url}/{self.created[-1]['organization']}/{self.created[-1]['name']}"}
        if path == "/api/validate-yaml":
            assert "library_name: transformers" in json.loads(body)["content"]
            return {"errors": [], "warnings": []}
        if path == "/api/models/me/tiny/preupload/main":
            modes = [(file["path"], file["path"].endswith(".safetensors")) for file in json.loads(body)["files"]]
            return {
                "files": [
                    {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                    for path, large in modes
                ]
            }
        if path == "/me/tiny.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            upload = [
                {**one, "actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}", "header": {}}}}
                for one in objects
            ]
            return {"transfer": "basic", "objects": upload}
        if path.startswith("/lfs/"):
            self.objects[hashlib.sha256(body).hexdigest()] = body
            return {}
        assert path == "/api/models/me/tiny/commit/main", path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.message = value["summary"]
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[value["path"]] = self.objects[value["oid"]]
        return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/me/tiny/commit/{'0' * 40}"}


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            granted = self.path.startswith("/lfs/") or self.headers["authorization"] == f"Bearer {TOKEN}"
            content = json.dumps(hub.answer(self.path, body) if granted else {"error": "no such token"}).encode()
            self.send_response(200 if granted else 401)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_POST

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def push(folder: Path, hub: Hub, token: str, *words: str) -> tuple[int, str]:
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": str(folder / "hf"), "CI": "1"}
    process = start_python(
        *("-m", "relaxd.cli", "push", "r", *words),
        cwd=folder,
        environment=environment | {"HF_HUB_DISABLE_XET": "1"},  # large files by LFS, which a stand-in can speak
        clean=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=120)
    return process.returncode, str(output)


@pytest.mark.slow
def test_the_model_of_a_run_is_pushed_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evaluations = tuple(Evaluation(step=step, metrics={"eval_reward": step / 10}) for step in (0, 2))
    config = load(CONFIG.format(steps=2).replace('"nothing"', '"Qwen/Qwen3-0.6B"'))
    run = write_run("r", steps=2, done=2, config=config, outcome=Outcome.COMPLETED, evaluations=evaluations)
    (run / "metrics.jsonl").write_text(
        '{"step": 0, "eval_reward": 0.0}\n{"step": 1, "reward_mean": 0.1}\n'
        '{"step": 2, "reward_mean": 0.2, "eval_reward": 0.25}\n'
    )
    (run / "model").mkdir()
    for name, content in FILES.items():
        (run / "model" / name).write_bytes(content)
    with hub_stand_in() as hub:
        code, output = push(tmp_path, hub, "hf_wrong", "me/tiny")
        assert code == 1
        assert f"{hub.url} did not take the model: " in output
        assert "HF_TOKEN" in output
        assert "hf_wrong" not in output
        assert not hub.created

        code, output = push(tmp_path, hub, "hf_wrong", "no good name")
        assert code == 1
        assert "HUB_NAME is 'no good name'" in output

        code, output = push(tmp_path, hub, TOKEN, "me/tiny")
        assert code == 0, output
    assert output.splitlines()[-1] == f"{hub.url}/me/tiny"
    assert TOKEN not in output
    assert [(one["name"], one["organization"], one["visibility"]) for one in hub.created] == [("tiny", "me", "private")]
    assert hub.message == "Step 2 of run r"
    card = hub.files.pop("README.md").decode()
    assert hub.files.pop("curve.png").startswith(b"\x89PNG")
    assert hub.files == FILES
    assert "base_model: Qwen/Qwen3-0.6B\ntags:\n- relaxd\n- reinforcement-learning\n- grpo\n---" in card
    for line in ("| reward | addition |", "| data | addition |", "| algorithm | grpo |", "| step of this model | 2 |"):
        assert line in card
    assert "went from 0.100 to 0.200" in card
    assert "| held_out | 0 |  | 0.000 |" in card
    assert "| held_out | 2 |  | 0.250 |" in card
    assert str(tmp_path) not in card
    for path in run.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()
