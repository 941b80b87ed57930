"""The child of gpu_holder: takes a gigabyte of its GPU, and says which ones it sees, by torch's UUIDs."""

from typing import Any

import torch

from relaxd.process.json_child_server import JsonChildServer

BYTES = 1 << 30


def main() -> None:
    held: list[torch.Tensor] = []

    def hold(params: dict[str, Any]) -> list[str]:
        held.append(torch.ones(BYTES, dtype=torch.uint8, device="cuda"))
        return [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]

    JsonChildServer({"hold": hold}).serve()


if __name__ == "__main__":
    main()
