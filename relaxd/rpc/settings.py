"""The settings of a service process: every flag is also an environment variable."""

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
from relaxd.rpc.access import Tokens
from relaxd.rpc.container_id import container_id
from relaxd.rpc.credentials import REDIS_FILES, read_tls, read_token, read_tokens, with_certificates, with_password
from relaxd.rpc.security import Doors
from relaxd.rpc.tls import TlsFiles

COORDINATOR_PORT = 50050
"""Where a coordinator listens unless told otherwise."""
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """How one service process is set up. What it works on comes from the coordinator."""

    role: str
    """coordinator, trainer, rollout, reward, advantage or launcher."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    advertise: str = ""
    """host:port at which others reach this process; empty: worked out from host and port."""
    coordinator: str = f"127.0.0.1:{COORDINATOR_PORT}"
    """host:port of the coordinator."""
    redis: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    """URL of the Redis that holds the board, with its password, if it has one."""
    replica_id: str = ""
    """Unique name of this process."""
    grace_seconds: float = 20.0
    """Seconds that draining may take after SIGTERM."""
    launch_id: str = ""
    """The name under which a launcher started this process, by which it is scaled in; empty: it never is."""
    instance: str = ""
    """The name under which whoever starts this process again when it ends knows it: the same over all its processes.
    Empty: nobody would start it again. In a Docker container it is the container's short id, unless given."""
    standby: bool = False
    """Register only when asked to (Replica.Join)."""
    lease_seconds: float = 6.0
    """Coordinator: a replica is dead after so many seconds without a heartbeat; it is asked for six in that time."""
    keep_runs: int = 50
    """Coordinator: Redis remembers so many runs that have ended, the newest one always; their folders stay."""
    keep_run_bytes: int = 256 << 20
    """Coordinator: what those runs may take in Redis, together."""
    keep_run_days: float = 30.0
    """Coordinator: how long it remembers them."""
    gpu_lease_seconds: float = 60.0
    """Coordinator: the GPUs of a replica go to others after so many seconds without a heartbeat, sooner if it is known
    to have ended; by then it has ended what uses them. It should be longer than a coordinator takes to restart. Lower
    it only while no replica runs."""
    launcher: str = ""
    """Coordinator: host:port of the launcher that starts replicas; empty: there is none."""
    project: str = ""
    """Launcher: the compose project whose services it starts more of; empty: that of its own container."""
    log_level: str = "info"
    """debug, info, warning or error."""
    deadline_seconds: float = 120.0
    """How long a unary call may take that comes without a deadline of its own (typed into grpcurl, say)."""
    stream_deadline_seconds: float = 330.0
    """The same for streaming calls; the longest WatchRun takes 300 s."""
    max_message_bytes: int = 64 << 20
    """Largest message that is taken in or sent out; larger columns travel by the board."""
    engine_python: str = ""
    """Rollout: Python interpreter of the engine's process, which has relaxd and the engine installed; empty: this
    process's own."""
    sglang_url: str = ""
    """Rollout: base URL of the SGLang server to use where the run's engine is sglang_external."""
    sglang_key: str | None = field(default=None, repr=False)
    """Rollout: that server's API key; None where it has none."""
    token: str | None = field(default=None, repr=False)
    """Bearer token of this process's calls; unless there are `tokens`, also the one that calls to it must carry."""
    tokens: Tokens | None = None
    """The tokens that calls must carry."""
    tls: TlsFiles = field(default_factory=TlsFiles)
    """Certificates."""
    allow_insecure: bool = False
    """Listen beyond loopback without any authentication."""
    allowed_rewards: tuple[str, ...] = ()
    """Reward: what Reward.Score may be asked for, besides the bundled rewards and that of the run."""

    @property
    def doors(self) -> Doors:
        """What callers of this process need."""
        tokens = self.tokens or (Tokens(token=self.token) if self.token else None)
        return Doors(tokens, self.tls, self.allow_insecure)


@dataclass(frozen=True)
class _Flag:
    name: str
    kind: Callable[[str], Any]
    default: Any
    help: str

    @property
    def variable(self) -> str:
        return "RELAXD_" + self.name.upper().replace("-", "_")


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError
    return port


_port.__name__ = "port (0 to 65535)"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


_seconds.__name__ = "number of seconds (0 or more)"


def _positive_seconds(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise ValueError
    return seconds


_positive_seconds.__name__ = "number of seconds (more than 0)"


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError
    return count


_count.__name__ = "whole number (0 or more)"


def _message_bytes(text: str) -> int:
    count = int(text)
    if not 1 << 10 <= count < 1 << 31:  # gRPC's own limit is an int32
        raise ValueError
    return count


_message_bytes.__name__ = "number of bytes (1024 to 2147483647)"


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host:
        raise ValueError
    _port(port)
    return text


_address.__name__ = "address (host:port)"


def _level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError
    return text.lower()


def _switch(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


_switch.__name__ = "switch (yes or no)"


_level.__name__ = f"log level ({', '.join(LOG_LEVELS)})"


def _redis_url(text: str) -> str:
    if not text.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError
    return text


def _http_url(text: str) -> str:
    if text and (urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname):
        raise ValueError
    return text.rstrip("/")


_http_url.__name__ = "URL (http://host:port)"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


_redis_url.__name__ = "Redis URL (redis://host:port/database)"


def _program(text: str) -> str:
    found = shutil.which(text)
    if found is None:
        raise ValueError
    return found


_program.__name__ = "program (a path, or a name on PATH)"


def parse_settings(
    role: str, arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> ServiceSettings:
    """Read the settings of a service from the command line, then the environment, then the defaults.

    Args:
        role: coordinator, trainer, rollout, reward, advantage or launcher.
        arguments: instead of sys.argv[1:].
        environment: instead of os.environ.

    A wrong value ends the process with code 2 and a message that names the flag or the variable, as argparse does.
    """
    environment = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{role}",
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
            "argument --redis: has a password, which everyone on this machine can read in the list of processes: use "
            "--redis-password-file, or the environment variable RELAXD_REDIS"
        )
    values = {}
    for flag in flags:
        key = flag.name.replace("-", "_")
        values[key] = given[key] if given[key] is not None else _from_environment(parser, flag, environment)
    try:
        values["token"] = read_token(values.pop("token_file"), environment)
        values["tokens"] = read_tokens(role, values.pop("tokens_file"), values["token"])
        values["tls"] = read_tls(role, {field: values.pop(f"tls_{field}") for field in TlsFiles.__dataclass_fields__})
        if "sglang_key_file" in values:
            values["sglang_key"] = read_token(values.pop("sglang_key_file"), environment, "RELAXD_SGLANG_KEY")
        if "redis_password_file" in values:
            values["redis"] = with_password(values["redis"], values.pop("redis_password_file"))
            files = {name: values.pop(f"redis_{name}") for name in REDIS_FILES}
            values["redis"] = with_certificates(values["redis"], files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return ServiceSettings(role=role, **values)


def _new_replica_id(role: str) -> str:
    """A name that no other process has, with the container's id, or else the host's name, in it for people."""
    host = container_id() or re.sub(r"[^A-Za-z0-9-]", "", socket.gethostname().partition(".")[0])[:24]
    return "-".join(part for part in (role, host, uuid.uuid4().hex[:6]) if part)


def _from_environment(parser: argparse.ArgumentParser, flag: _Flag, environment: Mapping[str, str]) -> Any:
    text = environment.get(flag.variable)
    if not text:
        return flag.default
    try:
        return flag.kind(text)
    except ValueError:
        shown = re.sub(r"//.*@", "//...@", text)  # a URL's password
        parser.error(f"environment variable {flag.variable}: invalid {flag.kind.__name__} value: {shown!r}")


def _flags(role: str) -> list[_Flag]:
    settings = ServiceSettings(role=role)
    is_coordinator = role == "coordinator"
    flags = [
        _Flag("host", str, settings.host, "address to listen on"),
        _Flag("port", _port, COORDINATOR_PORT if is_coordinator else 0, "port to listen on; 0 takes a free one"),
        _Flag("advertise", _address, "", "host:port at which others reach this process"),
        _Flag("coordinator", _address, settings.coordinator, "host:port of the coordinator"),
        _Flag("redis", _redis_url, settings.redis, "URL of the Redis that holds the board"),
        _Flag("redis-password-file", str, "", "file with the password of that Redis"),
        _Flag("redis-ca", str, "", "file with the CA of that Redis's certificate (rediss://)"),
        _Flag("redis-certificate", str, "", "file with the certificate to show to that Redis"),
        _Flag("redis-key", str, "", "file with that certificate's key"),
        _Flag("replica-id", str, _new_replica_id(role), "unique name of this process"),
        _Flag("grace-seconds", _seconds, settings.grace_seconds, "seconds that draining may take after SIGTERM"),
        _Flag("lease-seconds", _seconds, settings.lease_seconds, "a replica is dead after so long without a heartbeat"),
        _Flag("keep-runs", _count, settings.keep_runs, "ended runs that Redis remembers"),
        _Flag("keep-run-bytes", _count, settings.keep_run_bytes, "bytes of Redis that ended runs may take together"),
        _Flag("keep-run-days", _seconds, settings.keep_run_days, "days for which Redis remembers an ended run"),
        _Flag(
            "gpu-lease-seconds",
            _positive_seconds,
            settings.gpu_lease_seconds,
            "the GPUs of a replica go to others after so long without a heartbeat",
        ),
        _Flag("launcher", _address, "", "host:port of the launcher that starts replicas"),
        _Flag("project", str, "", "compose project; that of this container unless given"),
        _Flag("launch-id", str, "", "name under which a launcher started this process"),
        _Flag("instance", str, container_id(), "name under which it is started again when it ends"),
        _Flag("standby", _switch, settings.standby, "register only when asked to (Replica.Join)"),
        _Flag("log-level", _level, settings.log_level, ", ".join(LOG_LEVELS)),
        _Flag("token-file", str, "", "file with this service's bearer token; without a tokens file also the callers'"),
        _Flag("tokens-file", str, "", "file with the tokens that callers may have, and their roles"),
        _Flag("tls-certificate", str, "", "file with this service's certificate"),
        _Flag("tls-key", str, "", "file with that certificate's key"),
        _Flag("tls-ca", str, "", "file with the CA of the other services' certificates"),
        _Flag("tls-client-ca", str, "", "file with the CA of callers' certificates; each needs one"),
        _Flag("tls-name", str, "", "name in the other services' certificates; that of their host unless given"),
        _Flag("allow-insecure", _switch, False, "listen beyond loopback without authentication"),
        _Flag("deadline-seconds", _positive_seconds, settings.deadline_seconds, "longest call that brings no deadline"),
        _Flag(
            "stream-deadline-seconds",
            _positive_seconds,
            settings.stream_deadline_seconds,
            "longest streaming call that brings no deadline",
        ),
        _Flag("max-message-bytes", _message_bytes, settings.max_message_bytes, "largest gRPC message"),
    ]
    if role == "rollout":
        flags += [
            _Flag("engine-python", _program, "", "Python interpreter of the engine, if not this one"),
            _Flag("sglang-url", _http_url, "", "URL of the SGLang server of runs with engine sglang_external"),
            _Flag("sglang-key-file", str, "", "file with that server's API key"),
        ]
    if role == "reward":
        flags.append(_Flag("allowed-rewards", _names, (), "rewards that Score may be asked for, with commas between"))
    if role == "launcher":
        limits = ("deadline-seconds", "stream-deadline-seconds", "max-message-bytes")
        used = ("host", "port", "project", "replica-id", "log-level", "token-file", "tokens-file", *limits)
        groups = ("redis", "tls-", "allow-insecure")
        return [flag for flag in flags if flag.name in used or flag.name.startswith(groups)]
    not_for_coordinator = ("coordinator", "advertise", "launch-id", "instance", "standby", "project")
    only_coordinator = (
        *("lease-seconds", "gpu-lease-seconds", "launcher", "keep-runs", "keep-run-bytes", "keep-run-days"),
    )
    unused = not_for_coordinator if is_coordinator else (*only_coordinator, "project")
    return [flag for flag in flags if flag.name not in unused]
