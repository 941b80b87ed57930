"""The program of a confined process: runs a script or a tool's program, answers calls of functions, or runs tests."""

import io
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from relaxd.sandbox.channel import Channel, NotPlain, decode, encode
from relaxd.sandbox.loading import PROGRAM, load
from relaxd.sandbox.testing import describe, run_tests


def run(channel: Channel) -> None:
    """Do the job that the first message describes, and end."""
    random.seed(0)
    job = channel.receive()
    _JOBS[job["kind"]](channel, job)
    sys.stdout.flush()


def _run_script(channel: Channel, job: Mapping[str, Any]) -> None:
    """Run a program, and report its end."""
    try:
        load(job, "__main__")
    except SystemExit:
        pass
    except BaseException as error:
        channel.send(describe(error))
        return
    sys.stdout.flush()
    channel.send({"ended": True})


def _run_program(channel: Channel, job: Mapping[str, Any]) -> None:
    """Run a program whose errors are part of its output, and report its end."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # what was printed before a stop is seen
    sys.stderr = sys.stdout
    try:
        load(job, "__main__")
    except SystemExit:
        pass
    except BaseException as error:  # whatever the program raises, it gets as a traceback
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename != PROGRAM:
            place = place.tb_next
        traceback.print_exception(error.with_traceback(place))
    sys.stdout.flush()
    channel.send({"ended": True})


def _answer_calls(channel: Channel, job: Mapping[str, Any]) -> None:
    """Load a program, report its names, and call its functions."""
    try:
        found = load(job, "solution")
    except BaseException as error:
        channel.send(describe(error))
        return
    channel.send({"names": _names(found)})
    while True:
        asked = channel.receive()
        channel.send(_called(found, asked))


def _called(found: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        name = asked["call"]
        function = getattr(found["Solution"](), name) if asked.get("method") and "Solution" in found else found[name]
        arguments = [decode(one, found.__getitem__) for one in asked["arguments"]]
        keywords = {key: decode(one, found.__getitem__) for key, one in asked.get("keywords", {}).items()}
        return {"value": encode(function(*arguments, **keywords))}
    except BaseException as error:
        return describe(error)


def _names(found: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the names of a program: functions and plain values."""
    described: dict[str, Any] = {"functions": [], "values": {}}
    for name, value in found.items():
        if name.startswith("__") or isinstance(value, ModuleType):
            continue
        if callable(value):
            described["functions"].append(name)
        else:
            try:
                described["values"][name] = encode(value)
            except (NotPlain, RecursionError):
                continue
    return described


_JOBS: dict[str, Callable[[Channel, Mapping[str, Any]], None]] = {
    "script": _run_script,
    "program": _run_program,
    "calls": _answer_calls,
    "tests": run_tests,
}
