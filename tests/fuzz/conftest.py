"""A fleet for the tests of a module."""

from collections.abc import Iterator

import pytest

from tests.fuzz.fleet import Fleet, fleet

DEADLINE_SECONDS = "2.0"
"""Of calls that bring none; the attack's calls do."""


@pytest.fixture(scope="module")  # not "package": without __init__.py that lasts until the end
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Real services, to be attacked and frozen."""
    limits = ("--deadline-seconds", DEADLINE_SECONDS, "--stream-deadline-seconds", DEADLINE_SECONDS)
    with fleet(tmp_path_factory.mktemp("fleet"), *limits) as started:
        yield started
