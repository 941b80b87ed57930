"""A disk that is slow: for processes whose PYTHONPATH has this folder, as SLOW_DISK says (see slow_disks.py).

Python imports this module when it starts. It makes the calls that open, write and rename files wait before they do so.
"""

import builtins
import fnmatch
import functools
import io
import json
import os
import sys
import time
from typing import Any


def install(rules: list[dict[str, Any]]) -> None:
    """Make calls of this rank slow, as the rules say."""

    def wait(path: Any, operation: str) -> None:
        for rule in rules:
            if rule["operation"] == operation and rule["times"] and fnmatch.fnmatch(os.fspath(path), rule["path"]):
                rule["times"] -= 1
                print(f"slow: {operation} {rule['path']}", file=sys.stderr, flush=True)
                time.sleep(rule["seconds"])

    def slow(module: Any, name: str, operation: str, argument: int = 0) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            how = operation
            if operation == "open":
                mode = arguments[1] if len(arguments) > 1 else named.get("mode", "r")
                how = "read" if "r" in mode else "write"
            if isinstance(arguments[argument], str | os.PathLike):
                wait(arguments[argument], how)
            return function(*arguments, **named)

        setattr(module, name, wrapped)

    import safetensors
    import safetensors.numpy
    import safetensors.torch
    import torch

    slow(builtins, "open", "open")
    slow(io, "open", "open")
    slow(os, "replace", "rename")
    slow(os, "rename", "rename")
    slow(safetensors, "safe_open", "read")
    slow(safetensors.numpy, "save_file", "write", 1)
    slow(safetensors.torch, "save_file", "write", 1)
    slow(torch, "save", "write", 1)


if "SLOW_DISK" in os.environ and "RANK" in os.environ:
    install([rule for rule in json.loads(os.environ["SLOW_DISK"]) if str(rule["rank"]) == os.environ["RANK"]])
