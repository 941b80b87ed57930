"""Start of SGLang's scheduler processes, and the channel for SGLang's own messages.

sglang.Engine launches the processes, without its tokenizer manager and detokenizer process: relaxd exchanges tokens,
and these two would cost more time per token than all of relaxd.
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

from relaxd.process.ports import LOOPBACK, reserve_port
from relaxd.rpc.errors import FailedPrecondition
from services.rollout.engines.sglang.scheduler import run_scheduler
from services.rollout.engines.sglang.schedulers import Schedulers

CONNECT_SECONDS = 30.0
"""Maximum seconds to connect to a scheduler process."""


class MessageChannel:
    """Channel for SGLang's messages to and from the scheduler of rank 0."""

    def __init__(self, args: ServerArgs, ports: PortArgs) -> None:
        context = zmq.Context(2)
        self._outgoing = get_zmq_socket(context, zmq.PUSH, ports.scheduler_input_ipc_name, True)
        self._incoming = get_zmq_socket(context, zmq.PULL, ports.tokenizer_ipc_name, True)
        self._sending = threading.Lock()
        self.max_req_input_len = 0
        """Maximum prompt length, in tokens; set by SGLang."""

    def send(self, message: Any) -> None:
        """Send one of SGLang's messages, in order. Any thread may call this."""
        with self._sending:
            sock_send(self._outgoing, message)

    def receive(self) -> Any:
        """Wait for the scheduler's next message. Only one thread may call this."""
        return sock_recv(self._incoming)


class _Launcher(Engine):
    """Launches sglang.Engine with relaxd's scheduler, and with a MessageChannel instead of its tokenizer manager."""

    run_scheduler_process_func = staticmethod(run_scheduler)
    init_tokenizer_manager_func = staticmethod(lambda args, ports: (MessageChannel(args, ports), None))

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **arguments: Any) -> tuple[list[Any], list[str]]:
        return [], []


def launch(args: ServerArgs, schedulers: Schedulers) -> tuple[MessageChannel, dict[str, Any]]:
    """Start the scheduler processes and wait until they have loaded the model.

    Call it from a thread that lives as long as the processes should: Linux ends them with the thread. Returns the
    channel and rank 0's information about its scheduler. Raises RpcError with SGLang's reason.
    """
    os.environ.update(schedulers.environment)
    # Requests that don't stream are sent when they are complete.
    os.environ.setdefault("SGLANG_FORCE_STREAM_INTERVAL", str(1 << 30))
    if args.enable_memory_saver:
        _add_cuda_runtime_to_library_path()
    try:
        with reserve_port(LOOPBACK, None) as port:
            # SGLang would choose a free port, but its schedulers listen on it only many seconds later.
            args.nccl_port = args.nccl_port or port.number
            launcher = _Launcher(server_args=args)
    except Exception as error:
        raise FailedPrecondition(schedulers.failure or f"{type(error).__name__}: {error}") from error
    schedulers.connect(args.tp_size, CONNECT_SECONDS)
    # Nobody reads the file with the scheduler's load, and killed processes would leave it behind.
    Path(shm_path_for(launcher.port_args.instance_id)).unlink(missing_ok=True)
    channel: MessageChannel = launcher.tokenizer_manager
    return channel, launcher._scheduler_init_result.scheduler_infos[0]


def _add_cuda_runtime_to_library_path() -> None:
    """Add the folder of torch's CUDA runtime to the library path of the scheduler processes.

    They preload torch_memory_saver's library, which needs that runtime before torch loads it from its wheels. The
    loader skips a library that it cannot preload with just a line on stderr.
    """
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    folders = sorted({str(Path(path).parent) for path in loaded})
    before = os.environ.get("LD_LIBRARY_PATH", "")
    os.environ["LD_LIBRARY_PATH"] = ":".join([*folders, *([before] if before else [])])
