"""A member of a weight group over NCCL (or CUDA IPC), in a process of its own, told line by line what to do.

Each command and each answer is one JSON value on a line. The tensors of a broadcast have the sizes that are asked for,
and tensor i is filled with value + i.
"""

import json
import os
import sys
import threading
import time
from typing import Any

from relaxd.weights import NCCL_ENVIRONMENT

os.environ.update(NCCL_ENVIRONMENT)

# isort: split
import torch

from relaxd.weights.weight_group import Rendezvous, Transfer, Transport, WeightGroup, WeightGroupError, host_store


class Member:
    """What lines are about."""

    def __init__(self, device: int, transport: Transport) -> None:
        self.transport = transport
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self.store: Any = None
        self.group: WeightGroup | None = None
        self.tensors: list[torch.Tensor] = []

    def host(self) -> dict[str, Any]:
        """Host the store."""
        self.store = host_store()
        return {"port": self.store.port}

    def connect(self, timeout: float, rank: int, abort_after: float | None = None, **place: Any) -> dict[str, Any]:
        """Join a group."""
        self.group = WeightGroup(Rendezvous(transport=self.transport, **place), rank, self.device)
        if abort_after is not None:
            threading.Timer(abort_after, self.group.abort).start()
        self.group.connect(timeout)
        return {}

    def broadcast(
        self,
        elements: list[int],
        source: int,
        value: float,
        timeout: float,
        repeat: int = 1,
        abort_after: float | None = None,
    ) -> dict[str, Any]:
        """Broadcast tensors together, `repeat` times without waiting between; returns first and last values of each."""
        assert self.group is not None
        if [tensor.numel() for tensor in self.tensors] != elements:
            self.tensors = [torch.empty(count, dtype=torch.bfloat16, device=self.device) for count in elements]
        for i, tensor in enumerate(self.tensors):
            tensor.fill_(value + i if self.group.rank == source else -1.0)
        torch.cuda.synchronize()
        if abort_after is not None:
            threading.Timer(abort_after, self.group.abort).start()
        started = time.monotonic()
        transfers: list[Transfer] = []
        for _ in range(repeat):
            transfers.append(self.group.start_broadcasts(self.tensors, source, timeout))
        for transfer in transfers:
            transfer.wait()
        seconds = time.monotonic() - started
        ends = [[float(tensor[0]), float(tensor[-1])] for tensor in self.tensors]
        whole = all(bool((tensor == value + i).all()) for i, tensor in enumerate(self.tensors))
        return {"seconds": seconds, "ends": ends, "whole": whole}

    def works(self) -> dict[str, Any]:
        """Whether this process can still use its GPU."""
        ones = torch.ones(1 << 20, device=self.device)
        return {"sum": float(ones.sum()), "free_gib": round(torch.cuda.mem_get_info(self.device)[0] / 2**30, 2)}


def main() -> None:
    """Answer each line with one line."""
    member = Member(int(sys.argv[1]), "cuda_ipc" if "cuda_ipc" in sys.argv else "nccl")
    for line in sys.stdin:
        command = json.loads(line)
        started = time.monotonic()
        try:
            answer = getattr(member, command.pop("do"))(**command)
        except WeightGroupError as error:
            answer = {"error": str(error)}
        answer["took"] = time.monotonic() - started
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
