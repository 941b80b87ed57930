"""Starting SGLang's processes, and speaking with its scheduler in SGLang's own messages.

sglang.Engine is used for what it launches. Its tokenizer manager and its detokenizer process are left out: we send
tokens and want tokens, and what would be done there for every token costs more than all of ours.
"""

import os
import threading
from pathlib import Path
from typing import Any

import zmq
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import sock_recv, sock_send
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.network import get_zmq_socket

from services.rollout.engines.sglang.control import ADDRESS_VARIABLE, SchedulerError, Schedulers
from services.rollout.engines.sglang.scheduler import run_scheduler

CONNECT_SECONDS = 30.0
WHY_SECONDS = 1.0
"""How long a scheduler that cannot start has to say why."""


class MessageChannel:
    """SGLang's messages to and from the scheduler of rank 0."""

    def __init__(self, args: ServerArgs, ports: PortArgs) -> None:
        context = zmq.Context(2)
        self._outgoing = get_zmq_socket(context, zmq.PUSH, ports.scheduler_input_ipc_name, True)
        self._incoming = get_zmq_socket(context, zmq.PULL, ports.tokenizer_ipc_name, True)
        self._sending = threading.Lock()
        self.max_req_input_len = 0
        """Set by SGLang: the longest prompt that it takes."""

    def send(self, message: Any) -> None:
        """Send one of SGLang's messages; what is sent first arrives first. Safe from any thread."""
        with self._sending:
            sock_send(self._outgoing, message)

    def receive(self) -> Any:
        """Wait for the next message of the scheduler. For one thread only."""
        return sock_recv(self._incoming)


class _Launcher(Engine):
    """sglang.Engine with our scheduler processes, and us in the place of its tokenizer manager."""

    run_scheduler_process_func = staticmethod(run_scheduler)
    init_tokenizer_manager_func = staticmethod(lambda args, ports: (MessageChannel(args, ports), None))

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **arguments: Any) -> tuple[list[Any], list[str]]:
        return [], []


def launch(args: ServerArgs, schedulers: Schedulers) -> tuple[MessageChannel, dict[str, Any]]:
    """Start the scheduler processes and wait until they have loaded the model.

    Call it from a thread that lives as long as they should: Linux ends them with it. Returns the channel and what the
    scheduler says about itself. Raises SchedulerError with SGLang's reason.
    """
    os.environ[ADDRESS_VARIABLE] = schedulers.address
    # Requests that don't stream are sent when they are complete.
    os.environ.setdefault("SGLANG_FORCE_STREAM_INTERVAL", str(1 << 30))
    if args.enable_memory_saver:
        _let_preloaded_libraries_be_found()
    try:
        launcher = _Launcher(server_args=args)
    except Exception as error:
        reason = schedulers.wait_for_failure(WHY_SECONDS) or f"{type(error).__name__}: {error}"
        raise SchedulerError("LoadError", reason) from error
    schedulers.wait_for(args.tp_size, CONNECT_SECONDS)
    # How loaded the scheduler is, for readers that we don't have: it would stay when the processes are killed.
    Path(shm_path_for(launcher.port_args.instance_id)).unlink(missing_ok=True)
    channel: MessageChannel = launcher.tokenizer_manager
    return channel, launcher._scheduler_init_result.scheduler_infos[0]


def _let_preloaded_libraries_be_found() -> None:
    """Name the folder of the CUDA runtime that torch has loaded here to the loader of the scheduler processes.

    torch_memory_saver's library is preloaded there, and needs that runtime before torch could load it from where its
    wheels have it. A library that cannot be preloaded is left out with no more than a line on stderr.
    """
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    folders = sorted({str(Path(path).parent) for path in loaded})
    before = os.environ.get("LD_LIBRARY_PATH", "")
    os.environ["LD_LIBRARY_PATH"] = ":".join([*folders, *([before] if before else [])])
