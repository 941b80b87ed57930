"""`python -m services.coordinator`: the coordinator's entry point."""

import asyncio
import logging
import sys
import time

import redis

from relaxd import telemetry
from relaxd.board import Fenced
from relaxd.redis_client import parse, where
from relaxd.rpc.errors import ServerError
from relaxd.rpc.service_settings import ServiceSettings, parse_settings
from relaxd.telemetry.logs import escape_lines
from services.coordinator.service import CoordinatorProcess
from services.coordinator.state.store import AsyncStore, Store, StoreUnavailable, Superseded

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 1e-3
"""Maximum seconds for which a thread holds the interpreter lock while the event loop, which answers heartbeats, waits
for it. Python's default is five times as long."""
REDIS_WAIT_SECONDS = 30.0
"""Maximum seconds to wait for Redis at start."""


class CannotStart(Exception):
    """The coordinator can't start. The exception's message has the reason."""


def connect(redis_url: str) -> Store:
    """Connect to Redis, waiting until it answers, begin a new term as coordinator, and return the store.

    Raises CannotStart.
    """
    store = Store(redis_url)
    deadline = time.monotonic() + REDIS_WAIT_SECONDS
    warned = False
    while True:
        try:
            if store.is_cluster_node() and not parse(redis_url).nodes:
                raise CannotStart(
                    f"Redis at {where(redis_url)} is a node of a Redis Cluster (cluster_enabled:1): begin the URL with "
                    "redis+cluster://"
                )
            store.take_over()
            return store
        except StoreUnavailable as error:
            if isinstance(error.__cause__, redis.AuthenticationError):
                raise CannotStart(
                    f"Redis at {where(redis_url)} rejects the user or password: see --redis / RELAXD_REDIS and "
                    f"--redis-password-file / RELAXD_REDIS_PASSWORD_FILE ({error.__cause__})"
                ) from error
            if time.monotonic() > deadline:
                raise CannotStart(
                    f"no Redis at {where(redis_url)} within {REDIS_WAIT_SECONDS:.0f} s: start one, or name another "
                    f"with --redis / RELAXD_REDIS ({error})"
                ) from error
            if not warned:
                logger.warning("waiting for Redis at %s", where(redis_url))
            warned = True
            time.sleep(0.5)  # brief: REDIS_WAIT_SECONDS
        except redis.exceptions.NoPermissionError as error:
            raise CannotStart(
                f"Redis at {where(redis_url)} denies this user a command (deploy/redis-acl.conf): {error}"
            ) from error


async def serve(settings: ServiceSettings) -> None:
    """Run the coordinator until SIGTERM or SIGINT."""
    store = await asyncio.to_thread(connect, settings.redis)
    coordinator = CoordinatorProcess(settings, AsyncStore(store))
    await coordinator.run()


def main() -> int:
    """Run the coordinator and return the exit code."""
    settings = parse_settings("coordinator")
    telemetry.setup_logging(settings.replica_id, settings.log_level)
    telemetry.setup("coordinator", settings.replica_id)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        asyncio.run(serve(settings))
    except (CannotStart, ServerError, Superseded) as error:
        print(escape_lines(f"coordinator: {error}"), file=sys.stderr)
        return 1
    except Fenced as error:
        print(escape_lines(f"coordinator: a newer coordinator has taken over: {error}"), file=sys.stderr)
        return 1
    finally:
        telemetry.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
