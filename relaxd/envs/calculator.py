"""Environment with a calculator that the model may call before it answers."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from relaxd.envs.environment import Environment, Reply, Sample, Step

MAX_LENGTH = 200
"""Maximum length of an expression for the calculator, in characters."""
_OPERATORS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Calculator(Environment):
    """Environment that answers calls of the tool `calculator`. The first message without a call is the answer.

    The reward is 1 if the last numbers of the model's and the reference answer are equal, else 0. Its metrics are
    `calls`, and `bad_calls`, the calls that can't be computed or parsed.
    """

    tools: Sequence[Mapping[str, Any]] = (
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Computes an expression with + - * / and parentheses.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "such as (12 + 3) * 4"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def __init__(self) -> None:
        self._answer = ""
        self._calls = self._bad_calls = 0

    def open(self, sample: Sample) -> None:
        """Begin a conversation about a sample's question."""
        self._answer = sample.answer

    def step(self, reply: Reply) -> Step:
        """Compute the expressions of the reply's calls. Without a call, even a broken one, end the conversation with
        the answer's reward."""
        if reply.problem and not reply.tool_calls:
            self._bad_calls += 1
            return Step(f"error: {reply.problem}", info=self._info)
        if not reply.tool_calls:
            return Step(None, float(same_last_number(reply.text, self._answer)), True, self._info)
        messages = []
        for call in reply.tool_calls:
            self._calls += 1
            try:
                if call.name != "calculator":
                    raise ValueError(f"there is no tool {call.name!r}")
                text = shown(compute(str(call.arguments.get("expression", ""))))
            except (ValueError, OverflowError) as error:
                self._bad_calls += 1
                text = f"error: {error}"
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text})
        return Step(messages, info=self._info)

    @property
    def _info(self) -> dict[str, float]:
        return {"calls": float(self._calls), "bad_calls": float(self._bad_calls)}


def same_last_number(text: str, answer: str) -> bool:
    """Return True if the last numbers of two texts are equal. False if a text has no number."""
    said, right = _NUMBER.findall(text), _NUMBER.findall(answer)
    return bool(said and right) and _plain(said[-1]) == _plain(right[-1])


def compute(expression: str) -> Fraction:
    """Return the value of an expression of numbers, + - * / and parentheses. Raises ValueError for anything else."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters: at most {MAX_LENGTH}")
    try:
        return _compute(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("this is no expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def shown(number: Fraction) -> str:
    """Return a number as text: a whole number in full, any other with at most 12 significant digits."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.12g}"


def _compute(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and math.isfinite(value):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_compute(left), _compute(right))
    raise ValueError("only numbers, + - * / and parentheses")


def _plain(number: str) -> Fraction | str:
    """Return the value of a number, or its text without commas if it has MAX_LENGTH characters or more."""
    number = number.replace(",", "")
    return Fraction(number) if len(number) < MAX_LENGTH else number
