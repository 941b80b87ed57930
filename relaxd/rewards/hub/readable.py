"""Which answers tasks of reasoning-gym may read: some evaluate an answer as Python code, and anybody may write one."""

import ast
import re
import sys
from typing import Any

from relaxd.rewards.mathematics.formulas import Unreadable, parse

_FORMULAS = frozenset({"countdown", "puzzle24", "simple_integration", "intermediate_integration"})
"""Tasks that read an answer with sympy's parser, which calls eval."""
_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks that call eval for an answer that may be a list."""
_FRACTIONS = frozenset({"coin_flip"})
"""Tasks that read a fraction, of which 1e999999999 would take all memory."""
_WORD = re.compile(r"[^\W\d_]+")
_FUNCTIONS = frozenset(
    "sqrt sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln pi abs Abs".split()  # noqa: SIM905
)
_LARGE_EXPONENT = re.compile(r"[eE][-+]?[0-9_]{4}")
UNREADABLE = "("
"""An answer that no task can read, in place of one that it may not."""


def readable(answer: str, task: str) -> str:
    """Return an answer as a task may read it: the same, or `UNREADABLE`.

    A task that reads formulas gets only numbers, letters, operators, brackets and well-known functions, without powers
    whose value would fill the memory. An unsolved "Integral(...)" is no formula here, though sympy would take it for
    right.
    """
    if task in _FORMULAS and not _is_formula(answer):
        return UNREADABLE
    if task in _FRACTIONS and _LARGE_EXPONENT.search(answer):
        return UNREADABLE
    return answer


def make_safe(task: object, name: str) -> None:
    """Let a task read a list with `ast.literal_eval` where it calls eval."""
    if name in _LISTS:
        module: Any = sys.modules[type(task).__module__]
        module.eval = ast.literal_eval


def _is_formula(answer: str) -> bool:
    if not all(len(word) == 1 or word in _FUNCTIONS for word in _WORD.findall(answer)):
        return False
    try:
        parse(re.sub(r"\s+", "", answer).lower())
    except (Unreadable, ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False
    return True
