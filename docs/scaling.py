"""Write docs/scaling.md: run the services on a tiny random model and every command of the page.

    .venv/bin/python docs/scaling.py [FIRST_PORT]

Needs the [dev] extra (grpcurl) and two free ports of 127.0.0.1, by default 50050 and 50061.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from admin import Page  # noqa: E402

from relaxd.cli.scale import ENDED  # noqa: E402
from relaxd.client.coordinator_client import CoordinatorClient  # noqa: E402
from relaxd.local import stack  # noqa: E402
from relaxd.local.state_folder import StateFolder  # noqa: E402
from relaxd.v1 import scaling_pb2 as pb  # noqa: E402
from tests.kit.models import make_tiny_model  # noqa: E402

FIRST_PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 50050
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
WAITING_PORT = FIRST_PORT + 11
COORDINATOR, WAITING = f"127.0.0.1:{FIRST_PORT}", f"127.0.0.1:{WAITING_PORT}"
HEAD = """\
# Scaling

You can add and remove rollout, reward, advantage, reference, teacher, judge and agent replicas while a run trains.
(There is at most one [critic](critic.md#as-a-service).) A new rollout replica gets the current weights before its first
prompt. A replica that leaves finishes or nacks the groups that it holds. Nothing is lost or trained twice, and training
doesn't pause.

There are four ways:

- **By hand.** Start another service process anywhere, with the addresses of the coordinator and Redis; stop it with
  SIGTERM. `docker compose up -d --no-recreate --scale rollout=4` does this ([deploy.md](deploy.md)).
- **By request**: `relaxd scale rollout=3`, or the calls below. A *launcher* starts or removes the replicas for the
  coordinator.
- **By itself**: the [autoscaler](#autoscaler).
- **By address**: the coordinator asks services that were started with `--standby` to join, and later to leave. By URL:
  a launcher starts a rollout replica for an [SGLang server](#sglang-servers).

`python docs/scaling.py` runs every command on this page and records its output.
"""
STATES = """\
## States

A scale request is answered at once and carried out in the background. Its state is that of its slowest replica:

```text
ScaleOut   PENDING -> CREATING -> SYNCING -> ACTIVE
                |         |          |
                +---------+----------+-> REMOVING -> FAILED, or CANCELLED when the request was cancelled

ScaleIn    PENDING -> DRAINING -> REMOVING -> DONE, or FAILED when it could not be removed: it keeps working
                |         |
                +---------+-> CANCELLED: it works again
```

| state | meaning |
| --- | --- |
| `CREATING` | started or asked to join, and loading its model |
| `SYNCING` | waiting for its first weights; a rollout replica takes no prompts without them. Other roles skip this |
| `ACTIVE` | working, or registered and waiting for a run |
| `DRAINING` | takes no new groups and has `drain_seconds` to finish those that it holds; it nacks the rest. With [partial rollout](partial-rollout.md) a rollout replica hands them back at once |
| `REMOVING` | its process is stopped (SIGTERM, which drains once more, then SIGKILL), or told to leave |
| `PARTIAL` | the request succeeded for some replicas: they stay as they are, the others are removed. With `rollback_all` it is `FAILED` instead |

- **One request at a time for each role.** While one is in progress, another of the same role gets `FAILED_PRECONDITION`,
  which names it. Requests of different roles are carried out at the same time.
- **Requests are idempotent.** `replicas` is the total number, not the number to add. If there are as many already, the
  request ends at once. Repeating a `request_id` with the same arguments returns that request. Without an id, the same
  arguments return the request in progress.
- **Replicas that you started stay.** Only replicas that were scaled out are scaled in, newest first.
- **All or nothing.** With `rollback_all`, the first new replica that fails ends the request: those that are active already
  have 30 s to finish their groups, and all are removed.
- **Cancelling** rolls back replicas that are not active yet (out) or not gone yet (in); the others stay as they are. When
  everything is being removed already, nothing can be rolled back and cancelling is refused. CancelScaleRequests cancels
  all requests in progress that a filter of role, direction and states selects, and lists those that it had to skip.
- **Dry runs.** ScaleOut, ScaleIn and CancelScaleRequests with `dry_run` answer what they would do.
- **Deadlines.** A replica that isn't active after `timeout_seconds` is removed. A replica that isn't drained after
  `drain_seconds` nacks its groups. Removal waits for a weight synchronisation that the replica takes part in, at most
  for that synchronisation's deadlines.

## Autoscaler

With `[autoscale]` the coordinator adds and removes rollout replicas by itself, through the same requests:

```toml
[autoscale]
mode = "on"         # or "dry_run": it only says what it would do
max_replicas = 16
```

It looks once a second, and decides on means over the last `out_seconds` or `in_seconds`:

| | all of these hold | then |
| --- | --- | --- |
| add | for 30 s the step lacked groups more than 15 % of the time; meanwhile engines were busy for more than 90 % and groups waited for them; Redis wasn't what shut the gate | n * idle / (1 - idle) replicas, 1 to 4, at most up to `max_replicas`; then none for 60 s |
| remove | for 120 s the engines would have been busy for less than 60 % with one less (90 % where they are so far ahead that `board.max_staleness` shuts the gate), also while the trainer waited; no groups waited for them | one, as long as there are more than `min_replicas` and one was scaled out; then none for 300 s |

If tokens per second grew by less than half of what new replicas should have brought, none are added for ten minutes. While the
run is paused, Redis is away, a replica starts or a scale request is in progress, nothing is decided, and it watches anew
afterwards. `relaxd autoscale` (`GetAutoscaler`) shows each condition with its value, why nothing changes, and the last decisions;
`relaxd autoscale on`, `dry_run` or `off` (`SetAutoscaler`) switches it for the rest of the run, over restarts of the coordinator. Its
requests have ids that begin with `auto-`. On Kubernetes [KEDA](kubernetes.md#keda) can carry its decisions out. A colocated run has none, since its engines are on the trainer's GPUs.

In a fluid model of a run (`python -m benchmarks.autoscaler`, 10 engines keep the trainer busy, it begins with 2) it trained 0.998
times the groups per GPU hour of the best fixed number of engines under a steady load, 1.032 times where answers get twice as long, and
1.003 times where they grow by half and shrink.
"""  # noqa: E501
LAUNCHERS = """\
## Launchers

A launcher is a small gRPC service ([launcher.proto](../protos/relaxd/v1/launcher.proto): Launch, Remove, List). Pass its
address to the coordinator with `--launcher` / `RELAXD_LAUNCHER`. The coordinator itself starts no process and never talks
to Docker.

| launcher | starts | where |
| --- | --- | --- |
| process | a process like those of `relaxd up` or `relaxd run` | part of both; its processes end with the rest |
| docker | a container like those of Compose | `compose.scaling.yaml`; only this container mounts the Docker socket |
| (none) | nothing: running services are asked to join by address | `--standby` |

With Compose:

```sh
cd deploy/compose
export COMPOSE_FILE=compose.yaml:compose.scaling.yaml DOCKER_GROUP=$(stat -c %g /var/run/docker.sock)
docker compose up -d
docker compose run --rm cli scale rollout=3 --wait
docker compose down --remove-orphans        # also removes scaled-out replicas
```

The docker launcher copies a container of the role's own service (`rollout`, `reward` or `advantage` of its own project):
image by digest, command, user, mounts, secrets, limits, networks. A request can name neither an image nor a command, and
the launcher removes only containers that it created. These carry Compose's labels under the service `rollout-scaled`:
`docker compose up --scale` ignores them, `down --remove-orphans` removes them. Give the launcher's address only to the
coordinator: the launcher has no port on the host, and asks for the token if there is one.

A launcher obeys only the current coordinator. Calls carry the coordinator's term, and the launcher compares it with the
one in Redis (`RELAXD_REDIS`, the coordinator's). An older term gets `FAILED_PRECONDITION`, one that no coordinator has taken
yet `INVALID_ARGUMENT`. Neither has any effect.

GPUs: every replica sees the GPUs of its host (or of its service in `compose.gpu.yaml`) and leases free ones from the
coordinator. To choose GPUs, pass `gpu_uuids` to ScaleOut. They are divided evenly among the replicas, as
`CUDA_VISIBLE_DEVICES` of a process or as a device request of a container.

### SGLang servers

A run with `rollout.engine = "sglang_external"` ([engines.md](engines.md)) uses SGLang servers that you start. ScaleOut with
`sglang_urls`, or `relaxd scale --sglang-url http://gpu-1:30000`, has the launcher start a rollout replica for each server, with the
API key of the other replicas (`RELAXD_SGLANG_KEY`). Its launch id is made of host and port, such as `sglang-gpu-1-30000`, so a
server that has a replica from an earlier request is left out. Don't name a server that a replica of your own uses: the
new one would take it away. ScaleIn with `replica_ids` stops the replica; the server stays up.
"""  # noqa: E501
FAILURES = """\
## When something fails

| failure | response |
| --- | --- |
| the coordinator dies, in any state | requests are in Redis, and the next coordinator continues them. Launching and removing are idempotent. A launcher refuses a coordinator that was replaced, even after its own restart |
| Redis is away | requests wait for it; coordinator and launcher refuse new ones with `UNAVAILABLE` |
| the launcher is away | the coordinator retries until the request's deadline |
| a new replica dies | the launcher restarts it a few times; then the request is `FAILED`, with the reason |
| a new replica can't load, gets no weights, can't lease a GPU | it retries until the deadline, then it is removed; `detail` says what it waited for |
| a replica dies while it drains | it counts as removed; others get its groups when their leases end |
| a replica can't be removed | `FAILED`; it takes work again and counts again |
| the run ends meanwhile | new replicas are active as soon as they are registered and idle |
"""  # noqa: E501
RELAX = """\
## Compared with Relax

Relax, an RL post-training engine with the same purpose, scales its rollout engines over HTTP. Its documentation and its code
disagree in places. This table shows both and what relaxd does, including deliberate differences.

| | Relax's documentation | Relax's code | relaxd |
| --- | --- | --- | --- |
| some new replicas fail | `rollback_all` by default: all are removed | only for external engines; own ones: PARTIAL, kept | PARTIAL: those that are active stay, the others are removed. With `rollback_all` FAILED: all are |
| some can't be removed | COMPLETED | FAILED | PARTIAL; FAILED when none could be. They keep working |
| time to come up | 1800 s | 300 s | 600 s, `timeout_seconds` with each request |
| when prompts come | registered with the router before the first weights | after | after: an engine without weights takes nothing from the board |
| source of the first weights | an engine that has them, outside the weight topology | the same, but registered in it before | the trainer, in an ordinary synchronisation that starts at once |
| draining | one fixed sleep (30 s; 0 with `force`) | the same | until no group is held, at most `drain_seconds` (30 s; 0: no drain). Unfinished groups are nacked |
| a weight update meanwhile | waited for, then ignored | the same | a current one is waited for, at most for its own deadlines; the next one leaves the replica out |
| cancel | only PENDING and CREATING; running replicas are kept | the same | any state with something to roll back, also of a scale-in; active replicas are kept |
| a repeated request | as many replicas: NOOP | the same; during another request 409 | as many replicas: ends at once; the same in progress: that request; another of the role in progress: FAILED_PRECONDITION, which names it |
| fewer than the initial replicas | 400 | 400 | FAILED_PRECONDITION, because it depends on the current replicas |
| unknown id | 404 | 404 | NOT_FOUND |
| addresses | scheme stripped, deduplicated | the same | URLs of SGLang servers (`sglang_urls`), or host:port of rollout services; those that have joined already are left out |
| `dry_run`, `force` | for scaling in | the same | `dry_run` both ways; for `force`, `drain_seconds = 0` |
| cancelling many, listing by filter | by model and status, with `dry_run` | the same | by role, direction and state, with `dry_run` |
| a restart of the coordinator | not documented | not stated | the request in progress continues |
| roles | rollout | rollout | rollout, reward, advantage, reference, teacher, judge, agent; at most one critic |
| autoscaler | on metrics | on metrics | on what the trainer and the engines wait for; with a dry run |
"""  # noqa: E501


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises TimeoutError after two minutes."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the services did not get there within two minutes")
        time.sleep(0.2)


def write_page(page: Page, coordinator: CoordinatorClient) -> None:
    """Run every command of the page."""
    call = "relaxd.v1.Coordinator/{}".format
    short = "grep -vE 'nanos|_time|deadline'"

    def newest() -> pb.ScaleRequest:
        return coordinator.scale_requests(1)[0]

    def ended() -> bool:
        return newest().state in ENDED

    page.text(STATES)
    page.heading("From the command line")
    page.command("Add replicas, and wait:", f"relaxd scale rollout=2 --wait --coordinator {COORDINATOR}")
    page.command("Remove replicas:", f"relaxd scale rollout=1 --wait --coordinator {COORDINATOR}")
    page.command("See what would be done:", f"relaxd scale rollout=3 --dry-run --coordinator {COORDINATOR}")
    page.command("List requests:", f"relaxd scale rollout --request-state done --coordinator {COORDINATOR}")
    page.command("The trainer can't be scaled:", f"relaxd scale trainer=2 --coordinator {COORDINATOR}")

    page.heading("With grpcurl")
    more = {"request_id": "more", "replicas": 3}
    page.call("Ask for three replicas in all. The answer comes at once:", COORDINATOR, call("ScaleOut"), more)
    page.call("Until it ends, another request is refused:", COORDINATOR, call("ScaleOut"), {"replicas": 4})
    page.call("Repeating a request returns the same request:", COORDINATOR, call("ScaleOut"), more, tail="head -5")
    page.command("`relaxd status` shows a request in progress:", f"relaxd status --coordinator {COORDINATOR}")
    until(ended)
    page.call(
        "Get the state of a request; without an id, the newest:", COORDINATOR, call("GetScaleRequest"), tail=short
    )
    page.call("Ask for as many as there are:", COORDINATOR, call("ScaleOut"), {"replicas": 3}, tail=short)
    wrong = {"role": "trainer", "replicas": 999}
    page.call("Errors name the fields:", COORDINATOR, call("ScaleOut"), wrong)

    less = {"replicas": 2, "drain_seconds": 10}
    page.call("Remove replicas, newest first:", COORDINATOR, call("ScaleIn"), less, tail=short)
    until(ended)
    page.call("It is done:", COORDINATOR, call("GetScaleRequest"), tail=short)
    page.call("Remove a replica by name:", COORDINATOR, call("ScaleIn"), {"replica_ids": ["rollout"]})
    dry = {"filter": {"role": "rollout"}, "dry_run": True}
    page.call("Start a request in order to cancel it:", COORDINATOR, call("ScaleOut"), {"replicas": 3}, tail="head -7")
    names = "grep -E 'request_id|state'"
    page.call("Ask which would be cancelled:", COORDINATOR, call("CancelScaleRequests"), dry, tail=names)
    page.call("Cancel the request in progress:", COORDINATOR, call("CancelScaleRequest"), tail=short)
    until(ended)
    page.call("It is rolled back:", COORDINATOR, call("GetScaleRequest"), tail=short)
    listed = "grep -E 'request_id|direction|^ {6}.state'"
    page.call("List all requests:", COORDINATOR, call("ListScaleRequests"), tail=listed)
    cancelled = {"filter": {"direction": "SCALE_DIRECTION_OUT", "states": ["SCALE_STATE_CANCELLED"]}}
    page.call("List those that were cancelled:", COORDINATOR, call("ListScaleRequests"), cancelled, tail=listed)

    page.heading("By address")
    page.text(
        "Start a rollout service that waits until it is asked to join, with the stack's identity ("
        "`relaxd status --addresses` prints it): "
        f"`RELAXD_STACK=... python -m services.rollout --standby --port {WAITING_PORT} --coordinator {COORDINATOR} "
        "--redis ...`\n"
    )
    page.call("Ask it to join:", COORDINATOR, call("ScaleOut"), {"addresses": [WAITING]}, tail=short)
    until(ended)
    page.call("It is active:", COORDINATOR, call("GetScaleRequest"), tail=short)
    waiting = newest().scaled[0].replica_id
    leave = {"replica_ids": [waiting]}
    page.call(
        "Ask it to leave. It keeps running and can be asked again:", COORDINATOR, call("ScaleIn"), leave, tail=short
    )
    until(ended)
    page.call("It has left:", COORDINATOR, call("GetScaleRequest"), tail="grep -E 'state'")
    page.text(LAUNCHERS)
    page.text(FAILURES)
    page.text(RELAX)


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "tiny")
        state = StateFolder(folder / ".relaxd")
        os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "130"}
        plan = stack.make_plan(state, port=FIRST_PORT, stop_with_parent=True)
        stack.up(state, plan, print)
        words = ["--standby", "--port", str(WAITING_PORT), "--coordinator", COORDINATOR]
        given = {"RELAXD_REDIS": plan.redis, "RELAXD_STACK": plan.stack}  # with its password, which is no argument
        with (folder / "waiting.log").open("w") as log:
            service = [sys.executable, "-m", "services.rollout", *words, "--replica-id", "waiting"]
            waiting = subprocess.Popen(service, cwd=ROOT, env=os.environ | given, stdout=log, stderr=log)
        page = Page(folder, HEAD)
        try:
            with CoordinatorClient(COORDINATOR) as coordinator:
                coordinator.start_run(CONFIG.replace('"tiny"', f'"{folder}/tiny"'), "tiny")
                until(lambda: coordinator.run().step)
                write_page(page, coordinator)
                coordinator.stop_run("tiny", "the page is written")
        finally:
            waiting.terminate()
            waiting.wait(timeout=60)
            stack.down(state)
    page.write(ROOT / "docs" / "scaling.md")


if __name__ == "__main__":
    main()
