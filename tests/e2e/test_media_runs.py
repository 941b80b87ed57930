"""The runs of tests/gpu/test_media_run.py with the transformers engine, on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.media_run import CASES, check_media_run, make_place, train_on_media

DEADLINE_SECONDS = 600.0


@pytest.fixture
def places() -> Iterator[list[Workplace]]:
    """Workplaces of the test, whose processes end with it."""
    places: list[Workplace] = []
    yield places
    for place in places:
        place.end()


@pytest.mark.night
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", CASES)
def test_towers_that_are_trained_reach_the_engine(
    model: str, tmp_path: Path, redis_url: str, places: list[Workplace]
) -> None:
    case = CASES[model]
    place = make_place(tmp_path, case, "transformers")
    places.append(place)
    run = train_on_media(place, case, redis_url, DEADLINE_SECONDS)
    print(run.facts())
    check_media_run(run)
