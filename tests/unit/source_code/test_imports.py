"""What may not be imported: torch by what starts first, and a test module by another."""

import re

from tests.kit.processes import ROOT, run_python

MODULES = (
    *("relaxd.algorithms", "relaxd.rewards", "relaxd.telemetry", "relaxd.replica.replica_life", "relaxd.cli.main"),
    *("services.coordinator.__main__", "services.reward.__main__", "services.advantage.__main__"),
    *(
        "services.console.__main__",
        "services.launcher.__main__",
        "services.trainer.__main__",
        "services.rollout.__main__",
    ),
    *("services.trainer.critic", "services.trainer.reference", "services.trainer.teacher"),
    *("services.rollout.judge", "services.rollout.teacher"),
)
PROGRAM = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    heavy = {"torch", "transformers", "megatron", "sglang"} & set(sys.modules)
    assert not heavy, f"{module} imports {heavy}"
"""


def test_what_starts_first_needs_no_torch() -> None:
    done = run_python("-c", PROGRAM, *MODULES)
    assert done.returncode == 0, done.stderr


def test_no_module_imports_from_a_test_module() -> None:
    """What tests share is in tests/kit, or in a module beside them whose name says what it is."""
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for folder in ("tests", "benchmarks", "docs")
        for file in (ROOT / folder).rglob("*.py")
        for line in file.read_text().splitlines()
        if re.match(r"\s*(from|import) tests\.(.*[. ])?test_", line)
    ]
    assert found == []
