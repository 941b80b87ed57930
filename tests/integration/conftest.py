"""Fixtures of the integration tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def alone() -> Iterator[None]:
    """Learners are made in this process: leave its Megatron world before and after."""
    # Only now: Megatron takes seconds, and most tests need none.
    from tests.kit.megatron_world import shut_down

    shut_down()
    yield
    shut_down()
