"""Messages between the engine's process and SGLang's scheduler processes about pauses and new weights.

They go over ZeroMQ, with SGLang's own or beside them, because a gRPC call between processes that idle takes a
millisecond longer.
"""

from dataclasses import dataclass, field

from sglang.srt.managers.io_struct import PauseGenerationReqInput, hook_custom_types

from relaxd.rpc.errors import RpcError


class PauseForUpdate(PauseGenerationReqInput, kw_only=True):  # type: ignore[call-arg]
    """Pauses every scheduler, and has each install new weights in this pause."""

    number: int
    """Number of the update."""
    group_name: str
    """Name of the weight group that sends the weights."""
    key: str
    """The weights' key in the prefix cache."""
    checksum: bool
    """True to return checksums."""
    deadline: float
    """Monotonic time, shared by processes of one host, by which the pause has to have begun."""
    timeout: float
    """Seconds from the beginning of the reception to its end."""
    after_failure: bool
    """True if an update has failed since the last one, so that ranks may have received different versions."""


hook_custom_types(PauseForUpdate)


@dataclass(frozen=True)
class HeldRequest:
    """An unfinished request of a scheduler."""

    tokens: int
    """Number of tokens that the old weights produced."""
    continues: bool = False
    """True if the request continues with its keys and values."""


@dataclass(frozen=True)
class Updated:
    """The weights are there."""

    seconds: float
    """Duration of the reception."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums by tensor, if requested."""
    held: dict[str, HeldRequest] = field(default_factory=dict)
    """The unfinished requests by SGLang's ids; of tensor-parallel rank 0 only."""


@dataclass(frozen=True)
class ChangeMade:
    """A scheduler has paused or resumed."""

    number: int
    """Number of the change: the `rid` of the message that requested it."""
    rank: int


@dataclass(frozen=True)
class UpdateEnded:
    """A scheduler has installed new weights, or has failed."""

    number: int
    rank: int
    result: Updated | RpcError


@dataclass(frozen=True)
class GroupLeft:
    """A scheduler has left a weight group: it receives nothing in it, now or later.

    What it said about updates in this group before was sent before.
    """

    group_name: str
    rank: int


def prefix_key(weights: str, media: str) -> str:
    """Return a request's key in the prefix cache: what its tokens don't say.

    SGLang itself tells items apart by 30 bits of their hashes.
    """
    return f"{weights}/{media}"


def with_weights(key: str, weights: str) -> str:
    """Return a prefix-cache key for other weights."""
    return prefix_key(weights, key.partition("/")[2])


News = ChangeMade | UpdateEnded | GroupLeft
"""A message from a scheduler process to the engine's process."""
