"""A member of a weight group, in a process of its own, told line by line what to do.

Each command and each answer is one JSON value on a line.
"""

import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

import relaxd.weights.weight_group as group_module
from relaxd.weights.weight_group import Rendezvous, WeightGroup, WeightGroupError, host_store


class Pages:
    """Memory that processes see each other's of, as relaxd.weights.cuda_ipc has it, on a CPU."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[mmap.mmap, Any]] = {}

    def allocate(self, size: int) -> tuple[int, bytes]:
        descriptor, path = tempfile.mkstemp(dir="/dev/shm", prefix=f"relaxd-test-pages-{os.getpid()}-")
        os.ftruncate(descriptor, size)
        os.close(descriptor)
        return self.open(path.encode(), size), path.encode()

    def free(self, address: int) -> None:
        self.close(address)

    def open(self, handle: bytes, size: int) -> int:
        with open(handle.decode(), "r+b") as file:
            pages = mmap.mmap(file.fileno(), size)
        view = ctypes.c_char.from_buffer(pages)
        self._maps[ctypes.addressof(view)] = (pages, view)
        return ctypes.addressof(view)

    def close(self, address: int) -> None:
        del self._maps[address]

    def mark(self) -> None:
        pass

    def copy(self, parts: Sequence[tuple[int, int, int]], after: None) -> "Pages":
        for target, source, size in parts:
            ctypes.memmove(target, source, size)
        return self

    def query(self) -> bool:
        return True


def main() -> None:
    torch.set_num_threads(1)
    transport: Any = sys.argv[1] if len(sys.argv) > 1 else "gloo"
    pages = transport == "cuda_ipc"
    if pages:
        group_module.CudaMemory = lambda device: Pages()  # type: ignore[assignment,misc]
    store: Any = None
    group: WeightGroup | None = None
    for line in sys.stdin:
        command = json.loads(line)
        started = time.monotonic()
        answer: dict[str, Any] = {}
        try:
            match command.pop("do"):
                case "host":
                    store = host_store(command.get("host", "127.0.0.1"))
                    answer["port"] = store.port
                case "connect":
                    timeout = command.pop("timeout")
                    abort_after = command.pop("abort_after", None)
                    rank = command.pop("rank")
                    rendezvous = Rendezvous(transport=transport, **command)
                    group = WeightGroup(rendezvous, rank, torch.device("cpu"))
                    if abort_after is not None:
                        threading.Timer(abort_after, group.abort).start()
                    group.connect(timeout)
                case "broadcast":
                    assert group is not None
                    if "abort_after" in command:
                        threading.Timer(command["abort_after"], group.abort).start()
                    tensor = torch.full((command["elements"],), float(command.get("value", 0)))
                    group.broadcast(tensor, command["source"], command["timeout"])
                    answer["values"] = [float(tensor[0]), float(tensor[-1]), float(tensor.double().mean())]
        except WeightGroupError as error:
            answer["error"] = str(error)
        answer["seconds"] = time.monotonic() - started
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
