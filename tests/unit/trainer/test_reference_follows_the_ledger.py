"""A reference has the weights that the newest step of the ledger names, whatever it has missed."""

from pathlib import Path
from typing import Any

import pytest

from services.trainer.batch.step_plan import StepFileError
from services.trainer.loop.checkpoint_folders import weights_path
from services.trainer.reference_models import followed_folder
from services.trainer.reference_models.followed_folder import LedgerWeights
from tests.kit.boards import make_board

INITIAL = Path("initial")


class Reference:
    """A reference, and the trainer whose ledger it follows."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.board = make_board(redis_url)
        self.folder = folder
        self.term = self.board.new_trainer_term()
        self.loaded: list[Path] = []
        self.weights = self.start()

    def start(self) -> LedgerWeights:
        INITIAL.mkdir(exist_ok=True)
        return LedgerWeights(self.board, self.folder, INITIAL, self.loaded.append, lambda path: None)

    def commit(self, step: int, **plan: Any) -> None:
        own = {"groups": [], "step": step, "term": self.term, **plan}
        self.board.commit_step(term=self.term, step=step, plan=own, metrics={})

    def write(self, name: str) -> Path:
        path = weights_path(self.folder, name)
        path.mkdir(parents=True)
        return path


@pytest.fixture
def reference(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reference:
    monkeypatch.chdir(tmp_path)
    return Reference(redis_url, tmp_path)


def test_it_takes_over_what_the_newest_step_names_and_nothing_twice(reference: Reference) -> None:
    second = reference.write("step-000002.1")
    reference.weights.follow()
    reference.commit(1)
    reference.weights.follow()
    assert (reference.loaded, reference.weights.weights) == ([], "")
    reference.commit(2, refreshed=["reference"])
    for _ in range(2):
        reference.weights.follow()
    reference.commit(3, reference="step-000002.1")
    reference.weights.follow()
    assert (reference.loaded, reference.weights.weights) == ([second], "step-000002.1")

    # One that starts now, or that missed steps, needs no other weights than these.
    fourth = reference.write("step-000004.1")
    reference.commit(4, reference="step-000002.1", refreshed=["reference"])
    reference.commit(5, reference="step-000004.1")
    reference.weights.follow()
    assert reference.loaded == [second, fourth]
    reference.loaded.clear()
    reference.start().follow()
    assert reference.loaded == [fourth]


def test_a_ledger_that_has_lost_the_step_takes_its_weights_back(reference: Reference) -> None:
    reference.write("step-000001.1")
    reference.commit(1, refreshed=["reference"])
    reference.weights.follow()
    client: Any = reference.board._connection.client
    client.delete(f"{reference.board.prefix}ledger")
    client.hset(f"{reference.board.prefix}state", "last_step", 0)
    reference.weights.follow()
    assert (reference.loaded[-1], reference.weights.weights) == (INITIAL, "")


def test_weights_that_do_not_appear_are_named(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_folder, "FILE_SECONDS", 0.0)
    reference.commit(1, refreshed=["reference"])
    with pytest.raises(
        StepFileError, match=r"reference/step-000001.1 isn't there, 0 s after its step .* this reference"
    ):
        reference.weights.follow()
