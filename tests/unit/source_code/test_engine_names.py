"""No engine's name is compared outside of the table of engines: code asks the table what an engine can."""

import ast
from collections.abc import Iterator

import pytest

from relaxd import engines
from relaxd.engines import ENGINES
from tests.unit.source_code.calls import trees

TABLE = "relaxd/engines.py"
CONSTANTS = {name for name, value in vars(engines).items() if isinstance(value, str) and value in ENGINES}
"""Constants of the table's module that are names, such as SCRIPTED."""
EXCEPTIONS = {
    "relaxd/tools/migrate/verl_training.py": "value != 'sglang'",  # the name is verl's, whose engine it translates
}


def is_name(node: ast.AST | None) -> bool:
    """Return True for an engine's name, or a collection that has one."""
    match node:
        case ast.Constant(value=str(text)):
            return text in ENGINES
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in CONSTANTS
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return any(map(is_name, items))
    return False


def comparisons(tree: ast.AST) -> Iterator[str]:
    """Yield what compares an engine's name: operators, `match`, and tables with several engines as their keys."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others) if any(map(is_name, [left, *others])):
                yield ast.unparse(node)
            case ast.MatchValue(value=value) if is_name(value):
                yield f"case {ast.unparse(value)}"
            case ast.Dict(keys=keys) if sum(map(is_name, keys)) > 1:
                yield ast.unparse(node)


def test_only_the_table_tells_engines_apart_by_name() -> None:
    found = {(file, text) for file, tree in trees().items() if file != TABLE for text in comparisons(tree)}
    allowed = set(EXCEPTIONS.items())
    wrong = "\n".join(f"{file}: {text}" for file, text in sorted(found - allowed))
    assert not wrong, f"ask a field of {TABLE} instead (docs/engines.md, Adding an engine):\n{wrong}"
    assert not allowed - found, "these exceptions are left over"


@pytest.mark.parametrize(
    "code",
    [
        'engine == "sglang"',
        '"scripted" != config.rollout.engine',
        'engine in ("sglang", "other")',
        "config.rollout.engine == SCRIPTED",
        "engines.SCRIPTED == engine",
        'match engine:\n    case "megatron" | "other":\n        pass',
        '{"transformers": 1, "sglang": 2}[engine]',
    ],
)
def test_the_rule_sees_comparisons(code: str) -> None:
    assert list(comparisons(ast.parse(code)))
    assert not list(comparisons(ast.parse('importlib.import_module("sglang"); {"engine": "sglang"}; a == "b"')))
