"""The reward for programs: runs the answer's Python code against tests.

Each program runs in a confined process that never sees the expected result; its output or return value is compared
here.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from relaxd.rewards.hub.code_cases import Asserts, Call, Cases, Script, cases_of, code_in
from relaxd.rewards.interface import RewardInput
from relaxd.sandbox.channel import decode, encode
from relaxd.sandbox.limits import Limits
from relaxd.sandbox.processes import Confined, Ended, Sandbox, Stopped

CREDITS = ("all", "share")


class Code:
    """1 if the reply's Python code passes all tests, else 0; the code runs confined, see docs/rewards.md.

    The code is the reply's last fenced block, or the whole reply. Parts: accuracy: 1 if all tests pass; format: 1 if
    there is a block; unplain: 1 if a test failed because a value can't pass between the processes of answer and tests;
    and with credit = "share" passed: the share of tests passed.
    """

    def __init__(
        self,
        *,
        credit: Literal["all", "share"] = "all",
        seconds: float = 3.0,
        total_seconds: float = 8.0,
        memory_mb: int = 512,
        output_kb: int = 1024,
        separate: bool = True,
        confine_files: bool = True,
    ) -> None:
        """Check the settings, and that this machine can confine code.

        Args:
            credit: "all" gives 1 or 0, and stops at the first test that fails; "share" gives the share of tests passed.
            seconds: maximum processor seconds per test.
            total_seconds: maximum seconds for all tests of an answer; later tests fail. Less than
                reward.timeout_seconds.
            memory_mb: maximum address space of a process, in MiB.
            output_kb: maximum output of a program, or size of a function's result, in KiB.
            separate: run tests in Python in another process than the answer. False is for tests that use the answer's
                classes or pass functions to it; the answer can then cheat.
            confine_files: hide all files except Python's own. False is for kernels without Landlock.

        Raises ValueError: a setting is wrong; ConfinementError: this machine can't confine code.
        """
        if credit not in CREDITS:
            raise ValueError(f'credit is {credit!r}: it must be "all" or "share"')
        for name, value in (("seconds", seconds), ("total_seconds", total_seconds), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ValueError(f"{name} is {value}: it must be above 0")
        if not 0 < output_kb <= 1 << 20:
            raise ValueError(f"output_kb is {output_kb}: it must be 1 to {1 << 20}")
        self._share = credit == "share"
        self._total_seconds = total_seconds
        self._separate = separate
        self._sandbox = Sandbox(Limits(seconds, memory_mb << 20, output_kb << 10, confine_files))

    def __call__(self, sample: RewardInput) -> dict[str, float]:
        """Score an answer's code by the prompt's tests.

        Raises ValueError if the prompt has no tests or invalid ones, and ConfinementError.
        """
        cases = cases_of(sample)
        code, fenced = code_in(sample.response)
        tests = passed = 0
        unplain = False
        deadline = self._sandbox.clock.now() + self._total_seconds
        for verdict in judge(self._sandbox, code, cases, deadline, self._separate):
            tests += 1
            passed += verdict.passed
            unplain = unplain or verdict.unplain
            if not verdict.passed and not self._share:
                break
        accuracy = float(passed == tests)
        parts = {"accuracy": accuracy, "format": float(fenced), "unplain": float(unplain)}
        if self._share:
            return {"reward": passed / tests, "passed": passed / tests, **parts}
        return {"reward": accuracy, **parts}


_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_WHOLE = re.compile(r"[-+]?[0-9]+")
RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""Relative and absolute tolerance when a program's numbers are compared; numpy.allclose's defaults."""


def same_output(printed: str, expected: str) -> bool:
    """Return True if a program printed the expected text.

    Empty lines and white space at the ends of lines don't count. Lines must have the same words; numbers with a decimal
    point or exponent in the expected text only need to be close.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(returned: Any, expected: Any) -> bool:
    """Return True if a function returned the expected JSON value.

    Tuples count as lists, and keys of a mapping as text. An expected list of one value also matches the value, as in
    TACO's data.
    """
    ours = _as_json(returned)
    if ours == expected:
        return True
    return isinstance(expected, list) and len(expected) == 1 and ours == expected[0]


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if line]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    words, others = ours.split(), theirs.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if not _NUMBER.fullmatch(ours) or not _NUMBER.fullmatch(theirs):
        return False
    if _WHOLE.fullmatch(theirs):
        return _is_whole_value(ours, theirs)
    number, expected = float(ours), float(theirs)
    # Numbers too large for floats are all infinite, and infinity is close to itself.
    return math.isfinite(expected) and math.isclose(number, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _is_whole_value(ours: str, theirs: str) -> bool:
    """Return True if the printed number `ours` equals the expected whole number `theirs`, digit by digit.

    `ours` may be written as "4.0" or "+4".
    """
    whole, _, rest = ours.partition(".")
    return not rest.strip("0") and _unsigned_zero(whole) == _unsigned_zero(theirs)


def _unsigned_zero(number: str) -> str:
    """Return a whole number without a plus sign; "-0", a float's negative zero, becomes "0"."""
    return "0" if number == "-0" else number.removeprefix("+")


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Verdict:
    """Result of one test of an answer's program."""

    passed: bool
    unplain: bool = False
    """True if the test failed because a value can't be sent between the processes of answer and tests."""


FAILED = Verdict(False)


class BrokenTestError(ValueError):
    """The prompt's test is faulty, whatever the answer is."""


def judge(sandbox: Sandbox, code: str, cases: Cases, deadline: float, separate: bool) -> Iterator[Verdict]:
    """Run an answer's code against the tests, and yield for each test whether the code passed.

    After `deadline`, by the sandbox's clock, all tests fail. If `separate`, tests in Python run in another process than
    the answer. Raises BrokenTestError, and ConfinementError if this machine can't confine a process.
    """
    if isinstance(cases, Asserts):
        # A reply may repeat the prompt's beginning of the program.
        programs = [f"{cases.prefix}\n{code}", f"{cases.prefix}{code}", code] if cases.prefix else [code]
        yield from _run_asserts(sandbox, programs, cases, deadline, separate)
        return
    functions = _Functions(sandbox, {"programs": [code], "contest": True}, deadline)
    try:
        for case in cases:
            if isinstance(case, Script):
                yield Verdict(_run_script(sandbox, code, case, deadline))
            else:
                yield _run_call(functions, case)
    finally:
        functions.end()


def _run_script(sandbox: Sandbox, code: str, case: Script, deadline: float) -> bool:
    job = {"kind": "script", "programs": [code], "contest": True}
    printed, problem = sandbox.run(job, deadline, case.stdin)
    ended = problem is None or (isinstance(problem, Ended) and problem.exit_code == 0)  # the program may call os._exit
    return ended and same_output(printed, case.stdout)


def _run_call(functions: "_Functions", case: Call) -> Verdict:
    asked = {"call": case.name, "method": True, "arguments": [encode(one) for one in case.arguments]}
    try:
        answer = functions.call(asked)
    except Stopped:
        return FAILED
    if "value" not in answer:
        return Verdict(False, bool(answer.get("unplain")))
    with suppress(ValueError, RecursionError):
        return Verdict(same_value(decode(answer["value"]), case.returns))
    return FAILED


class _Functions:
    """Calls the answer's functions in a confined process. A process that has ended is restarted at the next call."""

    def __init__(self, sandbox: Sandbox, program: dict[str, Any], deadline: float) -> None:
        self._sandbox = sandbox
        self._job = {"kind": "calls", **program}
        self._deadline = deadline
        self._process: Confined | None = None
        self._names: Any = None

    def names(self) -> Any:
        """Return the names that the answer's program defines; None if the program can't be loaded.

        Starts the process if none is alive. Raises Stopped.
        """
        if self._process is None or not self._process.alive:
            self._process = self._sandbox.start(self._job, self._deadline)
            self._names = self._process.receive().get("names")
        return self._names

    def call(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the answer, and return the process's reply. Raises Stopped, also if it can't be loaded."""
        if self.names() is None:
            raise Stopped("it can't be loaded")
        assert self._process is not None
        self._process.send(asked)
        found: dict[str, Any] = self._process.receive()
        return found

    def end(self) -> None:
        """End the confined process, if it was started."""
        if self._process is not None:
            self._process.end()


def _run_asserts(
    sandbox: Sandbox, programs: Sequence[str], cases: Asserts, deadline: float, separate: bool
) -> Iterator[Verdict]:
    program = {"programs": programs, "contest": False}
    functions = _Functions(sandbox, program, deadline)
    tester: Confined | None = None
    try:
        for number in range(len(cases.tests)):
            try:
                if tester is None or not tester.alive:
                    tester = _start_tester(sandbox, cases, deadline, functions.names() if separate else program)
                if tester is None:
                    yield FAILED
                    continue
                tester.send({"test": number})
                yield _watch(tester, functions)
            except Stopped:
                # The tests still wait for a call that ended with the answer's process.
                if tester is not None:
                    tester.end()
                yield FAILED
    finally:
        functions.end()
        if tester is not None:
            tester.end()


def _start_tester(sandbox: Sandbox, cases: Asserts, deadline: float, given: Any) -> Confined | None:
    """Start the process that runs the tests.

    `given` has the names of the answer's functions, or the answer's program to run in the same process.

    Returns None if the answer can't be loaded, or the tests' setup fails. Raises Stopped, BrokenTestError.
    """
    if given is None:
        return None
    job = {"kind": "tests", "setup": cases.setup, "tests": list(cases.tests)}
    job |= {"prefix": cases.prefix, "entry_point": cases.entry_point}
    tester = sandbox.start(job | (given if "programs" in given else {"names": given}), deadline)
    try:
        begun = tester.receive()
    except Stopped:
        if "programs" in given:
            raise
        raise BrokenTestError("the tests' setup doesn't end") from None
    if "broken" in begun:
        tester.end()
        raise BrokenTestError(begun["broken"])
    if "ready" not in begun:
        tester.end()
        return None
    return tester


def _watch(tester: Confined, functions: _Functions) -> Verdict:
    """Forward a test's calls to the answer's functions until the test ends. Raises Stopped."""
    while "call" in (found := tester.receive()):
        tester.send(functions.call(found))
    return Verdict("passed" in found, bool(found.get("unplain")))
