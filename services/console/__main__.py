"""`python -m services.console`."""

import asyncio
import logging
import os

from relaxd import telemetry
from relaxd.process.upkeep import stop_signals
from relaxd.rpc.errors import ServerError
from relaxd.rpc.service_settings import ServiceSettings, parse_settings
from services.console.server import ConsoleServer

NICENESS = 5
"""Increase of this process's nice value, so that the console doesn't slow down the run's services."""

logger = logging.getLogger(__name__)


async def main(settings: ServiceSettings) -> int:
    """Run the service until it is stopped. Returns the exit code."""
    telemetry.setup_logging(settings.replica_id, settings.log_level)
    os.nice(NICENESS)
    stop = stop_signals()
    server = ConsoleServer(settings)
    try:
        await server.start()
        logger.info("the console of the coordinator at %s is at %s", settings.coordinator, server.url)
        await stop.wait()
    except ServerError as error:
        logger.error("%s", error)
        return 1
    finally:
        await server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(parse_settings("console"))))
