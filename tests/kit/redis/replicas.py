"""What replicas of a Redis need in tests, and replicas that lag behind."""

import contextlib
import signal
import time
from collections.abc import Iterator

import redis

from tests.kit.redis.redis_server import RedisServer

PROMPT = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
"""Options of servers whose replicas follow at once."""


@contextlib.contextmanager
def lagging(replica: RedisServer, seconds: float, *, cut: bool) -> Iterator[None]:
    """Cut a replica off and stop it for so long, and until the context ends: it lacks what was written then.

    Without `cut` it only stands still: the primary takes it for a replica still, and it gets what was sent later.
    """
    stopped = replica.process
    assert stopped is not None
    if cut:
        with redis.Redis.from_url(replica.url, socket_timeout=10.0) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "master")
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    try:
        yield
    finally:
        stopped.send_signal(signal.SIGCONT)


def has_replica(primary: RedisServer, tag: str = "") -> bool:
    """Whether a replica has what the primary has; in a cluster, of which it has the keys of this tag."""
    with redis.Redis.from_url(primary.url, socket_timeout=10.0) as client:
        return bool(client.pipeline(False).set(f"relaxd-test:up:{{{tag}}}", 1, px=1).wait(1, 500).execute()[1])
