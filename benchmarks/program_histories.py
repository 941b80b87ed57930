"""Histories of unmodified agent programs: sequences of tokens of a sample, beside the model's messages.

`python -m benchmarks.program_histories`. The programs are those of tests/integration/agent, with a scripted engine that
calls two tools at once (verifiers': one after the other) and answers. RELAXD_TEST_AGENTS_PYTHON and so on name
interpreters that have the libraries (tests/integration/agent/test_agent_libraries.py); others are left out. A program
that sends back what it got, and adds to it, has one history.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from benchmarks.reporting import report
from relaxd.data.tokenizer import PromptTokenizer
from tests.integration.agent.function_kit import holding as holding_a_function
from tests.integration.agent.library_kit import (
    DOUBLED,
    PACKAGES,
    PROGRAMS,
    SOLVE,
    TWO_CALLS,
    WAYS,
    verifiers_settings,
    verifiers_variables,
)
from tests.integration.agent.program_kit import TEMPLATE, holding
from tests.integration.agent.scripted_engines import Fleet
from tests.kit.models import byte_tokenizer

OWN_LOOPS = {
    "openai, chat completions": ("loop", TWO_CALLS),
    "openai, responses": ("responses", [*TWO_CALLS, "Yes."]),
    "anthropic, messages": ("messages", TWO_CALLS),
    "anthropic, tool runner": ("thread", TWO_CALLS),
}
"""Loops of the tests with a protocol's client, and the model's messages."""


async def lead(name: str, held: AbstractAsyncContextManager[Any]) -> dict[str, Any]:
    """Hold a conversation; return its row."""
    async with held as its:
        result = await its.hold()
    if result.failure:
        sys.exit(f"{name}: {result.failure}")
    return {"program": name, "messages": result.turns, "sequences": len(result.sequences)}


async def measure(tokenizer: PromptTokenizer) -> list[dict[str, Any]]:
    """Return the rows of all programs whose libraries are there."""
    rows = [
        await lead(name, holding(tokenizer, Fleet(texts, versions=[3]), what))
        for name, (what, texts) in OWN_LOOPS.items()
    ]
    found = {library: os.environ.get(f"RELAXD_TEST_{library.upper()}_PYTHON", "") for library in PACKAGES}
    for library, way in WAYS:
        if python := found[library]:
            name, fleet = f"{library}-{way}", Fleet(TWO_CALLS, versions=[3])
            rows.append(await lead(name, holding(tokenizer, fleet, name, program=(python, PROGRAMS))))
    if python := found["verifiers"]:
        os.environ.update(verifiers_variables(python))
        settings = verifiers_settings(max_turns=3)
        fleet = Fleet(DOUBLED, versions=[3])
        rows.append(
            await lead(
                "verifiers, bash harness",
                holding_a_function(tokenizer, fleet, SOLVE, python=python, settings=settings),
            )
        )
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer().save_pretrained(folder)
        report("program-histories", asyncio.run(measure(PromptTokenizer(Path(folder), TEMPLATE))))


if __name__ == "__main__":
    main()
