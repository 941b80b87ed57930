"""Bytes that a GPU holds, and may hold."""

from dataclasses import dataclass

from relaxd.fitting.trainer import USABLE_SHARE, Bytes


class FitError(ValueError):
    """A setting with which nothing can be computed. The message names it, its value, and what would be right."""


@dataclass(frozen=True)
class Hardware:
    """The GPUs of a run."""

    gpu_bytes: int
    """Memory of one."""
    gpus_per_node: int

    @property
    def room(self) -> int:
        """Bytes of a GPU that can be filled."""
        return int(USABLE_SHARE * self.gpu_bytes)

    def check(self, setting: str, gpus: int) -> None:
        """Raise FitError if a role needs more GPUs than a node has."""
        if gpus > self.gpus_per_node:
            raise FitError(
                f"{setting} is {gpus}: a replica's GPUs are on one node, which has {self.gpus_per_node} "
                "(--gpus-per-node)"
            )


@dataclass(frozen=True)
class Held:
    """Bytes of a GPU in one role, when it holds the most."""

    role: str
    place: str
    """Which of the role's GPUs, or in which turn; "" if all hold the same."""
    bytes: Bytes
    room: int
    """Bytes that it may hold."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())

    @property
    def fits(self) -> bool:
        """True if there is room for them."""
        return self.total <= self.room
