"""The board of a run as the coordinator uses it."""

from typing import Any

from relaxd.board import AsyncBoard, Board


class RunBoard(AsyncBoard):
    """A run's board for the event loop, and `in_threads` the same for work in threads, such as on a run's files.

    What may have megabytes to parse, such as the plans of many steps, is read in threads.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Take what a Board takes."""
        super().__init__(*arguments, **settings)
        self.in_threads = Board(*arguments, **settings)
        """It connects when it is used."""

    async def close(self) -> None:
        """Close all connections to Redis. Whoever still reads connects again."""
        await super().close()
        self.in_threads.close()
