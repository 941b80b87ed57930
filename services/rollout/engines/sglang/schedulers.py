"""The connection between the engine's process and SGLang's scheduler processes: calls, and messages about pauses and
new weights.

Each scheduler process (one per tensor-parallel rank) serves Scheduler and a part of Rollout on a Unix socket
(`services.rollout.engines.sglang.scheduler`), as an engine's process does for its service. Messages about pauses and
weights go over ZeroMQ, with SGLang's own or beside them, because a gRPC call between processes that idle takes a
millisecond longer.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import zmq
from sglang.srt.managers.io_struct import PauseGenerationReqInput, hook_custom_types
from sglang.srt.utils.network import get_zmq_socket

from relaxd.process.child_channel import OPTIONS
from relaxd.rpc.client import call_metadata
from relaxd.rpc.errors import Aborted, RpcError, Unavailable, from_call, has_status
from relaxd.v1 import engine_pb2, engine_pb2_grpc, rollout_pb2_grpc


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
    """A scheduler has left a weight group and receives nothing more in it.

    Its earlier reports on updates in this group were sent before this.
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


FOLDER_VARIABLE = "RELAXD_SGLANG_FOLDER"
"""Environment variable with the folder of the sockets, for the scheduler processes."""
TOKEN_VARIABLE = "RELAXD_SGLANG_TOKEN"
"""Environment variable with the token that the processes require of callers."""
STEP_SECONDS = 60.0
"""Maximum seconds of a model step that a pause waits for. A longer one counts as a failure."""
END_SECONDS = 1.0
"""Seconds for an update to end after its group was left."""
ANSWER_SECONDS = 10.0
"""Maximum seconds to wait for any other work of the scheduler's loop."""
SCHEDULER_MARGIN_SECONDS = 3.0
"""Time for an answer beyond a deadline that the scheduler processes enforce themselves."""


class Late(Aborted):
    """A scheduler process has not answered in time, and may still have acted."""


class Schedulers:
    """The scheduler processes of an engine, by rank."""

    def __init__(self, on_gone: Callable[[int], None], environment: Mapping[str, str] | None = None) -> None:
        """`on_gone` is called with the rank of a scheduler process that died. `environment` is added to theirs."""
        self._on_gone = on_gone
        self._folder = Path(tempfile.mkdtemp(prefix="relaxd-sglang-"))
        token = secrets.token_urlsafe()
        self._metadata = call_metadata(token)
        self.environment: Mapping[str, str] = {
            FOLDER_VARIABLE: str(self._folder),
            TOKEN_VARIABLE: token,
            **(environment or {}),
        }
        """Environment of the scheduler processes."""
        self._news: Any = get_zmq_socket(zmq.Context(1), zmq.PULL, news_address(str(self._folder)), True)
        self._channels: list[grpc.Channel] = []
        self._stubs: list[dict[str, Any]] = []
        self._ends: list[Any] = []

    @property
    def failure(self) -> str:
        """Reason with which a scheduler process failed to start; empty if none did."""
        reasons = sorted(self._folder.glob("failure-*"))
        return reasons[0].read_text() if reasons else ""

    def connect(self, count: int, timeout: float) -> None:
        """Connect to the scheduler processes, which have loaded the model. Raises Unavailable."""
        for rank in range(count):
            channel = grpc.insecure_channel(f"unix:{socket_path(str(self._folder), rank)}", OPTIONS)
            self._channels.append(channel)
            try:
                grpc.channel_ready_future(channel).result(timeout)
            except grpc.FutureTimeoutError as error:
                raise Unavailable(f"{rank} of {count} schedulers can be reached within {timeout:g} s") from error
            stubs = engine_pb2_grpc.SchedulerStub(channel), rollout_pb2_grpc.RolloutStub(channel)
            self._stubs.append(vars(stubs[1]) | vars(stubs[0]))
            end = self._stubs[rank]["WatchEnd"].future(engine_pb2.WatchEndRequest(), metadata=self._metadata(None))
            end.add_done_callback(lambda _, rank=rank: self._on_gone(rank))
            self._ends.append(end)

    def forget_folder(self) -> None:
        """Remove the folder of the sockets, so that nobody else can connect."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def count(self) -> int:
        """Number of scheduler processes that are connected."""
        return len(self._stubs)

    def receive_news(self) -> News:
        """Wait for a scheduler process's report. Only one thread may call this."""
        news: News = self._news.recv_pyobj()
        return news

    def ask_all(self, method: str, request: Any, timeout: float, ranks: int | None = None) -> list[Any]:
        """Return the answers by rank, with `ranks` of the first ones only.

        Raises the first RpcError, once all have answered or are late.
        """
        metadata = self._metadata(None)
        calls = [stub[method].future(request, timeout=timeout, metadata=metadata) for stub in self._stubs[:ranks]]
        answers = [self._answer(rank, call, method, timeout) for rank, call in enumerate(calls)]
        for answer in answers:
            if isinstance(answer, RpcError):
                raise answer
        return answers

    def ask_first(self, method: str, request: Any, timeout: float) -> Any:
        """Return the answer of rank 0. Raises RpcError."""
        return self.ask_all(method, request, timeout, ranks=1)[0]

    def _answer(self, rank: int, call: Any, method: str, timeout: float) -> Any:
        try:
            return call.result()
        except grpc.RpcError as error:
            if has_status(error):
                return from_call(error)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Late(f"scheduler {rank} did not answer {method} within {timeout:g} s")
            return Unavailable(f"scheduler {rank} is gone: {error.details()}")


def news_address(folder: str) -> str:
    """Return the address of the engine's process for the schedulers' reports."""
    return f"ipc://{folder}/news"


def socket_path(folder: str, rank: int) -> str:
    """Return the path of a rank's socket."""
    return os.path.join(folder, f"rank-{rank}")


def write_failure(folder: str, rank: int, reason: str) -> None:
    """Tell the engine's process why this scheduler process fails to start."""
    Path(folder, f"failure-{rank}").write_text(reason)
