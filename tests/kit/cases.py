"""Tables of cases for one test: for formulas and texts, where collecting a case takes longer than checking it."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str | Sequence[str], cases: Iterable[Any], ids: Sequence[str] | None = None) -> Callable[[Test], Test]:
    """Call a test with each case in turn, and raise the errors of all cases together. Takes what parametrize takes.

    Cases share the test's fixtures.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [(case,) if len(arguments) == 1 else tuple(case) for case in cases]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            errors = []
            for index, case in enumerate(table):
                try:
                    test(**others, **dict(zip(arguments, case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"in the case {ids[index] if ids else case!r}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(table)} cases", errors)

        kept = [one for name, one in inspect.signature(test).parameters.items() if name not in arguments]
        run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return run

    return decorate
