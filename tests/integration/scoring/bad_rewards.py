"""Rewards that go wrong in every way that rewards do; what one does is the text of the response."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path


def by_response(sample) -> object:
    """Do as the response says."""
    action, _, argument = sample.response.partition(" ")
    if action == "messages":
        Path(argument).write_text(json.dumps(sample.messages))
        return 1.0
    return ACTIONS[action](argument)


def redness(sample) -> float:
    """Return the red of the upper left corner of the prompt's images, added up."""
    return float(sum(image.getpixel((0, 0))[0] for image in sample.images()))


def deep(calls: int) -> None:
    """Hang in a deep recursion."""
    if calls:
        deep(calls - 1)
    time.sleep(3600)


def hang_in_c(_: str) -> None:
    """Hold the interpreter's lock for ever: no signal handler, no other thread runs any more."""
    ctypes.PyDLL(None).sleep(3600)


def hang_with_child(path: str) -> None:
    """Leave the id of a process that was started for the sample, then hang."""
    child = subprocess.Popen(["sleep", "3600"])
    Path(path).write_text(str(child.pid))
    time.sleep(3600)


def hang_unless(path: str) -> float:
    """Hang unless the file is there."""
    if not Path(path).exists():
        time.sleep(3600)
    return 1.0


def wait_for(path: str) -> float:
    """Wait until the file is there."""
    while not Path(path).exists():
        time.sleep(0.02)
    return 1.0


def hang_once(path: str) -> float:
    """Leave this process's id and hang, with the interpreter's lock held, unless another did so before."""
    if not Path(path).exists():
        Path(path).write_text(str(os.getpid()))
        hang_in_c("")
    return 1.0


def two_arguments(prompt: str, answer: str) -> float:
    """Take what a reward isn't given."""
    return float(prompt == answer)


async def later(value: float) -> float:
    """Score after a turn of the event loop."""
    await asyncio.sleep(0)
    if not value:
        raise ValueError("nothing")
    return value


async def loop(_: str) -> float:
    """Return the number of the event loop."""
    return id(asyncio.get_running_loop())


def alarm(_: str) -> float:
    """Use a signal, which works in the main thread only."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    return float(threading.current_thread() is threading.main_thread())


def show_surroundings(path: str) -> float:
    """Leave this process's environment, and what its file descriptors are."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of listing them
            files[number] = os.readlink(f"/proc/self/fd/{number}")
    Path(path).write_text(json.dumps({"environment": dict(os.environ), "files": files}))
    return 1.0


def shout(_: str) -> float:
    """Write where the protocol might be."""
    print("words" * 1000)
    os.write(1, b"bytes")
    print("more", file=sys.stderr)
    return 1.0


class Ranked:
    """Reward the samples of a group by their order, the first least; one that says "raise" fails them all."""

    def __init__(self, step: float) -> None:
        self.step = step

    def __call__(self, samples) -> list[dict]:
        responses = sorted(sample.response for sample in samples)
        assert "raise" not in responses, responses
        return [
            {"score": self.step * responses.index(sample.response), "tokens": sample.tokens, "text": sample.response}
            for sample in samples
        ]


def at_second(sample) -> float:
    """Fail for the first time that a response with a path is scored."""
    action, _, path = sample.response.partition(" ")
    if path and not Path(path).exists():
        Path(path).touch()
        raise ValueError("not yet")
    return 1.0 if action == "right" else [][0] if action == "never" else 0.0


ACTIONS: Mapping[str, object] = {
    "one": lambda _: 1,
    "parts": lambda _: {"reward": 0.5, "style": 0.25},
    "raise": lambda text: [][int(text)],
    "json": lambda text: json.loads(text),
    "nested": lambda _: {"reward": True, "parts": {"style": 0.25}},
    "await": lambda _: later(0.5),
    "await-raise": lambda _: later(0.0),
    "loop": loop,
    "nan": lambda _: float("nan"),
    "inf": lambda _: {"reward": float("inf")},
    "string": lambda _: "0.7",
    "none": lambda _: None,
    "sys.exit": lambda _: sys.exit(0),
    "os._exit": lambda _: os._exit(3),
    "abort": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda _: time.sleep(3600),
    "hang-in-c": hang_in_c,
    "hang-deep": lambda _: deep(300),
    "hang-with-child": hang_with_child,
    "hang-unless": hang_unless,
    "hang-once": hang_once,
    "wait-for": wait_for,
    "pid": lambda _: os.getpid(),
    "sleep": lambda seconds: time.sleep(float(seconds)) or 1.0,
    "begin-and-sleep": lambda path: Path(path).touch() or time.sleep(1.0) or 1.0,
    "alarm": alarm,
    "shout": shout,
    "surroundings": show_surroundings,
    "recurse": lambda text: ACTIONS["recurse"](text),
    "torch": lambda _: float(bool({"torch", "transformers"} & set(sys.modules))),
}
