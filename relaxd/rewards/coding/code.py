"""The reward of programs: the answer's Python code is run against tests."""

from typing import Literal

from relaxd.rewards.coding.cases import cases_of, code_in
from relaxd.rewards.coding.judging import judge
from relaxd.rewards.interface import RewardInput
from relaxd.sandbox.limits import Limits
from relaxd.sandbox.processes import Sandbox

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
            seconds: computing time for each test.
            total_seconds: time for all tests of an answer; later ones fail. Less than reward.timeout_seconds.
            memory_mb: address space.
            output_kb: most of what a program may print, or a function return.
            separate: run tests in Python in another process than the answer. False: in the same, for tests that use its
                classes or pass functions to it; an answer can then cheat them.
            confine_files: hide all files but Python's own. False: for kernels without Landlock.

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
        """Score a sample.

        Raises ValueError: the prompt has no tests, or wrong ones; ConfinementError.
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
        return (
            {"reward": passed / tests, "passed": passed / tests, **parts}
            if self._share
            else {
                "reward": accuracy,
                **parts,
            }
        )
