"""Nobody calls a constructor or function with a row of seven values."""

import ast

from tests.unit.source_code.calls import trees

MOST = 6
"""Positional parameters without `self`; a caller names what is beyond them."""
BY_PLACE = ("forward", "_gradient", "vocabulary_gradient_", "heads_backward")
"""Functions that get what an autograd function was applied to or has saved: by place, like Triton's kernels."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_command(function: Function) -> bool:
    """Whether typer calls it, which gives all by name."""
    annotations = [ast.unparse(argument.annotation) for argument in function.args.args if argument.annotation]
    return any("typer." in each or each.endswith(("Argument", "Option")) for each in annotations)


def positional(function: Function) -> list[str]:
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def exempt(function: Function) -> bool:
    kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return kernel or function.name in BY_PLACE or is_command(function)


def test_long_lists_of_parameters_are_keywords() -> None:
    found = []
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, Function) and len(names := positional(node)) > MOST and not exempt(node):
                found.append(f"{file}:{node.lineno} {node.name}({', '.join(names)})")
    assert not found, f"more than {MOST} positional parameters; put `*` before those that a caller names: {found}"
