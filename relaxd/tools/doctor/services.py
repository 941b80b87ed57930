"""Checks of ports, of Redis, of running services, and of Docker, which `relaxd up --compose` needs."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis

from relaxd import PROTOCOL_VERSION, __version__
from relaxd.board.sizes import NO_EVICTION
from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.config.operation import FEWEST_PORTS
from relaxd.local import compose, embedded_redis
from relaxd.local.port_holder import find_holder
from relaxd.process.ports import is_free
from relaxd.redis_client import COORDINATOR, connect, where
from relaxd.replica.gpus import visible_gpus
from relaxd.text import byte_amount
from relaxd.tools.doctor import Finding, Scope
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED, ReplicaStatus


def check_services(scope: Scope) -> Iterator[Finding]:
    """Check that the running services work and have the same relaxd version as this command."""
    stack = scope.folder.read()
    for service in stack.failed() if stack else ():
        yield Finding(
            "problem",
            service.name,
            f"it kept dying (exit code {service.exit_code}) and is no longer restarted",
            "its log says why",
            f"relaxd logs {service.name}",
        )
    if scope.coordinator is None:
        yield Finding("ok", "services", f"none are up here (in {scope.folder.path})")
        return
    try:
        with CoordinatorClient(scope.coordinator) as client:
            statuses = [client.coordinator_status(), *(replica.status for replica in client.replicas())]
    except CliError as error:
        yield Finding("problem", "services", error.message, "a coordinator that answers", error.hint)
        return
    yield from status_findings(statuses)


def status_findings(statuses: Sequence[ReplicaStatus]) -> Iterator[Finding]:
    """Assess the relaxd versions and the states of running services, given their statuses."""
    own = (__version__, PROTOCOL_VERSION)
    for status in statuses:
        theirs = (status.package_version, status.protocol_version)
        if theirs != own:
            yield Finding(
                "problem" if status.protocol_version != PROTOCOL_VERSION else "warning",
                status.replica_id,
                f"relaxd {theirs[0] or 'of unknown version'} with protocol {theirs[1]}; this command is relaxd "
                f"{own[0]} with protocol {own[1]}",
                "one version everywhere: restart the services, and rebuild containers",
                "relaxd down && relaxd up",
            )
        if status.state == REPLICA_STATE_FAILED:
            yield Finding("problem", status.replica_id, status.detail or "it failed", "its log says why", "relaxd logs")
    roles = Counter(status.role for status in statuses)
    counts = ", ".join(f"{role} {count}" if count > 1 else role for role, count in roles.items())
    yield Finding("ok", "services", f"up: {counts}")


CLOCK_SECONDS = 1.0
"""Difference between a Redis server's clock and this machine's, in seconds, above which the doctor warns."""


def check_redis(scope: Scope) -> Iterator[Finding]:
    """Check the Redis of running services, else the Redis at REDIS_URL, and the run's data nodes."""
    stack = scope.folder.read()
    try:
        url = stack.redis if stack else embedded_redis.given_url()
    except CliError as error:
        yield Finding("problem", "Redis", error.message, "a URL that names a Redis", error.hint)
        return
    if url is not None:
        yield from server_findings("Redis", url, scope.patience_seconds)
    for node in scope.config.board.data_urls if scope.config and not scope.elsewhere else ():
        yield from server_findings("data node", node, scope.patience_seconds)


def check_redis_program(scope: Scope) -> Iterator[Finding]:
    """Check the Redis program that `relaxd up` would start, unless services are running or REDIS_URL is set."""
    if scope.elsewhere or scope.folder.read() or os.environ.get("REDIS_URL"):
        return
    try:
        program = embedded_redis.find_server()
        version = ".".join(map(str, embedded_redis.server_version(program)))
        most = byte_amount(embedded_redis.maxmemory())
        yield Finding("ok", "Redis", f"{program}, version {version}, would get {most} (RELAXD_REDIS_MAXMEMORY)")
    except CliError as error:
        yield Finding("problem", "Redis", error.message, "a program and a size for it", error.hint)


def server_findings(about: str, url: str, seconds: float) -> Iterator[Finding]:
    """Assess the Redis server at a URL, which must answer within `seconds`: its settings, clock and memory."""
    name = where(url)
    try:
        embedded_redis.wait_until_up(url, seconds=seconds)
        with contextlib.closing(connect(url, tag=COORDINATOR, seconds=seconds)) as client:
            facts: dict[str, Any] = client.info()
            now, before = client.time(), time.time()
    except CliError as error:
        yield Finding("problem", about, error.message, "a Redis that answers", error.hint)
        return
    except redis.RedisError as error:
        yield Finding("problem", about, f"{name}: {error}", "a Redis that lets its user call INFO and TIME")
        return
    wrong = list(fact_findings(about, name, facts))
    if abs(ahead := now[0] + now[1] / 1e6 - before) > CLOCK_SECONDS:
        right = "clocks that agree to a second: leases end by Redis's"
        found = f"{name}: its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        wrong.append(Finding("warning", about, found, right, "sudo timedatectl set-ntp true"))
    if wrong:
        yield from wrong
        return
    used, most = byte_amount(facts["used_memory"]), byte_amount(facts["maxmemory"])
    persistence = "append-only file" if facts["aof_enabled"] else "no append-only file"
    text = f"{name}, version {version_of(facts)}, {used} of {most} used, {facts['maxmemory_policy']}, {persistence}"
    yield Finding("ok", about, text)


def fact_findings(about: str, name: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Assess a Redis server's INFO: version, role, settings and writes to disk. Yields only warnings and problems."""
    version = version_of(facts)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    needed = ".".join(map(str, embedded_redis.MIN_VERSION))
    if numbers < embedded_redis.MIN_VERSION and "valkey_version" not in facts:
        yield Finding("problem", about, f"{name}: version {version}", f"{needed} or newer, for the board's scripts")
    if facts["role"] == "slave":
        yield Finding("problem", about, f"{name}: a replica, which takes no writes", "the URL of its primary")
    if facts["maxmemory_policy"] != NO_EVICTION:
        yield Finding(
            "problem",
            about,
            f"{name}: maxmemory-policy {facts['maxmemory_policy']}",
            f"{NO_EVICTION}: others forget groups when Redis is full",
            f"redis-cli CONFIG SET maxmemory-policy {NO_EVICTION}",
        )
    if not facts["maxmemory"]:
        yield Finding(
            "warning",
            about,
            f"{name}: no maxmemory, so that the kernel may kill it when memory is full",
            "a limit that leaves room for its copy while it saves",
            f"redis-cli CONFIG SET maxmemory {max(1, facts['total_system_memory'] >> 32)}gb",
        )
    if about == "Redis" and not facts["aof_enabled"]:  # what is on data nodes is generated again
        yield Finding(
            "warning",
            about,
            f"{name}: no append-only file, so that a restart of Redis forgets what it didn't save",
            "appendonly yes, with appendfsync everysec",
            "redis-cli CONFIG SET appendonly yes",
        )
    for field in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if facts.get(field, "ok") != "ok":
            right = "ok: its log says why it can't write its files, such as a full disk"
            yield Finding("problem", about, f"{name}: {field} is {facts[field]}", right)


def version_of(facts: Mapping[str, Any]) -> str:
    """Return a Redis server's version, from its INFO; of Valkey its own version, not the compatible Redis version."""
    return str(facts.get("valkey_version", facts["redis_version"]))


def check_coordinator_port(scope: Scope) -> Iterator[Finding]:
    """Check whether the coordinator's default port is free, or which process or stack listens on it."""
    about, stack = f"port {scope.port}", scope.folder.read()
    holder = find_holder(scope.port, seconds=scope.patience_seconds)
    if holder is None:
        yield Finding("ok", about, "free")
    elif stack is not None and stack.stack == holder.stack:
        yield Finding("ok", about, f"held by the services that are up here: {holder}")
    elif scope.coordinator and scope.coordinator.endswith(f":{scope.port}"):
        yield Finding("ok", about, f"held by the coordinator that commands call here: {holder}")
    else:
        yield Finding(
            "warning",
            about,
            f"held by {holder}",
            "free for `relaxd up`, which else needs --port; `relaxd run` takes any free port"
            + "; `relaxd down` ends what runs there" * bool(holder.folder),
            f"relaxd down --state {holder.folder}" if holder.folder else "relaxd up --port 0",
        )


def check_weight_ports(scope: Scope) -> Iterator[Finding]:
    """Check that enough ports of weights.ports, if the run sets it, are free."""
    ports = scope.config.weights.port_range if scope.config else None
    if ports is None or scope.elsewhere:
        return
    free = sum(is_free(port, "0.0.0.0") for port in ports)
    found = f"{free} of {len(ports)} are free"
    if free >= FEWEST_PORTS:
        yield Finding("ok", "weights.ports", found)
    else:
        yield Finding("problem", "weights.ports", found, f"at least {FEWEST_PORTS}: give a larger range")


CALL_SECONDS = 5.0
IMAGE = re.compile(r"^\s*image: (relaxd/\S+)", re.MULTILINE)
CONFIGURE_RUNTIME = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
INSTALL_PLUGIN = "Docker's Compose plugin (https://docs.docker.com/compose/install/linux)"


def check_docker(scope: Scope) -> Iterator[Finding]:
    """Check that the Docker engine, its Compose plugin and its GPU runtime work, and which services' images exist."""
    needed = scope.containers
    if shutil.which("docker") is None:
        yield _missing(needed, "docker", "not installed", "Docker (https://docs.docker.com/engine/install)")
        return
    try:
        info, error = _call("info", "--format", "{{json .}}")
        yield from engine_findings(json.loads(info), error, needed, len(visible_gpus()))
        images, unanswered = _call("image", "ls", "--format", "{{.Repository}}:{{.Tag}}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as reason:
        yield _missing(needed, "docker", f"it does not answer: {reason}", "an engine that answers")
        return
    if not unanswered:
        yield from image_findings(images.splitlines())


def engine_findings(info: Mapping[str, Any], error: str, needed: bool, gpus: int) -> Iterator[Finding]:
    """Assess Docker's engine, GPU runtime and Compose plugin by the output and the error of `docker info`.

    A missing part is a problem only if `needed`.
    """
    plugins = {one["Name"]: one.get("Version", "") for one in info.get("ClientInfo", {}).get("Plugins") or ()}
    if info.get("ServerVersion"):
        yield Finding("ok", "docker", f"engine {info['ServerVersion']}")
        if gpus and "nvidia" not in (info.get("Runtimes") or {}) and not info.get("CDISpecDirs"):
            right, command = "NVIDIA's container toolkit, else containers see no GPUs", CONFIGURE_RUNTIME
            yield _missing(needed, "docker GPUs", "the engine has no runtime nvidia", right, command)
    else:
        why = " ".join(error.split()) or "; ".join(info.get("ServerErrors") or ("no engine answers",))
        right = "an engine that runs, and that this user may call (group docker)"
        yield _missing(needed, "docker", why, right, "sudo systemctl start docker")
    if "compose" in plugins:
        yield Finding("ok", "docker compose", f"plugin {plugins['compose']}")
    else:
        yield _missing(needed, "docker compose", "the plugin is missing", INSTALL_PLUGIN)


def _missing(needed: bool, about: str, found: str, right: str, how: str = "") -> Finding:
    """Return the finding that a part of Docker is missing: a problem if `needed`, otherwise "absent"."""
    if needed:
        return Finding("problem", about, found, right, how)
    return Finding("absent", about, f"{found} (only relaxd up --compose needs it)")


def image_findings(images: Sequence[str]) -> Iterator[Finding]:
    """Report which Docker images of relaxd's services exist; `relaxd up --compose` builds missing ones."""
    try:
        text = (compose.compose_folder() / "compose.yaml").read_text()
    except CliError:  # outside a source tree there is nothing to build
        return
    wanted = {name.partition(":")[0] for name in IMAGE.findall(text)}
    there = sorted(name for name in images if name.partition(":")[0] in wanted)
    missing = sorted(wanted - {name.partition(":")[0] for name in there})
    found = f"there: {', '.join(there) or 'none'}"
    found += f"; not built: {', '.join(missing)} (relaxd up --compose builds them)" if missing else ""
    yield Finding("ok", "images", found)


def _call(*words: str) -> tuple[str, str]:
    """Run a docker command. Returns its standard output, and its standard error, "" if it succeeded.

    Raises TimeoutExpired, OSError.
    """
    done = subprocess.run(
        ["docker", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CALL_SECONDS, check=False
    )
    return done.stdout, done.stderr if done.returncode else ""
