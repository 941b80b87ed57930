"""The stack under test: real services by the local supervisor, every connection between them through a link of ours."""

import contextlib
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import grpc
import psutil
import redis

from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local import stack
from relaxd.local.programs import python_path
from relaxd.local.state_folder import StackState, StateFolder
from relaxd.redis_client import connect, key_prefix
from relaxd.roles import ROLES
from relaxd.rpc.client import sync_channel
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from tests.chaos.media import MediaHost
from tests.chaos.planes.data_nodes import DataNodes
from tests.chaos.planes.primaries import RUN, primaries_of
from tests.chaos.program import HARMED
from tests.chaos.proxy import Link, Loop
from tests.chaos.relay import Relay
from tests.chaos.reward import HUGE_FILE, HUGE_VARIABLE
from tests.chaos.teacher_engine import FAILING_VARIABLE, interpreter
from tests.kit.models import make_tiny_model
from tests.kit.ports import free_port
from tests.kit.processes import is_alive
from tests.kit.sounds import make_omni_model
from tests.kit.vision import make_vision_model

PROGRAM = Path(__file__).parent / "program.py"
"""The program that leads conversations with the algorithm "program"."""
CLOCK = Path(__file__).parent / "clock"
"""The folder on services' PYTHONPATH that lets faults set their clocks."""
LEASE_SECONDS = 2.0
"""Of groups."""
REPLICA_LEASE_SECONDS = 6.0
"""Of replicas: one that is silent for longer is restarted."""
MAX_STALENESS = 1
MEDIA_MODELS = {"seeing": make_vision_model, "hearing": make_omni_model}
"""Models that take media, by the names of their folders: Qwen3-VL, and Qwen3-Omni with images, video and sound."""
RANKS = 2
"""Of the trainer, on all hosts."""
REPLICAS = {"rollout": 2, "reward": 2, "advantage": 2, "trainer": 1}
FROZEN_REPLICAS = {"reference": 1, "teacher": 1, "judge": 1}
"""Besides, where the configuration has these roles."""
OWN_REPLICAS = {
    "critic": {"critic": 1},
    **{name: {"agent": 2} for name in ("agent", "program", "shown-media")},
    "hosts": {"ranks": 1},
}
"""Besides, by algorithm."""
MARGIN_SECONDS = 0.5
"""A heartbeat that came so soon after a fault may have been written before it."""
RELAYED = ("rollout", "trainer")
"""Roles whose calls are told apart: they take part in weight synchronisations."""
CONFIG = """
[run]
steps = 1000000
seed = {seed}
folder = "{folder}/runs"

[model]
path = "{folder}/{model}"

[data]
{data}
max_prompt_tokens = 128

[reward]
name = "tests.chaos.reward:{reward}"
environment = ["CHAOS_HUGE_REWARDS"]
workers = 1

[rollout]
samples_per_prompt = 2
max_new_tokens = {most}
threads = 1

{answers}

{algorithm}

{roles}

[trainer]
ranks = {ranks}
groups_per_step = 4
threads = 1
collective_timeout_seconds = 20
max_skipped_updates = 100
{updates}

[trainer.optimizer]
lr = 1e-3

[trainer.checkpoint]
every = 10
keep_step_files = "{step_files}"

[board]
lease_seconds = {lease}
max_staleness = {staleness}
max_deliveries = 20
max_retries = 1000
max_consecutive_drops = 1000
{columns}

[health]
max_restarts = 1000
stuck_seconds = 10

[weights]
verify = "always"
timeout_seconds = 8
connect_timeout_seconds = 5

[telemetry]
samples_per_step = 2
"""
ROLES_CONFIG = """
[roles.reference]
placement = "service"
threads = 1

[roles.teacher]
model = "{folder}/teacher"
threads = 1
{teacher}

[roles.judge]
model = "{folder}/tiny"
max_new_tokens = 2
timeout_seconds = 20
threads = 1
"""
PARTIAL = """
[rollout.partial]
enabled = true
save_seconds = 0.1
save_tokens = 4
"""
CONVERSATIONS = """
stop_token_ids = [2, {stops}]

[eval]
prompts = 0

[agent]
max_turns = 4
turn_tokens = 8
on_failure = "retry"
max_retries = 2
"""
"""Random models rarely end a message by themselves."""
WITH_ENVIRONMENT = """
environment = "tests.chaos.environment:Moody"
settings = {{mood = "{mood}"}}
call_seconds = 2
memory_bytes = 4294967296
"""
WITH_PROGRAM = f"""
command = ["{sys.executable}", "{PROGRAM}", "{{mood}}"]
conversation_seconds = 10
"""
# Faults fall upon the same few groups over and over: limits that are meant for a single bad group would only hide them.
ALGORITHMS = {
    "grpo": {
        "algorithm": """
[algorithm]
drop_zero_variance = false
normalize_std = false
kl_coef = 0.01
distill_coef = 0.1
""",
        "updates": "",
        "step_files": "until_checkpoint",
    },
    "ppo": {
        "algorithm": """
[algorithm]
name = "ppo"
kl_coef = 0.01
distill_loss_coef = 0.1

[roles.critic.optimizer]
lr = 1e-3
""",
        "updates": "mini_batches = 2\nepochs = 2",
        "step_files": "until_checkpoint",
    },
}
ALGORITHMS["critic"] = {
    "algorithm": ALGORITHMS["ppo"]["algorithm"].replace(
        "[roles.critic.optimizer]", '[roles.critic]\nplacement = "service"\nthreads = 1\n\n[roles.critic.optimizer]'
    ),
    "updates": ALGORITHMS["ppo"]["updates"],
    "step_files": "always",
}
COLUMNS = {"small": "", "large": "large_column_bytes = 1", "on-nodes": "large_column_bytes = 1\ndata_urls = {nodes}"}
"""Sizes of columns: with "large" every column is one, and takes the way of payloads (docs/architecture.md); with
"on-nodes" these are on data nodes."""
COMMON = {
    "model": "tiny",
    "data": 'source = "addition"\ndigits = 1',
    "answers": PARTIAL,
    "most": "24",
    "teacher": "",
    "roles": ROLES_CONFIG,
    "reward": "arbitrary",
}
ALGORITHMS = {name: COMMON | settings for name, settings in ALGORITHMS.items()}
ALGORITHMS["teacher-engine"] = ALGORITHMS["grpo"] | {"teacher": 'engine = "sglang"', "step_files": "always"}
ALGORITHMS["plain"] = ALGORITHMS["grpo"] | {
    "algorithm": "[algorithm]\ndrop_zero_variance = false\nnormalize_std = false\n",
    "roles": "",
    "reward": "unjudged",
}
ALGORITHMS["hosts"] = ALGORITHMS["plain"] | {"updates": "hosts = 2"}
ALGORITHMS["agent"] = ALGORITHMS["plain"] | {"answers": CONVERSATIONS + WITH_ENVIRONMENT, "most": "128"}
ALGORITHMS["program"] = ALGORITHMS["plain"] | {"answers": CONVERSATIONS + WITH_PROGRAM, "most": "128"}
ALGORITHMS["media"] = ALGORITHMS["plain"] | {
    "model": "seeing",
    "data": """source = "tests.chaos.media:Pictures"
media_keys = {{image = "image"}}
settings = {{host = "{host}"}}
media_hosts = ["{host}"]""",
    "step_files": "always",
}
ALGORITHMS["shown-media"] = ALGORITHMS["media"] | {
    "model": "hearing",
    "data": """source = "tests.chaos.media:AllKinds"
media_keys = {{image = "image", video = "video", audio = "audio"}}
max_video_tokens = 8""",
    "answers": CONVERSATIONS
    + 'media = ["image", "video", "audio"]'
    + WITH_ENVIRONMENT.replace("tests.chaos.environment:Moody", "tests.chaos.media:Theatre"),
    "most": "160",
}
"""What the run trains with: one update a step, while the step fills; or a critic, too, and four updates of both; or the
same with the critic as a service, which is trained again at the end from all step files (tests.chaos.models); or as the
first, with a teacher in an engine; or as the first, without reference, teacher and judge, for short suites; or as the
last, with a trainer over two hosts, or with conversations as samples, which an environment holds or a program leads,
or with prompts that have pictures of an HTTP server, or images, videos and sounds, of which an environment shows more;
such media are audited at the end (tests.chaos.media)."""


class Progress:
    """Adds up what engines have done, whose own counts begin again when they start."""

    def __init__(self) -> None:
        self.total = 0
        self._last: dict[str, int] = {}

    def see(self, name: str, count: int) -> None:
        """Take an engine's count."""
        last = self._last.get(name, 0)
        self.total += count - last if count >= last else count
        self._last[name] = count


class ChaosStack:
    """Redis, a coordinator, a trainer of two ranks, a reference, a teacher, a judge, two replicas of all other roles.

    A context manager.
    """

    def __init__(
        self,
        folder: Path,
        loop: Loop,
        seed: int,
        algorithm: str = "grpo",
        *,
        columns: str = "small",
        servers: str = "single",
    ) -> None:
        """`algorithm` is one of ALGORITHMS, `columns` one of COLUMNS, `servers` one of PRIMARIES."""
        self.folder = folder
        self.algorithm = algorithm
        self.columns = columns
        self.primaries = primaries_of(servers, folder)
        """Servers of which one takes over from another; None: one Redis, which the supervisor starts."""
        self.data_nodes: DataNodes | None = None
        self.media_host = MediaHost() if algorithm == "media" else None
        self.replicas = (
            REPLICAS | (FROZEN_REPLICAS if ALGORITHMS[algorithm]["roles"] else {}) | OWN_REPLICAS.get(algorithm, {})
        )
        self.loop = loop
        self.seed = seed
        self.links: dict[tuple[str, str], Link] = {}
        """By who connects and to whom: names of services, such as ("rollout-1", "redis")."""
        self.relays: dict[str, Relay] = {}
        self.state = StateFolder(folder / "state")
        self.run_folder = folder / "runs" / RUN
        self.huge_rewards = folder / HUGE_FILE
        """While this file is there, rewards are so large that gradients overflow."""
        self.failing_teacher = folder / "failing-teacher"
        """While this file is there, the answers of the teacher's engine are wrong (tests.chaos.teacher_engine)."""
        self.mood = folder / "mood"
        """Fault of the environment of conversations, while this file is there (tests.chaos.environment)."""
        self.progress = Progress()
        """Tokens that engines have generated in conversations, as far as `missing` has seen."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close_network()
            raise
        return self

    def _start(self) -> None:
        make_tiny_model(self.folder / "tiny")
        make_tiny_model(self.folder / "teacher", seed=1)
        if make_model := MEDIA_MODELS.get(model := ALGORITHMS[self.algorithm]["model"]):
            make_model(self.folder / model)
        os.environ.pop("REDIS_URL", None)
        if self.primaries:
            self.primaries.start()
            os.environ["REDIS_URL"] = self.primaries.url
        engines = {"teacher": "sglang"} if self.algorithm == "teacher-engine" else {}
        plan = stack.make_plan(
            self.state, port=0, replicas=self.replicas, stop_with_parent=True, grace_seconds=3.0, engines=engines
        )
        os.environ.pop("REDIS_URL", None)
        plan.max_restarts = 1000  # it is we who kill them
        if self.columns == "on-nodes":
            self.data_nodes = DataNodes(self.folder, self.loop, self.state.redis_password.read_text().strip())
            self.data_nodes.start()
        coordinator = _port(plan.coordinator)
        for spec in plan.services:
            if spec.role not in ROLES:
                continue
            if self.primaries is None:  # else nobody but these servers says where they are
                link = self._link(spec.name, "redis", _port(plan.redis.rpartition("/")[0]))
                spec.environment["RELAXD_REDIS"] = f"redis://127.0.0.1:{link}/0"
            spec.environment |= {
                "RELAXD_LEASE_SECONDS": str(REPLICA_LEASE_SECONDS),
                "OMP_NUM_THREADS": "1",
                HUGE_VARIABLE: str(self.huge_rewards.parent),
                "PYTHONPATH": os.pathsep.join((str(CLOCK), spec.environment.get("PYTHONPATH", python_path()))),
                "CHAOS_CLOCK": str(self._clock(spec.name)),
            }
            self.set_clock(spec.name, 0.0)
            if spec.role in engines:
                spec.environment["RELAXD_ENGINE_PYTHON"] = interpreter(self.folder)
                spec.environment[FAILING_VARIABLE] = str(self.failing_teacher)
            if spec.role != "coordinator":
                port = behind = free_port()
                if spec.role in RELAYED:
                    behind = free_port()
                    self.relays[spec.name] = relay = Relay(spec.name, behind, port)
                    self.loop.do(relay.start())
                spec.environment |= {
                    "RELAXD_COORDINATOR": f"127.0.0.1:{self._link(spec.name, 'coordinator', coordinator)}",
                    "RELAXD_PORT": str(port),
                    "RELAXD_ADVERTISE": f"127.0.0.1:{self._link('coordinator', spec.name, behind)}",
                }
        if self.media_host:
            self.media_host.start()
        state = stack.up(self.state, plan, lambda text: None)
        self.coordinator = CoordinatorClient(state.coordinator)
        self._channel = sync_channel(state.coordinator)
        self._weights = CoordinatorStub(self._channel)
        self.redis: redis.Redis = connect(state.redis, tag=RUN, seconds=30.0 if self.primaries is None else 5.0)
        self.redis_url = state.redis
        chosen = ALGORITHMS[self.algorithm]
        roles = chosen["roles"].format(folder=self.folder, teacher=chosen["teacher"])
        data = chosen["data"].format(host=self.media_host.name if self.media_host else "")
        answers = chosen["answers"].format(mood=self.mood, stops=", ".join(map(str, range(40, 140))))
        config = CONFIG.format(
            ranks=RANKS,
            folder=self.folder,
            seed=self.seed,
            lease=LEASE_SECONDS,
            staleness=MAX_STALENESS,
            columns=COLUMNS[self.columns].format(nodes=self.data_nodes.urls if self.data_nodes else []),
            **chosen | {"roles": roles, "data": data, "answers": answers},
        )
        self.coordinator.start_run(config, RUN)

    def set_clock(self, name: str, ahead_seconds: float) -> None:
        """Set the wall clock of a service and its children ahead, or behind."""
        file = self._clock(name)
        file.parent.mkdir(exist_ok=True)
        with file.open("r+b" if file.exists() else "wb") as clock:  # the same file: processes have mapped it
            clock.write(struct.pack("d", ahead_seconds))

    def _clock(self, name: str) -> Path:
        return self.folder / "clocks" / name

    def __exit__(self, *error: object) -> None:
        for service in self._state().services if self.state.is_up() else ():
            for process in self.tree(service.name):
                with contextlib.suppress(psutil.Error):
                    process.resume()
        stack.down(self.state)
        self.coordinator.__exit__()
        self._channel.close()
        self.redis.close()
        self._close_network()

    def _close_network(self) -> None:
        if self.primaries:
            self.primaries.stop()
        if self.data_nodes:
            self.data_nodes.stop()
        if self.media_host:
            self.media_host.stop()
        for relay in self.relays.values():
            self.loop.do(relay.stop())

    # --- links

    def _link(self, source: str, target: str, port: int) -> int:
        link = Link(f"{source} > {target}", free_port(), port, to_redis=target == "redis")
        self.loop.do(link.start())
        self.links[source, target] = link
        return link.port

    def between(self, one: str, other: str) -> list[Link]:
        """The links of two services, in both directions."""
        pairs = ((one, other), (other, one))
        return [self.links[pair] for pair in pairs if pair in self.links]

    # --- processes

    def _state(self) -> StackState:
        state = self.state.read()
        if state is None:
            raise RuntimeError("the supervisor is gone")
        return state

    def trainer_ranks(self) -> list[psutil.Process]:
        """The trainer's ranks by number, on all hosts."""
        hosts = ["trainer", *self.names("ranks")]
        each = RANKS // len(hosts)  # of a host's processes the oldest ones; the others are spare
        found = [self.children(name, "services.trainer.loop.training_rank")[:each] for name in hosts]
        return [process for processes in found for process in processes]

    def trainer_rank(self, number: int) -> psutil.Process:
        """A rank of the trainer. Raises RuntimeError: it isn't up."""
        if number >= len(ranks := self.trainer_ranks()):
            raise RuntimeError(f"rank {number} of the trainer is not up")
        return ranks[number]

    def names(self, role: str) -> list[str]:
        """Names of a role's services."""
        return [service.name for service in self._state().services if service.role == role]

    def holding(self, stage: str) -> list[str]:
        """Names of the services that hold groups of a stage now."""
        pending = self.redis.xpending_range(f"{key_prefix(RUN)}stage:{stage}", "workers", "-", "+", 100)
        return sorted({re.sub(r"-r\d+$", "", entry["consumer"].decode()) for entry in pending})

    def process(self, name: str) -> psutil.Process:
        """A service's process. Raises RuntimeError: it isn't up."""
        pid = next(service.pid for service in self._state().services if service.name == name)
        if pid is None:
            raise RuntimeError(f"{name} is not up")
        return psutil.Process(pid)

    def tree(self, name: str) -> list[psutil.Process]:
        """A service's process and all its children; empty when it isn't up."""
        try:
            process = self.process(name)
            return [process, *process.children(recursive=True)]
        except (RuntimeError, psutil.NoSuchProcess):
            return []

    def child(self, name: str, module: str, index: int = 0) -> psutil.Process:
        """A service's index-th child that runs a module. Raises RuntimeError: there is none."""
        found = self.children(name, module)
        if index >= len(found):
            raise RuntimeError(f"{name} has no child {index} that runs {module}")
        return found[index]

    def children(self, name: str, module: str) -> list[psutil.Process]:
        """A service's children that run a module, by process id, without what these have forked."""
        found = {process.pid: process for process in self.tree(name)[1:] if module in _command(process)}
        return [found[pid] for pid in sorted(found) if _parent(found[pid]) not in found]

    @contextlib.contextmanager
    def frozen(self, processes: list[psutil.Process]) -> Iterator[None]:
        """Stop processes, and let them go on."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def harm_of_tricks(self) -> list[str]:
        """Return the harm that tricks of programs have done since this was asked last, each once."""
        file = self.mood.with_suffix(HARMED)
        found = set(file.read_text().splitlines() if file.exists() else ())
        file.unlink(missing_ok=True)
        return sorted(found)

    # --- being whole

    def missing(self, since: float) -> str:
        """What is not as it should be, for people; empty when every service works and every engine has weights.

        Nothing counts that a service said before `since` (Unix time).
        """
        state = self._state()
        if late := [s.name for s in state.services if s.phase != "running" or not is_alive(s.pid)]:
            return f"not running: {', '.join(late)}"
        try:
            run, replicas = self.coordinator.run(RUN), self.coordinator.replicas()
            weights = self._weights.GetWeights(pb.GetWeightsRequest(), timeout=5)
        except (CliError, grpc.RpcError) as error:
            return f"the coordinator does not answer: {error}"
        if run.state != pb.RUN_STATE_RUNNING:
            return f"the run is {pb.RunState.Name(run.state)}: {run.reason}"
        for replica in replicas:
            if replica.registration.role == "rollout":
                self.progress.see(replica.registration.replica_id, replica.status.progress)
        oldest = time.time() - since - MARGIN_SECONDS
        ready = {
            r.registration.replica_id
            for r in replicas
            if r.status.state == REPLICA_STATE_READY and r.heartbeat_age_seconds < oldest
        }
        wanted = {
            f"{service.name}-r{service.restarts}" if service.restarts else service.name
            for service in state.services
            if service.role in self.replicas
        }
        if wanted != ready:
            return f"not ready: {', '.join(sorted(wanted - ready))}; not gone: {', '.join(sorted(ready - wanted))}"
        term = int(self.redis.hget(f"{key_prefix(RUN)}state", "trainer_term") or 0)
        serving = [engine for engine in weights.engines if engine.weights.term == term]
        if len(serving) < REPLICAS["rollout"]:
            return f"{len(serving)} engines serve weights of the trainer's term {term}"
        return ""


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
