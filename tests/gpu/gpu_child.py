"""The child of gpu_holder: takes a gigabyte of its GPU, and says which ones it sees, by torch's UUIDs."""

from typing import Any

import torch
from google.protobuf.struct_pb2 import Struct

from relaxd.process.child_server import ChildServer
from tests.kit.child_service import add_methods, struct

BYTES = 1 << 30


class Holder:
    """Holds memory."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def hold(self, request: Struct, context: Any) -> Struct:
        self.held.append(torch.ones(BYTES, dtype=torch.uint8, device="cuda"))
        count = torch.cuda.device_count()
        return struct(uuids=[str(torch.cuda.get_device_properties(index).uuid) for index in range(count)])


if __name__ == "__main__":
    ChildServer((add_methods(["hold"]), Holder())).serve()
