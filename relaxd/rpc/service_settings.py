"""Settings of a service process. Every flag is also an environment variable."""

import argparse
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from relaxd import __version__
from relaxd.redis_client import parse as parse_redis_url
from relaxd.roles import ROLES
from relaxd.rpc.access import AccessTokens
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.rpc.container_id import container_id
from relaxd.rpc.credentials import (
    REDIS_FILES,
    ServerSecurity,
    read_tls,
    read_token,
    read_tokens,
    with_certificates,
    with_password,
)
from relaxd.rpc.stack_identity import checked_stack_identity
from relaxd.rpc.tls import TlsFiles

COORDINATOR_PORT = 50050
"""Port on which the coordinator listens by default."""
CONSOLE_PORTS = range(50080, 50180)
"""Ports that the console tries by default; the console listens on the first free one."""
JUDGE_KEY = "RELAXD_JUDGE_KEY"
"""Environment variable with the API key of the server at roles.judge.address."""
SECRET_FILES = (
    *("token_file", "tokens_file", "redis_password_file", "redis_key", "tls_key", "judge_key_file", "sglang_key_file"),
)
"""Names of settings whose values are paths of files with secrets."""
LOG_LEVELS = ("debug", "info", "warning", "error")
PLATFORMS = ("docker", "kubernetes")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """Settings of one service process. The run's configuration isn't among them: the coordinator sends it."""

    role: str
    """The process's role: one of relaxd.roles, "launcher" or "console"."""
    host: str = "127.0.0.1"
    """Address on which the process's server listens."""
    port: int = 0
    """Port on which the process's server listens; 0 picks a free port."""
    advertise: str = ""
    """Address (host:port) at which other processes reach this process; empty: derived from `host` and `port`."""
    coordinator: str = f"127.0.0.1:{COORDINATOR_PORT}"
    """Address (host:port) of the coordinator."""
    redis: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    """URL of the board's Redis, including its password."""
    replica_id: str = ""
    """Unique id under which this process registers with the coordinator."""
    stack: str = ""
    """Identity of the process's stack; its server refuses calls from other stacks. Empty: no call is refused."""
    grace_seconds: float = 20.0
    """Maximum seconds that the process drains after SIGTERM, before it ends."""
    launch_id: str = ""
    """Id under which a launcher started this process and can remove it; empty: no launcher did."""
    instance: str = ""
    """Name of this process for the supervisor that restarts it; stays the same over restarts. Empty: it is not
    restarted. Defaults to the container's short id in a Docker container."""
    standby: bool = False
    """True if the replica registers with the coordinator only when asked (Replica.Join)."""
    lease_seconds: float = 6.0
    """Coordinator: seconds without a heartbeat after which a replica counts as dead; equals six heartbeat intervals."""
    keep_runs: int = 50
    """Coordinator: number of ended runs to keep in Redis; the newest is always kept. Folders of runs stay."""
    keep_run_bytes: int = 256 << 20
    """Coordinator: maximum total bytes of ended runs in Redis; the oldest are removed first."""
    keep_run_days: float = 30.0
    """Coordinator: days to keep ended runs in Redis."""
    gpu_lease_seconds: float = 60.0
    """Coordinator: seconds without a heartbeat after which a replica's GPUs may be leased to others; they may be at
    once if the replica is known to have ended. The replica ends its GPU processes before that. Should exceed the time
    in which the coordinator restarts. Lower the value only while no replica runs."""
    launcher: str = ""
    """Coordinator: host:port of the launcher that starts replicas; empty: none."""
    keda_port: int = 0
    """Coordinator: port at which KEDA asks how many rollout replicas there should be, without a token; 0: none. If set,
    the autoscaler leaves adding and removing replicas to KEDA."""
    platform: str = "docker"
    """Launcher: platform on which the launcher starts replicas, "docker" or "kubernetes"."""
    logs: str = ""
    """Coordinator: folder with the log files of the stack's services, which the call GetLogs returns; empty: none."""
    project: str = ""
    """Launcher: compose project or Helm release in which it adds and removes replicas; empty: the compose project of
    the launcher's container."""
    console_hosts: tuple[str, ...] = ()
    """Console: host names under which browsers may open the console, besides `host` and those of loopback."""
    trace_url: str = ""
    """Console: URL of a trace in Jaeger, Tempo or the like, with {trace_id} in its place; empty: no links to traces."""
    log_level: str = "info"
    """Minimum level of log messages: "debug", "info", "warning" or "error"."""
    deadline_seconds: float = 120.0
    """Default deadline of unary calls, in seconds, for callers such as grpcurl."""
    stream_deadline_seconds: float = 330.0
    """Default deadline of streaming calls, in seconds; the longest WatchRun takes 300."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Maximum size of a message, in bytes. The largest are requests with all media of a conversation."""
    engine_python: str = ""
    """Rollout, judge, teacher: Python interpreter of the engine's process, with relaxd and the engine installed; empty:
    the interpreter of this process."""
    sglang_url: str = ""
    """Rollout: base URL of the SGLang server for runs with engine sglang_external."""
    sglang_key: str | None = field(default=None, repr=False)
    """Rollout: API key of the SGLang server at `sglang_url`, if the server requires a key."""
    judge_key: str | None = field(default=None, repr=False)
    """Reward: API key of the server at roles.judge.address, if the server requires a key."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that this process sends with its calls. Without `tokens`, the process's server requires it, too."""
    tokens: AccessTokens | None = None
    """Access tokens that the process's server accepts; None: only `token`, or calls without a token if it is None."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """Paths of the process's certificate, key and CA certificates; all empty: no TLS."""
    secret_files: tuple[str, ...] = field(default=(), repr=False)
    """Paths of the files with secrets of this process."""
    allow_insecure: bool = False
    """True to allow that the process's server listens on more than loopback without authentication."""
    allowed_rewards: tuple[str, ...] = ()
    """Reward: names of rewards that callers of Reward.Score may use, besides the bundled ones and the run's."""

    @property
    def security(self) -> ServerSecurity:
        """Authentication of callers by the process's server: tokens and TLS."""
        tokens = self.tokens or (AccessTokens(token=self.token) if self.token else None)
        return ServerSecurity(tokens, self.tls, self.allow_insecure)


@dataclass(frozen=True)
class _Flag:
    name: str
    kind: Callable[[str], Any]
    default: Any
    help: str

    @property
    def variable(self) -> str:
        return "RELAXD_" + self.name.upper().replace("-", "_")


def _checked(name: str, read: Callable[[str], Any], is_right: Callable[[Any], object]) -> Callable[[str], Any]:
    """Return a function that parses a flag's value with `read`, and raises ValueError unless `is_right` accepts it.

    argparse shows `name` in the error for a wrong value.
    """

    def value_of(text: str) -> Any:
        value = read(text)
        if not is_right(value):
            raise ValueError
        return value

    value_of.__name__ = name
    return value_of


_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_port = _checked("port (0 to 65535)", int, lambda port: 0 <= port <= 65535)
_seconds = _checked("number of seconds (0 or more)", float, lambda seconds: 0 <= seconds < float("inf"))
_positive_seconds = _checked("number of seconds (more than 0)", float, lambda seconds: 0 < seconds < float("inf"))
_count = _checked("whole number (0 or more)", int, lambda count: count >= 0)
# gRPC's own limit is an int32.
_message_bytes = _checked("number of bytes (1024 to 2147483647)", int, lambda count: 1 << 10 <= count < 1 << 31)
_level = _checked(f"log level ({', '.join(LOG_LEVELS)})", str.lower, lambda level: level in LOG_LEVELS)
_platform = _checked(f"platform ({', '.join(PLATFORMS)})", str, lambda platform: platform in PLATFORMS)
_switch = _checked("switch (yes or no)", lambda text: _SWITCHES.get(text.lower()), lambda switch: switch is not None)
_program = _checked("program (a path, or a name on PATH)", shutil.which, lambda path: path is not None)
_http_url = _checked(
    "URL (http://host:port)",
    lambda text: text.rstrip("/") or text,
    lambda url: not url or (urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname),
)
_trace_url = _checked(
    "URL with {trace_id} (such as http://127.0.0.1:16686/trace/{trace_id})",
    str,
    lambda url: not url or (urlsplit(url).scheme in ("http", "https") and "{trace_id}" in url),
)


def checked_address(text: str) -> str:
    """Return an address unchanged if it is host:port. Raises ValueError otherwise."""
    host, _, port = text.rpartition(":")
    if not host:
        raise ValueError
    _port(port)
    return text


checked_address.__name__ = "address (host:port)"


def _redis_url(text: str) -> str:
    try:
        parse_redis_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def parse_settings(
    role: str, arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> ServiceSettings:
    """Read the settings of a service from the command line, then the environment, then the defaults.

    Args:
        role: a role of relaxd.roles, "launcher" or "console".
        arguments: default sys.argv[1:].
        environment: default os.environ.

    An invalid value exits with code 2 and a message that names the flag or the variable, as argparse does.
    """
    environment = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(
        prog=f"python -m {ROLES[role].module if role in ROLES else f'services.{role}'}",
        description=f"The {role} service of relaxd {__version__}.",
        epilog="Traces and metrics are exported when OTEL_EXPORTER_OTLP_ENDPOINT is set; RELAXD_LOG_FORMAT=json writes "
        "logs as JSON; RELAXD_TOKEN may hold the token itself.",
    )
    flags = _flags(role)
    for flag in flags:
        bare: dict[str, Any] = {"nargs": "?", "const": True} if flag.kind is _switch else {}
        text = f"{flag.help} [{flag.variable}, {flag.default!r}]"
        parser.add_argument(f"--{flag.name}", type=flag.kind, default=None, help=text, **bare)
    given = vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments))
    if given.get("redis") and urlsplit(given["redis"]).password:
        parser.error(
            "argument --redis: has a password, which every user of this machine can see in the process list: use "
            "--redis-password-file, or the environment variable RELAXD_REDIS"
        )
    values = {}
    for flag in flags:
        key = flag.name.replace("-", "_")
        values[key] = given[key] if given[key] is not None else _from_environment(parser, flag, environment)
    values["secret_files"] = tuple(file for name in SECRET_FILES if (file := values.get(name)))
    try:
        values["token"] = read_token(values.pop("token_file"), environment)
        values["tokens"] = read_tokens(role, values.pop("tokens_file", ""), values["token"])
        tls = {field: values.pop(f"tls_{field}", "") for field in TlsFiles.__dataclass_fields__}
        values["tls"] = read_tls(role, tls)
        if "sglang_key_file" in values:
            values["sglang_key"] = read_token(values.pop("sglang_key_file"), environment, "RELAXD_SGLANG_KEY")
        if "judge_key_file" in values:
            values["judge_key"] = read_token(values.pop("judge_key_file"), environment, JUDGE_KEY)
        if "redis_password_file" in values:
            values["redis"] = with_password(values["redis"], values.pop("redis_password_file"))
            files = {name: values.pop(f"redis_{name}") for name in REDIS_FILES}
            values["redis"] = with_certificates(values["redis"], files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return ServiceSettings(role=role, **values)


def _new_replica_id(role: str) -> str:
    """Create a unique id for a service process; contains the container's id, or else the host's name."""
    host = container_id() or re.sub(r"[^A-Za-z0-9-]", "", socket.gethostname().partition(".")[0])[:24]
    return "-".join(part for part in (role, host, uuid.uuid4().hex[:6]) if part)


def _from_environment(parser: argparse.ArgumentParser, flag: _Flag, environment: Mapping[str, str]) -> Any:
    text = environment.get(flag.variable)
    if not text:
        return flag.default
    try:
        return flag.kind(text)
    except argparse.ArgumentTypeError as error:
        parser.error(f"environment variable {flag.variable}: {error}")
    except ValueError:
        shown = re.sub(r"//.*@", "//...@", text)  # a URL's password
        parser.error(f"environment variable {flag.variable}: invalid {flag.kind.__name__} value: {shown!r}")


def _flags(role: str) -> list[_Flag]:
    settings = ServiceSettings(role=role)
    is_coordinator = role == "coordinator"
    flags = [
        _Flag("host", str, settings.host, "address to listen on"),
        _Flag("port", _port, COORDINATOR_PORT if is_coordinator else 0, "port to listen on; 0 picks a free one"),
        _Flag("advertise", checked_address, "", "host:port at which others reach this process"),
        _Flag("coordinator", checked_address, settings.coordinator, "host:port of the coordinator"),
        _Flag(
            "redis",
            _redis_url,
            settings.redis,
            "URL of the board's Redis, its Sentinels or its cluster",
        ),
        _Flag("redis-password-file", str, "", "file with that Redis's password"),
        _Flag("redis-ca", str, "", "file with the CA of that Redis's certificate (rediss://)"),
        _Flag("redis-certificate", str, "", "file with the client certificate for that Redis"),
        _Flag("redis-key", str, "", "file with that certificate's key"),
        _Flag("replica-id", str, _new_replica_id(role), "unique id of this process"),
        _Flag("stack", checked_stack_identity, "", "identity of the stack that this process belongs to"),
        _Flag("grace-seconds", _seconds, settings.grace_seconds, "seconds to drain after SIGTERM"),
        _Flag("lease-seconds", _seconds, settings.lease_seconds, "seconds without a heartbeat until a replica is dead"),
        _Flag("keep-runs", _count, settings.keep_runs, "number of ended runs to keep in Redis"),
        _Flag("keep-run-bytes", _count, settings.keep_run_bytes, "maximum bytes of ended runs in Redis"),
        _Flag("keep-run-days", _seconds, settings.keep_run_days, "days to keep an ended run in Redis"),
        _Flag(
            "gpu-lease-seconds",
            _positive_seconds,
            settings.gpu_lease_seconds,
            "seconds without a heartbeat until a replica's GPUs are leased to others",
        ),
        _Flag("launcher", checked_address, "", "host:port of the launcher that starts replicas"),
        _Flag("keda-port", _port, 0, "port at which KEDA asks for the number of rollout replicas; 0: none"),
        _Flag("logs", str, "", "folder with the logs of the services, for GetLogs; default: none"),
        _Flag("platform", _platform, settings.platform, f"where replicas are started: {' or '.join(PLATFORMS)}"),
        _Flag("project", str, "", "compose project or Helm release; default: the compose project of this container"),
        _Flag("launch-id", str, "", "id under which a launcher started this process"),
        _Flag("instance", str, container_id(), "name of this process, the same over restarts"),
        _Flag("standby", _switch, settings.standby, "register only on request (Replica.Join)"),
        _Flag("log-level", _level, settings.log_level, ", ".join(LOG_LEVELS)),
        _Flag("token-file", str, "", "file with this service's bearer token; without a tokens file also the callers'"),
        _Flag("tokens-file", str, "", "file with the accepted tokens and the roles that they are for"),
        _Flag("tls-certificate", str, "", "file with this service's certificate"),
        _Flag("tls-key", str, "", "file with that certificate's key"),
        _Flag("tls-ca", str, "", "file with the CA of the other services' certificates"),
        _Flag("tls-client-ca", str, "", "file with the CA of client certificates, which callers then need"),
        _Flag("tls-name", str, "", "name in the other services' certificates; default: their host"),
        _Flag("allow-insecure", _switch, False, "listen beyond loopback without authentication"),
        _Flag("deadline-seconds", _positive_seconds, settings.deadline_seconds, "deadline of calls without one"),
        _Flag(
            "stream-deadline-seconds",
            _positive_seconds,
            settings.stream_deadline_seconds,
            "deadline of streaming calls without one",
        ),
        _Flag("max-message-bytes", _message_bytes, settings.max_message_bytes, "maximum size of a gRPC message"),
    ]
    if role in ("rollout", "judge", "teacher"):
        flags.append(_Flag("engine-python", _program, "", "Python interpreter of the engine; default: this one"))
    if role == "rollout":
        flags += [
            _Flag("sglang-url", _http_url, "", "URL of the SGLang server of runs with engine sglang_external"),
            _Flag("sglang-key-file", str, "", "file with that server's API key"),
        ]
    if role == "reward":
        flags += [
            _Flag("allowed-rewards", _names, (), "comma-separated rewards that Score accepts"),
            _Flag("judge-key-file", str, "", "file with the API key of the server at roles.judge.address"),
        ]
    if role == "launcher":
        limits = ("deadline-seconds", "stream-deadline-seconds", "max-message-bytes")
        own = ("platform", "project", "token-file", "tokens-file", *limits)
        used = ("host", "port", "stack", "replica-id", "log-level", *own)
        groups = ("redis", "tls-", "allow-insecure")
        return [flag for flag in flags if flag.name in used or flag.name.startswith(groups)]
    if role == "console":
        read = ("host", "port", "coordinator", "stack", "replica-id", "log-level", "token-file", "allow-insecure")
        tls = ("tls-ca", "tls-certificate", "tls-key", "tls-name")
        hosts = _Flag("console-hosts", _names, (), "comma-separated names of its host in browsers' addresses")
        traces = _Flag(
            "trace-url", _trace_url, "", "URL of a trace in Jaeger or the like, with {trace_id} in its place"
        )
        return [*(flag for flag in flags if flag.name in (*read, *tls)), hosts, traces]
    not_for_coordinator = ("coordinator", "advertise", "launch-id", "instance", "standby", "platform", "project")
    only_coordinator = (
        *("lease-seconds", "gpu-lease-seconds", "launcher", "keda-port", "logs"),
        *("keep-runs", "keep-run-bytes", "keep-run-days"),
    )
    unused = not_for_coordinator if is_coordinator else (*only_coordinator, "platform", "project")
    return [flag for flag in flags if flag.name not in unused]
