"""A member of a weight group, in a process of its own, told line by line what to do.

Each command and each answer is one JSON value on a line.
"""

import json
import sys
import threading
import time
from typing import Any

import torch

from relaxd.weights.group import WeightGroup, WeightGroupError, host_store


def main() -> None:
    torch.set_num_threads(1)
    store: Any = None
    group: WeightGroup | None = None
    for line in sys.stdin:
        command = json.loads(line)
        started = time.monotonic()
        answer: dict[str, Any] = {}
        try:
            match command.pop("do"):
                case "host":
                    store = host_store()
                    answer["port"] = store.port
                case "connect":
                    timeout = command.pop("timeout")
                    abort_after = command.pop("abort_after", None)
                    group = WeightGroup("gloo", "127.0.0.1", **command)
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
