"""The tests of a prompt, in the forms in which data sets have them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.rewards.adapters import ground_truth
from relaxd.rewards.base import RewardInput
from relaxd.rewards.coding.extract import code_in

RIGHT = (
    'the reward code needs tests: {"inputs": [...], "outputs": [...]} as the answer, metadata.input_output or '
    "metadata.reward_model.ground_truth; metadata.test with metadata.entry_point; or metadata.test_list"
)


@dataclass(frozen=True)
class Script:
    """Standard input of a program, and what it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Call:
    """Arguments of a function, and what it must return, as JSON has it."""

    name: str
    arguments: Sequence[Any]
    returns: Any


@dataclass(frozen=True)
class Asserts:
    """Tests in Python, which raise if they fail."""

    setup: str
    """Runs before them."""
    tests: tuple[str, ...]
    prefix: str = ""
    """Code before the answer's: the beginning that the answer completes."""
    entry_point: str = ""
    """The tested function, if the data say which it is."""


Cases = tuple[Script, ...] | tuple[Call, ...] | Asserts


def cases_of(sample: RewardInput) -> Cases:
    """Return the tests of a sample's prompt. Raises ValueError: it has none, or some that can't be read."""
    metadata = sample.metadata
    for where, given in (("metadata.input_output", metadata.get("input_output")), ("answer", ground_truth(sample))):
        pairs = _mapping(given)
        if pairs is not None and {"inputs", "outputs"} <= pairs.keys():
            return _pairs(where, pairs)
    if metadata.get("test") and metadata.get("entry_point"):
        entry_point = str(metadata["entry_point"])
        prefix, _ = code_in(str(metadata.get("prompt_text") or sample.prompt))
        return Asserts(
            str(metadata["test"]), (f"check({entry_point})",), prefix if entry_point in prefix else "", entry_point
        )
    if tests := metadata.get("test_list"):
        if not isinstance(tests, list) or not all(isinstance(one, str) for one in tests):
            raise ValueError(f"metadata.test_list is {_short(tests)}: it must be a list of asserts, as text")
        imports = metadata.get("test_imports") or []
        setup = [*([imports] if isinstance(imports, str) else imports), str(metadata.get("test_setup_code") or "")]
        return Asserts("\n".join(setup), tuple(tests), entry_point=str(metadata.get("entry_point") or ""))
    raise ValueError(RIGHT)


def _pairs(where: str, pairs: Mapping[str, Any]) -> tuple[Script, ...] | tuple[Call, ...]:
    inputs, outputs, name = pairs["inputs"], pairs["outputs"], pairs.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise ValueError(f"{where} has {_count(inputs)} inputs and {_count(outputs)} outputs: give a list of as many")
    if not name:
        return tuple(Script(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs, strict=True))
    return tuple(
        Call(str(name), _arguments(f"{where}.inputs[{number}]", given), _value(f"{where}.outputs[{number}]", wanted))
        for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=True))
    )


def _arguments(where: str, given: Any) -> Sequence[Any]:
    """Return arguments, given as a list, or as verl does: a line of JSON for each."""
    if isinstance(given, list):
        return given
    return [_value(where, line) for line in str(given).split("\n")]


def _value(where: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise ValueError(f"{where} is {_short(given)}: with fn_name it must be JSON") from error


def _text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _mapping(given: Any) -> Mapping[str, Any] | None:
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except ValueError:
            return None
    return given if isinstance(given, Mapping) else None


def _count(given: Any) -> str:
    return str(len(given)) if isinstance(given, list) else "no list of"


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."
