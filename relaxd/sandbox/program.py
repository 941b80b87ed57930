"""Main program of confined processes: runs a script or a tool's program, answers function calls, or runs tests.

Tests run in a process that the tested program never enters: its functions are called over the channel. Tests take a
name from the program only if nothing else defines it. They never take builtins, standard modules, or names that the
tests or the prompt's beginning of the program define; otherwise a program could redefine `abs` to pass.
"""

import ast
import builtins
import io
import random
import symtable
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from relaxd.sandbox.channel import Channel, NotPlain, decode, encode

CONTEST = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Modules whose names a program for a programming contest can use without importing. In verl's order: if two modules
define a name, the later one's counts."""
PROGRAM = "<answer>"
"""File name of the answer's program in tracebacks."""
RECURSION_LIMIT = 600_000
"""Recursion limit of Python for programs for programming contests, as in verl."""


def contest_names() -> dict[str, Any]:
    """Return the values that programs for programming contests can use without importing, by name."""
    space: dict[str, Any] = {}
    for one in CONTEST:
        found = vars(import_module(one))
        shown = found.get("__all__") or [key for key in found if not key.startswith("_")]
        space |= {key: found[key] for key in shown}
    return space | {one: import_module(one) for one in CONTEST}


def load(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Execute the first of a job's programs that compiles, as module `name`. Returns the values that the program
    defines, by name."""
    module = ModuleType(name)
    sys.modules[name] = module
    space = vars(module)
    if job["contest"]:
        sys.setrecursionlimit(RECURSION_LIMIT)
        space |= contest_names()
    refusal: BaseException | None = None
    for text in job["programs"]:
        try:
            code = compile(text, PROGRAM, "exec", dont_inherit=True)
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


Names = Collection[str]


class AmbiguousError(ValueError):
    """The tests don't show which function of the program they test."""


def run_tests(channel: Channel, job: Mapping[str, Any]) -> None:
    """Load a job's tests, then run each test whose number a message requests, and report its result.

    If the job has "programs", the tested program is loaded into this process. Otherwise it is in another process, and
    tests call its functions over the channel.
    """
    texts = [job["setup"], *job["tests"]]
    try:
        codes = [compile(text, f"<test {number}>", "exec") for number, text in enumerate(job["tests"])]
        setup = compile(job["setup"], "<tests>", "exec")
        beginning = {} if "programs" in job else _beginning(job["prefix"])
        wanted, own = sort_names(texts, job["entry_point"], beginning)
    except AmbiguousError as error:
        channel.send({"broken": str(error)})
        return
    except (SyntaxError, ValueError) as error:
        channel.send({"broken": f"the tests can't be compiled: {type(error).__name__}: {error}"})
        return
    space: dict[str, Any] = {**own, "__name__": "tests"}
    try:
        if "programs" in job:
            found = load(job, "solution")
            space |= {name: found[name] for name in wanted if name in found}
        else:
            for name in wanted:
                beginning.pop(name, None)
            beginning |= own | _Proxies(channel).of(job["names"], wanted)
            space = beginning  # where its functions find the program's
        exec(setup, space)
    except BaseException as error:
        channel.send(describe(error))
        return
    channel.send({"ready": True})
    while True:
        asked = channel.receive()
        try:
            exec(codes[asked["test"]], space)
            channel.send({"passed": True})
        except BaseException as error:
            channel.send(describe(error))


def sort_names(texts: Sequence[str], entry_point: str, defined: Names) -> tuple[set[str], dict[str, Any]]:
    """Determine where names that tests use without defining them come from.

    Returns the names to take from the tested program, and the values of names from the standard library.

    Args:
        texts: the tests' sources, which share their names.
        entry_point: the tested function, as an expression; "" if unknown.
        defined: names that the beginning of the program in the prompt defines.

    Raises AmbiguousError, SyntaxError, ValueError.
    """
    entry = {node.id for node in ast.walk(ast.parse(entry_point or "None")) if isinstance(node, ast.Name)}
    used: set[str] = set()
    bound: set[str] = set()
    not_modules: set[str] = set()
    for text in texts:
        _collect(symtable.symtable(text, "<tests>", "exec"), used, bound)
        not_modules |= _used_alone(ast.parse(text))
    free = used - bound - set(defined) - entry
    own: dict[str, Any] = {
        name: import_module(name) for name in free if name in sys.stdlib_module_names and name not in not_modules
    }
    built_in = {name for name in free if hasattr(builtins, name)}
    wanted = free - own.keys() - built_in
    if entry and wanted:
        standard = contest_names()
        own |= {name: standard[name] for name in wanted if name in standard}
    if not entry and not wanted and built_in:  # a function named like a builtin, such as MBPP's `sum`
        functions = {name for name in built_in if not isinstance(getattr(builtins, name), type)} or built_in
        if len(functions) > 1:
            listed = ", ".join(sorted(functions))
            raise AmbiguousError(
                f"the tests use only names of builtins ({listed}): name the tested function in metadata.entry_point"
            )
        return functions, own
    return (wanted - own.keys()) | entry, own


def _collect(table: symtable.SymbolTable, used: set[str], bound: set[str]) -> None:
    """Add a module's global names to `used` if its code reads them, and to `bound` if it assigns or imports them."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if not top and not symbol.is_global():
            continue
        if symbol.is_assigned() or symbol.is_imported():
            bound.add(symbol.get_name())
        elif symbol.is_referenced():
            used.add(symbol.get_name())
    for child in table.get_children():
        _collect(child, used, bound)


def _used_alone(tree: ast.AST) -> set[str]:
    """Return the names that code uses by themselves, not only as the base of NAME.ATTRIBUTE."""
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bases}


def _beginning(prefix: str) -> dict[str, Any]:
    """Execute the beginning of a program, as given in a prompt, and return the values that it defines, by name.

    The beginning may end in a function without a body. Functions with only a docstring are left out. Returns {} if the
    code raises an exception.
    """
    for text in (prefix, f"{prefix}\n    pass\n"):
        space: dict[str, Any] = {"__name__": "tests"}
        with suppress(Exception):
            tree = ast.parse(text, "<prompt>")
            exec(compile(tree, "<prompt>", "exec"), space)
            for node in tree.body:
                if isinstance(node, ast.FunctionDef) and all(map(_does_nothing, node.body)):
                    space.pop(node.name, None)
            return space
    return {}


def _does_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


class _Proxies:
    """Creates proxies of a program's functions: each call is sent to the program's process over the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._names: dict[int, str] = {}

    def of(self, names: Mapping[str, Any], wanted: Names) -> dict[str, Any]:
        """Return proxies of the program's functions, and copies of its values, for the `wanted` names.

        `names` is the program's description by `_names`.
        """
        found: dict[str, Any] = {name: self._function(name) for name in names["functions"] if name in wanted}
        return found | {name: decode(value) for name, value in names["values"].items() if name in wanted}

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


def describe(error: BaseException) -> dict[str, Any]:
    """Convert an exception to a message for the process at the channel's other end."""
    try:
        text = str(error)[:500]
    except BaseException:  # its own __str__ may raise
        text = ""
    return {"error": type(error).__name__, "text": text, "unplain": isinstance(error, NotPlain)}


def _rebuilt(answer: Mapping[str, Any]) -> BaseException:
    """Convert a message about an exception in the other process to an exception, for raising it here.

    The result is the built-in exception with the same name, or else a RuntimeError. StopIteration also becomes a
    RuntimeError, because it would only end a test's `for` loop.
    """
    if answer.get("unplain"):
        return NotPlain(str(answer.get("text")))
    kind = getattr(builtins, str(answer.get("error")), None)
    ends_iteration = kind in (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not ends_iteration:
        try:
            return kind(str(answer.get("text")))
        except TypeError:  # such as UnicodeDecodeError, which takes more
            pass
    return RuntimeError(f"{answer.get('error')}: {answer.get('text')}")


def run(channel: Channel) -> None:
    """Receive a job, the channel's first message, and execute it."""
    random.seed(0)
    job = channel.receive()
    _JOBS[job["kind"]](channel, job)
    sys.stdout.flush()


def _run_script(channel: Channel, job: Mapping[str, Any]) -> None:
    """Execute a job's program, and report over the channel that it ended, or the exception that it raised."""
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
    """Execute a job's program, print the traceback if it raises an exception, and report over the channel that it
    ended."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # output before a stop must be seen
    sys.stderr = sys.stdout
    try:
        load(job, "__main__")
    except SystemExit:
        pass
    except BaseException as error:  # every error of the program becomes a traceback in its output
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename != PROGRAM:
            place = place.tb_next
        traceback.print_exception(error.with_traceback(place))
    sys.stdout.flush()
    channel.send({"ended": True})


def _answer_calls(channel: Channel, job: Mapping[str, Any]) -> None:
    """Execute a job's program, send a description of what it defines, then call its functions as messages request."""
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
    """Describe what a program defines, as a message: the names of its functions, and the values that can be sent."""
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
