"""Repeats in large files: found while prompts are visited, always the same ones, also after a restart."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxd.config import RunConfig
from relaxd.config.data import CurriculumConfig
from relaxd.data import duplicates
from relaxd.data.curriculum.prompt_record import PromptRecord
from relaxd.data.curriculum.run_curriculum import Curriculum, Visits
from relaxd.data.dataset import Cursor, Prompt, PromptDataset, load_data
from relaxd.data.duplicates import Seen, key_of
from relaxd.data.examples import Example
from relaxd.data.sources.prompt_columns import Examples
from relaxd.data.sources.run_sources import Share
from relaxd.models import DataError
from relaxd.run_folder import COMPARED
from tests.kit.tokenizer import write_tokenizer


class Prompts(PromptDataset):
    """Prompts without media that need no tokenizer."""

    _media = None  # type: ignore[assignment]

    def prompt(self, index: int) -> Prompt:
        return Prompt(np.zeros(1, np.int32), self._examples[index].text, "", {}, index)


def seen_of(*texts: str) -> Seen:
    seen = Seen()
    seen.fresh(np.array([key_of(Example(text)) for text in texts], np.uint64))
    return seen


def prompts_of(texts: str, weights: tuple[float, ...] = (1.0,), held: str = "", seed: int = 0) -> Prompts:
    part = len(texts) // len(weights)
    shares = [Share(part, weight) for weight in weights]
    examples = [Example(text) for text in texts[: part * len(weights)]]
    return Prompts(examples, None, shuffle=True, seed=seed, shares=shares, seen=seen_of(*held))  # type: ignore[arg-type]


def walk(prompts: PromptDataset, count: int, start: Cursor | None = None, **curriculum: Any) -> list[tuple[Any, str]]:
    """Return places and texts of visits."""
    record = PromptRecord(prompts.prompts, CurriculumConfig(**curriculum))
    visits, cursor, found = Visits(prompts, record, 0), start or Cursor(), []
    for _ in range(count):
        visit = visits.next(cursor)
        found.append((visit.cursor.place, visit.prompt.text))
        cursor = prompts.after(visit.cursor)
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.text("aAbBcdefgh", min_size=6, max_size=40),
    st.sampled_from([(1.0,), (1.0, 2.0), (0.5, 1.0), (0.4,)]),
    st.sampled_from(["", "a", "abc"]),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_of_equal_prompts_the_one_that_is_visited_first_stays(texts, weights, held, places):
    prompts = prompts_of(texts, weights, held)
    sequence = [(epoch, place) for epoch in range(5) for place in range(len(prompts))]
    stays: dict[str, int] = dict.fromkeys(held, -1)
    repeats = []
    for epoch, place in sequence:
        index = int(prompts.order(epoch)[place])
        repeats.append(stays.setdefault(texts[index].lower(), index) != index)
    # asked in any order, as after a restore, and by several coordinators
    for number in [one % len(sequence) for one in places]:
        other = prompts_of(texts, weights, held)
        assert other.is_repeat(Cursor(*sequence[number])) == prompts.is_repeat(Cursor(*sequence[number]))
        assert prompts.is_repeat(Cursor(*sequence[number])) == repeats[number]
    assert [prompts.is_repeat(Cursor(*place)) for place in sequence] == repeats


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=10), st.sampled_from([0, 4, 100]))
def test_hashes_are_fresh_once(parts, few):
    seen, met = Seen(), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relaxd.data.duplicates._FEW", few)
        patch.setattr("relaxd.data.duplicates._LAST", 3)
        for part in parts:
            wanted = [number not in met and number not in part[:place] for place, number in enumerate(part)]
            large = np.array(part, np.uint64) + np.uint64(2**64 - 40)  # which no float64 tells apart
            assert seen.fresh(large).tolist() == wanted
            met |= set(part)
            assert len(seen) == len(met)


@pytest.mark.parametrize("file", ["kept", "gone", "short", "of other data", "longer"])
def test_a_resumed_run_gives_the_same_prompts(tmp_path, monkeypatch, caplog, file):
    monkeypatch.setattr(duplicates, "_WRITTEN", 8)
    texts = "".join(chr(ord("a") + (number * 7) % 120) for number in range(400))
    path = tmp_path / COMPARED

    def opened() -> Prompts:
        prompts = prompts_of(texts)
        prompts.keep(tmp_path)
        return prompts

    whole = walk(opened(), 300)
    assert len({text.lower() for _, text in whole[:100]}) == 100
    path.unlink()
    before = opened()
    assert walk(before, 60) == whole[:60]
    assert path.stat().st_size >= 8 * 50
    if file == "gone":
        path.unlink()
    elif file == "short":
        path.write_bytes(path.read_bytes()[: 8 * 20 + 3])
    elif file == "of other data":
        path.write_bytes(bytes(path.stat().st_size))
    elif file == "longer":  # another coordinator got further
        path.unlink()
        walk(opened(), 100)
    reads: list[int] = []
    read = PromptDataset._example
    monkeypatch.setattr(PromptDataset, "_example", lambda self, index: reads.append(index) or read(self, index))
    resumed = opened()
    cursor = before.after(Cursor(*whole[59][0]))
    assert walk(resumed, 240, cursor) == whole[60:]
    assert ("other prompts than the data" in caplog.text) == (file == "of other data")
    del reads[:]
    again = opened()
    assert walk(again, 100, Cursor(1)) == [one for one in whole if one[0] >= (1, 0)][:100]
    assert len(reads) <= duplicates._SAMPLES  # the rest was in the file


def test_prompts_are_read_when_their_turn_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("relaxd.data.dataset.CHECKED", 4)
    monkeypatch.setattr("relaxd.data.prompt_checks.CHECKED", 4)
    model = write_tokenizer(tmp_path / "model")
    rows = [{"prompt": f"P  {number % 50}" if number % 2 else f"p {number % 50}"} for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "set.jsonl").write_text("".join(json.dumps({"prompt": f"p {number}"}) + "\n" for number in range(5)))
    read: list[int] = []
    of_row = Examples.__getitem__
    monkeypatch.setattr(Examples, "__getitem__", lambda self, index: read.append(index) or of_row(self, index))
    values = {"run": {"steps": 2}, "model": {"path": str(model)}, "reward": {"name": "math"}}
    data = {"source": "files", "path": str(tmp_path / "rows.jsonl"), "deduplicate": True, "max_prompt_tokens": 40}
    sets = {"eval": {"sets": [{"name": "set", "path": str(tmp_path / "set.jsonl")}]}}
    loaded = load_data(RunConfig.model_validate(values | sets | {"data": data}))
    assert loaded.train.prompts == 100
    assert len(read) < 20
    del read[:]
    first = walk(loaded.train, 3)
    assert len(read) == len(set(read)) < 10  # those that are given or left out
    texts = [" ".join(text.lower().split()) for _, text in first + walk(loaded.train, 43, Cursor(*first[-1][0]))[1:]]
    assert sorted(texts[:45]) == sorted(f"p {number}" for number in range(5, 50))
    own = data | {"curriculum": {"sampler": "mine.py:Sampler"}}  # whose order isn't known: all are compared at once
    assert load_data(RunConfig.model_validate(values | sets | {"data": own})).repeated == 55
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "p 1"}) + "\n" for _ in range(9)))
    loaded = load_data(RunConfig.model_validate(values | sets | {"data": data}))
    with pytest.raises(DataError, match=r"data\.path: every prompt is longer than .* or in an evaluation set"):
        walk(loaded.train, 1)


def test_a_curriculum_counts_no_repeats(tmp_path):
    values = {
        "run": {"steps": 2},
        "model": {"path": "x"},
        "reward": {"name": "math"},
        "trainer": {"groups_per_step": 4},
    }
    chooses = {"max_pass_rate": 0.5, "tries": 1, "exhausted": "end", "retest": 0}
    config = RunConfig.model_validate(values | {"data": {"source": "addition", "curriculum": chooses}})
    prompts = prompts_of("abcdefgh" * 3)
    curriculum, cursor = Curriculum(config, prompts), Cursor()
    for _ in range(8):
        visit = curriculum.visits.next(cursor)
        cursor = prompts.after(visit.cursor)
        curriculum.record.observe([{"index": visit.prompt.index, "reward": 1.0}])
    while cursor.epoch == 0:
        cursor = prompts.after(curriculum.visits.next(cursor).cursor)
    assert curriculum.metrics()["prompts_repeated"] == 16
    assert "of 8 prompts have a pass rate" in curriculum.ended
    plain = PromptRecord(24, CurriculumConfig(**chooses))
    plain.leave_out(prompts.repeats)
    plain.restore(np.ones(24, np.uint16), np.ones(24, np.float32), plain.visits)
    assert (plain.solved, plain.repeated, float(plain.chances(np.array(prompts.repeats)).max())) == (8, 16, 1.0)


def test_what_cannot_be_written_is_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(duplicates, "_WRITTEN", 2)
    prompts = prompts_of("abcdefgh")
    prompts.keep(tmp_path / "nowhere")
    with caplog.at_level(logging.WARNING):
        assert len(walk(prompts, 8)) == 8
    assert caplog.text.count("can't be written") == 1


def test_a_row_that_is_wrong_is_told_each_time(tmp_path):
    class Wrong(list[Example]):
        def __getitem__(self, index: Any) -> Any:
            if index == 3 and not Path(tmp_path / "repaired").exists():
                raise ValueError("row 3 is wrong")
            return super().__getitem__(index)

    prompts = Prompts(Wrong(map(Example, "abcdef")), None, shuffle=False, seed=0, seen=seen_of())  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(DataError, match="row 3 is wrong"):
            prompts.is_repeat(Cursor(0, 5))
    (tmp_path / "repaired").touch()
    assert not prompts.is_repeat(Cursor(0, 5))
