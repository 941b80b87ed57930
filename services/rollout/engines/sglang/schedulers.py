"""Connection between the engine's process and SGLang's scheduler processes: calls, and messages about pauses and new
weights.

Each scheduler process (one per tensor-parallel rank) serves Scheduler and a part of Rollout on a Unix socket
(`services.rollout.engines.sglang.scheduler`), as an engine's process does for its service. Messages about pauses and
weights use ZeroMQ, as SGLang's own messages do, because a gRPC call between idle processes takes a millisecond longer.
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
    """Message that pauses every scheduler and makes each install new weights in this pause."""

    number: int
    """Number of the weight update, which reports repeat."""
    group_name: str
    """Name of the weight group that sends the weights."""
    key: str
    """Prefix-cache key of the new weights."""
    checksum: bool
    """True to return checksums of the received tensors."""
    deadline: float
    """Latest start of the pause, by time.monotonic(), which all processes of a host share."""
    timeout: float
    """Maximum time for receiving the weights, in seconds."""
    after_failure: bool
    """True if an update has failed since the last successful one: ranks may have received different versions."""


hook_custom_types(PauseForUpdate)


@dataclass(frozen=True)
class HeldRequest:
    """Generation request that is unfinished when new weights are installed."""

    tokens: int
    """Number of the request's tokens that the old weights produced."""
    continues: bool = False
    """True if the request continues with its keys and values of the old weights."""


@dataclass(frozen=True)
class Updated:
    """Result of a successful weight update."""

    seconds: float
    """Time for receiving the weights, in seconds."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums by tensor name, if requested."""
    held: dict[str, HeldRequest] = field(default_factory=dict)
    """Unfinished requests, by SGLang's id; only from tensor-parallel rank 0."""


@dataclass(frozen=True)
class ChangeMade:
    """Report: a scheduler has paused or resumed."""

    number: int
    """Number of the pause or resume: the `rid` of the message that requested it."""
    rank: int


@dataclass(frozen=True)
class UpdateEnded:
    """Report: a scheduler has installed new weights, or the weight update has failed."""

    number: int
    rank: int
    result: Updated | RpcError


@dataclass(frozen=True)
class GroupLeft:
    """Report: a scheduler has left a weight group and receives nothing more in it.

    It follows the scheduler's reports on updates in this group.
    """

    group_name: str
    rank: int


def prefix_key(weights: str, media: str) -> str:
    """Return a request's key in the prefix cache, made of its weights' key and its media's identity.

    SGLang itself distinguishes media by only 30 bits of their hashes.
    """
    return f"{weights}/{media}"


def with_weights(key: str, weights: str) -> str:
    """Return a prefix-cache key with the key of its weights replaced by `weights`."""
    return prefix_key(weights, key.partition("/")[2])


News = ChangeMade | UpdateEnded | GroupLeft
"""A message from a scheduler process to the engine's process."""


FOLDER_VARIABLE = "RELAXD_SGLANG_FOLDER"
"""Environment variable with the folder of the sockets, for the scheduler processes."""
TOKEN_VARIABLE = "RELAXD_SGLANG_TOKEN"
"""Environment variable with the token that the processes require of callers."""
STEP_SECONDS = 60.0
"""Maximum time for a scheduler to pause or resume, in seconds; includes the rest of the current model step."""
END_SECONDS = 1.0
"""Maximum time for a weight update to end after its weight group was left, in seconds."""
ANSWER_SECONDS = 10.0
"""Maximum time for a scheduler to answer requests other than a pause or resume, in seconds."""
SCHEDULER_MARGIN_SECONDS = 3.0
"""Extra seconds to wait for an answer when the scheduler processes enforce the deadline themselves."""


class Late(Aborted):
    """Raised when a scheduler process has not answered a call in time; it may still have executed the call."""


class Schedulers:
    """Client of an engine's scheduler processes, one per tensor-parallel rank."""

    def __init__(self, on_gone: Callable[[int], None], environment: Mapping[str, str] | None = None) -> None:
        """`on_gone`: called with the rank of a scheduler process that ended.

        `environment`: further environment variables for the scheduler processes.
        """
        self._on_gone = on_gone
        self._folder = Path(tempfile.mkdtemp(prefix="relaxd-sglang-"))
        token = secrets.token_urlsafe()
        self._metadata = call_metadata(token)
        self.environment: Mapping[str, str] = {
            FOLDER_VARIABLE: str(self._folder),
            TOKEN_VARIABLE: token,
            **(environment or {}),
        }
        """Environment variables of the scheduler processes."""
        self._news: Any = get_zmq_socket(zmq.Context(1), zmq.PULL, news_address(str(self._folder)), True)
        self._channels: list[grpc.Channel] = []
        self._stubs: list[dict[str, Any]] = []
        self._ends: list[Any] = []

    @property
    def failure(self) -> str:
        """Reason why a scheduler process failed to start; empty if none failed."""
        reasons = sorted(self._folder.glob("failure-*"))
        return reasons[0].read_text() if reasons else ""

    def connect(self, count: int, timeout: float) -> None:
        """Connect to the scheduler processes after they have loaded the model. Raises Unavailable."""
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
        """Number of connected scheduler processes."""
        return len(self._stubs)

    def receive_news(self) -> News:
        """Wait for a scheduler process's report. Only one thread may call this."""
        news: News = self._news.recv_pyobj()
        return news

    def ask_all(self, method: str, request: Any, timeout: float, ranks: int | None = None) -> list[Any]:
        """Call `method` of all scheduler processes, or of the first `ranks`. Returns the answers by rank.

        Raises the first RpcError after all processes have answered or are late.
        """
        metadata = self._metadata(None)
        calls = [stub[method].future(request, timeout=timeout, metadata=metadata) for stub in self._stubs[:ranks]]
        answers = [self._answer(rank, call, method, timeout) for rank, call in enumerate(calls)]
        for answer in answers:
            if isinstance(answer, RpcError):
                raise answer
        return answers

    def ask_first(self, method: str, request: Any, timeout: float) -> Any:
        """Call `method` of rank 0 and return its answer. Raises RpcError."""
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
    """Return the path of the Unix socket on which a rank's scheduler process serves."""
    return os.path.join(folder, f"rank-{rank}")


def write_failure(folder: str, rank: int, reason: str) -> None:
    """Write a file that tells the engine's process why this scheduler process fails to start."""
    Path(folder, f"failure-{rank}").write_text(reason)
