"""The program of a confined process: it runs a script, answers calls of functions, or runs tests of functions."""

import random
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from relaxd.sandbox.channel import Channel
from relaxd.sandbox.values import NotPlain, decode, encode

CONTEST = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Modules whose names a program for a contest finds imported, in verl's order: later ones win."""
RECURSION_LIMIT = 600_000
"""Of programs for a contest, as in verl."""


def run(channel: Channel) -> None:
    """Do the one job that the first message describes."""
    random.seed(0)
    job = channel.receive()
    _JOBS[job["kind"]](channel, job)
    sys.stdout.flush()


def _run_script(channel: Channel, job: Mapping[str, Any]) -> None:
    """Run a program, and say how it ended."""
    try:
        _load(job, "__main__")
    except SystemExit:
        pass
    except BaseException as error:
        channel.send(_described(error))
        return
    sys.stdout.flush()
    channel.send({"ended": True})


def _answer_calls(channel: Channel, job: Mapping[str, Any]) -> None:
    """Load a program, say what it has, and call its functions."""
    try:
        found = _load(job, "solution")
    except BaseException as error:
        channel.send(_described(error))
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
        return _described(error)


def _run_tests(channel: Channel, job: Mapping[str, Any]) -> None:
    """Run tests when asked to. The functions are in another process, which is asked over the channel."""
    proxies = _Proxies(channel)
    try:
        codes = [compile(text, f"<test {number}>", "exec") for number, text in enumerate(job["tests"])]
        setup = compile(job["setup"], "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        channel.send({"broken": f"{type(error).__name__}: {error}"})
        return
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        if "programs" in job:
            space |= _load(job, "solution")
        else:
            space |= proxies.of(job["names"])
        exec(setup, space)
    except BaseException as error:
        channel.send(_described(error))
        return
    channel.send({"ready": True})
    while True:
        asked = channel.receive()
        try:
            exec(codes[asked["test"]], space)
            channel.send({"passed": True})
        except BaseException as error:
            channel.send(_described(error))


class _Proxies:
    """Functions of a program in another process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._names: dict[int, str] = {}

    def of(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return what stands for the names of a program, as `_names` describes them."""
        found: dict[str, Any] = {name: self._function(name) for name in names["functions"]}
        found |= {name: import_module(module) for name, module in names["modules"].items() if _is_standard(module)}
        return found | {name: decode(value) for name, value in names["values"].items()}

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            def name_of(value: Any) -> str | None:
                return self._names.get(id(value))

            asked = {
                "call": name,
                "arguments": [encode(one, name_of) for one in arguments],
                "keywords": {key: encode(one, name_of) for key, one in keywords.items()},
            }
            self._channel.send(asked)
            answer = self._channel.receive()
            if "value" in answer:
                return decode(answer["value"])
            raise _rebuilt(answer)

        call.__name__ = name
        self._names[id(call)] = name
        return call


def _load(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run the first of a job's programs that compiles, as a module. Returns what is in it."""
    module = ModuleType(name)
    sys.modules[name] = module
    space = vars(module)
    if job["contest"]:
        sys.setrecursionlimit(RECURSION_LIMIT)
        for one in CONTEST:
            found = vars(import_module(one))
            shown = found.get("__all__") or [key for key in found if not key.startswith("_")]
            space |= {key: found[key] for key in shown}
        space |= {one: import_module(one) for one in CONTEST}
    refusal: BaseException | None = None
    for text in job["programs"]:
        try:
            code = compile(text, "<answer>", "exec", dont_inherit=True)
            break
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            refusal = refusal or error
    else:
        assert refusal is not None
        raise refusal
    before = dict(space)
    exec(code, space)
    return {key: value for key, value in space.items() if key not in before or before[key] is not value} | {
        "__name__": name
    }


def _names(found: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what a program has: functions, standard modules, and plain values."""
    described: dict[str, Any] = {"functions": [], "modules": {}, "values": {}}
    for name, value in found.items():
        if name.startswith("__"):
            continue
        if isinstance(value, ModuleType):
            described["modules"][name] = value.__name__
        elif callable(value):
            described["functions"].append(name)
        else:
            try:
                described["values"][name] = encode(value)
            except (NotPlain, RecursionError):
                continue
    return described


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _described(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:500]
    except BaseException:  # its own __str__ may raise
        text = ""
    return {"error": type(error).__name__, "text": text, "unplain": isinstance(error, NotPlain)}


def _rebuilt(answer: Mapping[str, Any]) -> BaseException:
    """Return an exception of the other process: a built-in one of its name, or else a RuntimeError."""
    if answer.get("unplain"):
        return NotPlain(str(answer.get("text")))
    import builtins

    kind = getattr(builtins, str(answer.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(str(answer.get("text")))
        except TypeError:  # such as UnicodeDecodeError, which takes more
            pass
    return RuntimeError(f"{answer.get('error')}: {answer.get('text')}")


_JOBS: dict[str, Callable[[Channel, Mapping[str, Any]], None]] = {
    "script": _run_script,
    "calls": _answer_calls,
    "tests": _run_tests,
}
