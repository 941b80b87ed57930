"""Curricula: what is known of prompts, which are visited, and that a restart counts nothing twice."""

import io
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from relaxd.board import stages_for
from relaxd.cli.reading.status_command import print_run
from relaxd.config.data import CurriculumConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.data.curriculum import run_curriculum
from relaxd.data.curriculum.own_filter import COLUMNS, FilterError, GroupFilter, samples_of
from relaxd.data.curriculum.prompt_record import Pool, PromptRecord
from relaxd.data.curriculum.run_curriculum import Curriculum, Visited, Visits
from relaxd.data.dataset import Cursor, Prompt, PromptDataset
from relaxd.data.examples import Example
from relaxd.models import DataError
from relaxd.run_folder import GROUPS
from relaxd.v1 import coordinator_pb2 as pb
from tests.kit.cases import each
from tests.kit.processes import run_python


class Prompts(PromptDataset):
    """Prompts without text."""

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__([Example(str(i)) for i in range(count)], None, shuffle=True, seed=seed)  # type: ignore[arg-type]

    def prompt(self, index: int) -> Prompt:
        return Prompt(np.zeros(1, np.int32), "", "", {}, index)


def record_of(prompts: int, needed: int = 1, **config: Any) -> PromptRecord:
    return PromptRecord(prompts, CurriculumConfig(**config), needed=needed)


def line(index: int, reward: float, visit: str = "") -> dict[str, Any]:
    return {"index": index, "reward": reward, **({"visit": visit} if visit else {})}


START = Cursor()


def walk(visits: Visits, prompts: PromptDataset, count: int, cursor: Cursor = START) -> tuple[list[Visited], Cursor]:
    found = []
    for _ in range(count):
        found.append(visits.next(cursor))
        cursor = Cursor.from_json(prompts.after(found[-1].cursor).to_json())
    return found, cursor


# --- the record ---------------------------------------------------------------------------------------------------

SETTINGS = {"min_pass_rate": 0.2, "max_pass_rate": 0.8, "tries": 2, "memory": 3, "replay": 0.1, "sampler": "learnable"}


def expected(lines: list[dict[str, Any]], prompts: int, config: CurriculumConfig) -> list[tuple[int, float, str]]:
    """Tries, pass rate and state of each prompt, in plain float64."""
    found = []
    for index in range(prompts):
        rewards = [one["reward"] for one in lines if one["index"] == index and one["reward"] is not None]
        rate = 0.0
        for number, reward in enumerate(rewards, 1):
            passed = (min(config.max_reward, max(config.min_reward, reward)) - config.min_reward) / (
                config.max_reward - config.min_reward
            )
            rate += (passed - rate) / min(number, config.memory)
        known = len(rewards) >= config.tries
        state = "solved" if known and rate > config.max_pass_rate else ""
        found.append((len(rewards), rate, state or ("too hard" if known and rate < config.min_pass_rate else "")))
    return found


@settings(deadline=None)
@given(
    seen=st.lists(st.tuples(st.integers(0, 5), st.integers(-8, 8)), max_size=60),
    cut=st.integers(0, 60),
)
def test_the_record_is_the_formula_also_after_a_restart(seen: list[tuple[int, int]], cut: int) -> None:
    config = CurriculumConfig(**SETTINGS, min_reward=-1)
    lines = [line(index, eighths / 8) for index, eighths in seen]
    first = PromptRecord(6, config)
    first.observe(lines[:cut])
    record = PromptRecord(6, config)
    record.restore(first.tries, first.pass_rate, first.visits)
    record.observe(lines[cut:])
    wanted = expected(lines, 6, config)
    assert record.tries.tolist() == [tries for tries, _, _ in wanted]
    np.testing.assert_allclose(record.pass_rate, [rate for _, rate, _ in wanted], atol=1e-6)
    near = [abs(rate - limit) < 1e-6 for _, rate, _ in wanted for limit in (0.2, 0.8)]
    if not any(near):
        assert [record.solved, record.too_hard] == [
            sum(s == name for *_, s in wanted) for name in ("solved", "too hard")
        ]
        assert record.left_out.tolist() == [bool(state) for *_, state in wanted]
    assert record.tried == sum(tries > 0 for tries, _, _ in wanted) == sum(record.histogram)
    again = PromptRecord(6, config)
    again.restore(record.tries, record.pass_rate, record.visits)
    assert again.histogram == record.histogram
    np.testing.assert_array_equal(again.chances(np.arange(6)), record.chances(np.arange(6)))
    pools = [{one._hard.at(draw / 50) for draw in range(50)} if len(one._hard) else set() for one in (record, again)]
    assert pools[0] == pools[1]


def test_groups_without_a_reward_and_of_other_data_do_not_count() -> None:
    record = record_of(2)
    assert record.observe([{"index": 0}, {"reward": 1.0}, line(2, 1.0), line(-1, 1.0), line(1, 0.5)]) == 2
    assert record.tries.tolist() == [0, 1]


def test_chances_follow_the_pass_rate() -> None:
    rates = np.array([0, 0.25, 0.5, 1], np.float32)
    for sampler, wanted in (
        ("uniform", [1, 1, 1, 1]),
        ("hard", [1, 0.75, 0.5, 0.1]),
        ("learnable", [0.1, 0.75, 1, 0.1]),
    ):
        record = record_of(5, sampler=sampler)
        record.restore(np.array([1, 1, 1, 1, 0], np.uint16), np.append(rates, 0).astype(np.float32), record.visits)
        np.testing.assert_allclose(record.chances(np.arange(5)), [*wanted, 1], atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=50))
def test_a_pool_is_a_set(changes: list[tuple[int, bool]]) -> None:
    pool, members = Pool(8), set()
    for number, inside in changes:
        pool.put(number, inside)
        (members.add if inside else members.discard)(number)
        assert {pool.at((place + 0.5) / len(members)) for place in range(len(members))} == members
    assert len(pool) == len(members)


# --- visits -------------------------------------------------------------------------------------------------------


def test_without_a_curriculum_visits_are_the_epochs() -> None:
    prompts = Prompts(7)
    found, _ = walk(Visits(prompts, record_of(7), 0), prompts, 14)
    assert [one.prompt.index for one in found] == [*prompts.order(0).tolist(), *prompts.order(1).tolist()]


def test_solved_and_too_hard_prompts_are_left_out_but_for_retests() -> None:
    prompts, record = Prompts(1000), record_of(1000, min_pass_rate=0.1, max_pass_rate=0.9, retest=0.1)
    record.observe([line(index, float(index % 2)) for index in range(400) for _ in range(2)])
    assert (record.solved, record.too_hard) == (200, 200)
    found, cursor = walk(Visits(prompts, record, 0), prompts, 6400)
    of_left_out = [one for one in found if one.prompt.index < 400]
    assert {one.why for one in of_left_out} == {"retest"}
    assert {one.why for one in found if one.prompt.index >= 400} == {""}
    assert len(of_left_out) == pytest.approx(6400 / 16, rel=0.2)  # 40 of 640 in an epoch
    assert cursor.epoch in (9, 10)


def test_the_share_of_visits_follows_the_weights() -> None:
    prompts, record = Prompts(200), record_of(200, sampler="hard", tries=9)
    record.observe([line(index, 0.8) for index in range(100)])
    found, _ = walk(Visits(prompts, record, 3), prompts, 6000)
    assert sum(one.prompt.index < 100 for one in found) / 6000 == pytest.approx(0.2 / 1.2, rel=0.1)


def test_replays_go_to_hard_prompts() -> None:
    prompts, record = Prompts(5000), record_of(5000, replay=0.25, replay_below=0.5)
    assert {one.why for one in walk(Visits(prompts, record, 0), prompts, 100)[0]} == {""}  # nothing is known yet
    record.observe([line(index, index / 10) for index in range(11)])
    found, _ = walk(Visits(prompts, record, 0), prompts, 4000)
    replays = Counter(one.prompt.index for one in found if one.why == "replay")
    assert set(replays) == set(range(6))
    assert replays.total() == pytest.approx(1000, rel=0.1)
    assert min(replays.values()) > 100


def test_a_restarted_coordinator_goes_on_with_the_same_visits() -> None:
    def visits() -> tuple[Visits, Prompts]:
        prompts, record = Prompts(50, seed=4), record_of(50, **SETTINGS)
        record.observe([line(index, index / 50) for index in range(50) for _ in range(2)])
        return Visits(prompts, record, 4), prompts

    whole, _ = walk(*visits(), 300)
    first, cursor = walk(*visits(), 130)
    rest, _ = walk(*visits(), 170, cursor)
    assert [(one.cursor, one.prompt.index, one.why) for one in (*first, *rest)] == [
        (one.cursor, one.prompt.index, one.why) for one in whole
    ]


def test_after_a_restore_places_that_are_done_are_passed_over_and_open_ones_come_first() -> None:
    prompts, record = Prompts(40), record_of(40, max_pass_rate=0.5, retest=0)
    left_out = prompts.order(0)[10:20]
    record.observe([line(int(index), 1.0) for index in left_out for _ in range(2)])
    done = [(0, place) for place in (*range(5, 12), 25, 39)]
    cursor = prompts.resumed(Cursor(0, 5), [(0, 2)], done)
    found, cursor = walk(Visits(prompts, record, 0), prompts, 20, cursor)
    assert [one.cursor.place for one in found] == [
        (0, 2), *((0, place) for place in range(20, 39) if place != 25), (1, found[-1].cursor.position)
    ]  # fmt: skip


@pytest.mark.parametrize("retest", [0.0, 0.5])
def test_when_too_few_prompts_are_left_all_are_given_until_there_are_enough(retest: float) -> None:
    prompts, record = Prompts(8), record_of(8, needed=4, max_pass_rate=0.9, retest=retest)
    record.observe([line(index, 1.0) for index in range(5) for _ in range(2)])
    assert record.exhausted
    found, _ = walk(Visits(prompts, record, 0), prompts, 8)
    assert sorted(one.prompt.index for one in found) == list(range(8))
    assert {one.why for one in found} == {""}
    record.observe([line(3, 0.0)])
    assert not record.exhausted
    if not retest:
        assert {one.prompt.index for one in walk(Visits(prompts, record, 0), prompts, 40)[0]} == {3, 5, 6, 7}


def test_visits_never_end_however_unlikely_they_are() -> None:
    prompts = Prompts(200)
    record = record_of(200, sampler="hard", min_weight=1e-9, max_pass_rate=0.99, retest=0)
    record.observe([line(index, 1.0) for index in range(199) for _ in range(2)])
    record.observe([line(199, 1.0)])  # the only one that isn't left out
    found, cursor = walk(Visits(prompts, record, 0), prompts, 3)
    assert {one.prompt.index for one in found} == {199}
    assert cursor.epoch <= 6


@pytest.mark.night
def test_a_million_prompts_that_are_nearly_all_solved_cost_little() -> None:
    program = """
import time
import numpy as np
from relaxd.config.data import CurriculumConfig
from relaxd.data.curriculum.prompt_record import PromptRecord
from relaxd.data.curriculum.run_curriculum import Visits
from relaxd.data.dataset import Cursor, Prompt, PromptDataset
class Prompts(PromptDataset):
    def prompt(self, index):
        return Prompt(np.zeros(1, np.int32), "", "", {}, index)
prompts = Prompts(range(1_000_000), None, shuffle=True, seed=0)
record = PromptRecord(1_000_000, CurriculumConfig(max_pass_rate=0.9, retest=0.0, replay=0.1), needed=512)
rates = np.ones(1_000_000, np.float32)
rates[::1500] = 0.5
record.restore(np.full(1_000_000, 3, np.uint16), rates, record.visits)
visits, cursor, begun = Visits(prompts, record, 0), Cursor(), time.process_time()
for _ in range(2 * 512):
    visit = visits.next(cursor)
    cursor = prompts.after(visit.cursor)
    record.observe([{"index": visit.prompt.index, "reward": 0.5, "visit": visit.why}])
print((time.process_time() - begun) / 2)
"""
    done = run_python("-c", program, seconds=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0  # seconds a step of 512 groups; 0.1 on a quiet core


# --- a run's folder -------------------------------------------------------------------------------------------------


def write(folder: Path, lines: list[dict[str, Any]]) -> int:
    with (folder / GROUPS).open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)
        return file.tell()


def test_the_record_follows_from_the_folder_with_and_without_a_snapshot(tmp_path: Path) -> None:
    lines = [
        line(index % 9, index % 3 / 2, "replay" if index % 5 == 0 else "") | {"entry": f"{index // 4 + 7}-{index % 4}"}
        for index in range(40)
    ]
    whole = record_of(9, **SETTINGS)
    whole.observe(lines)
    end = write(tmp_path, [*lines[:25], *lines[22:25]])  # by two coordinators, one of which was replaced
    record = record_of(9, **SETTINGS)
    assert run_curriculum.load(record, tmp_path) == lines[24]["entry"]
    run_curriculum.save(record, tmp_path, end, lines[24]["entry"])
    write(tmp_path, lines[23:])
    text = (tmp_path / GROUPS).read_text()
    (tmp_path / GROUPS).write_text(
        "{" * lines[0].__len__() + text[lines[0].__len__() :]
    )  # the snapshot has these lines
    for _ in range(2):
        found = record_of(9, **SETTINGS)
        assert run_curriculum.load(found, tmp_path) == lines[-1]["entry"]
        np.testing.assert_array_equal(found.tries, whole.tries)
        np.testing.assert_array_equal(found.pass_rate, whole.pass_rate)
        assert found.visits == whole.visits
        (tmp_path / GROUPS).write_text(text)
        (tmp_path / "curriculum.bin").write_bytes(b'{"prompts": 9, "end": 10}\n123')  # damaged: all is read again


def test_a_snapshot_of_other_data_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = write(tmp_path, [line(8, 1.0)])
    record = record_of(9)
    run_curriculum.load(record, tmp_path)
    run_curriculum.save(record, tmp_path, end, "")
    smaller = record_of(5)
    run_curriculum.load(smaller, tmp_path)
    assert smaller.tried == 0
    assert "1 groups of prompts that the data doesn't have" in caplog.text


def test_reading_and_learning_at_the_same_time() -> None:
    prompts, record = Prompts(300), record_of(300, **SETTINGS)
    visits, stop, errors = Visits(prompts, record, 0), threading.Event(), []

    def read() -> None:
        cursor = Cursor()
        while not stop.is_set():
            try:
                cursor = prompts.after(visits.next(cursor).cursor)
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=read)
    thread.start()
    rng = np.random.default_rng(0)
    for _ in range(200):
        record.observe([line(int(index), float(rng.random())) for index in rng.integers(0, 300, 20)])
    stop.set()
    thread.join()
    assert not errors
    assert sum(record.histogram) == record.tried


# --- samplers of one's own ------------------------------------------------------------------------------------------

OWN = """
class Hardest:
    def __init__(self, prompts, seed, offset=0):
        self.offset = offset

    def choose(self, visit, record):
        {body}
"""


def own(folder: Path, body: str = "return int(record.pass_rate.argmin()) + self.offset", **config: Any) -> Visits:
    (folder / "mine.py").write_text(OWN.replace("{body}", body))
    return Visits(Prompts(20), record_of(20, sampler=f"{folder}/mine.py:Hardest", **config), 0)


def test_a_sampler_of_ones_own_chooses_within_the_limits(tmp_path: Path) -> None:
    visits, prompts = own(tmp_path, settings={"offset": 3}, max_pass_rate=0.9, retest=0), Prompts(20)
    record = visits._record
    record.observe([line(index, 0.5) for index in range(20) if index != 4])
    assert [one.prompt.index for one in walk(visits, prompts, 2)[0]] == [7, 7]
    (tmp_path / "mine.py").write_text(OWN.replace("{body}", "return visit % 20"))
    record.observe([line(index, 1.0) for index in range(10) for _ in range(30)])
    again = Visits(prompts, record, 0)
    assert [one.prompt.index for one in walk(again, prompts, 20)[0]] == [*range(10, 20)] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 20", "failed at visit 0: ValueError: it chose 20: it must be an index of the 20 prompts"),
        ("return None", "failed at visit 0: ValueError: it chose None"),
        ("return record.nothing", r"failed at visit 0: AttributeError: .* \(mine.py:7, in choose\)"),
    ],
)
def test_a_sampler_that_fails_is_named_and_read_again_once_repaired(tmp_path: Path, body: str, message: str) -> None:
    visits = own(tmp_path, body)
    with pytest.raises(DataError, match=rf"data\.curriculum\.sampler = \".*mine\.py:Hardest\" {message}"):
        visits.next(Cursor())
    (tmp_path / "mine.py").write_text(OWN.replace("{body}", "return 5"))
    assert visits.next(Cursor()).prompt.index == 5


def test_a_sampler_that_chooses_nothing_else_is_obeyed_in_the_end(tmp_path: Path) -> None:
    visits = own(tmp_path, "return 2", max_pass_rate=0.9, retest=0)
    visits._record.observe([line(2, 1.0), line(2, 1.0)])
    assert visits.next(Cursor()).why == "retest"


# --- filters of groups ------------------------------------------------------------------------------------------------

GROUP: dict[str, Any] = {
    "prompt": {"text": "2 + 2?", "answer": "4", "metadata": {"level": 3}},
    "text": ["4", "first", "5"],
    "finish": ["stop", "stop", "length"],
    "sample_of_sequence": np.array([0, 1, 1], np.int32),
    "lengths": np.array([2, 7, 4], np.int32),
    "reward": np.array([1.0, 0.25]),
    "reward_parts": {"format": [0.5, 0.75]},
}


def test_a_filter_gets_the_scored_samples() -> None:
    first, second = samples_of(GROUP)
    assert (first.prompt, first.answer, first.metadata, first.response) == ("2 + 2?", "4", {"level": 3}, "4")
    assert (first.reward, first.parts, first.tokens, first.truncated) == (1.0, {"format": 0.5}, 2, False)
    assert (second.response, second.reward, second.parts, second.tokens, second.truncated) == (
        "5", 0.25, {"format": 0.75}, 11, True
    )  # fmt: skip


def test_a_filter_gets_only_the_parts_that_a_sample_has() -> None:
    first, second = samples_of(GROUP | {"reward_parts": {"format": [0.5, None], "length": [None, 3.0]}})
    assert (first.parts, second.parts) == ({"format": 0.5}, {"length": 3.0})


def test_a_filter_that_fails_is_named_and_read_again_once_repaired(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def keep(samples):\n    return samples[2].reward\n")
    group_filter = GroupFilter(f"{file}:keep")
    with pytest.raises(FilterError, match=r'the filter ".*" failed: IndexError: .* \(mine.py:2, in keep\)'):
        group_filter.keeps(GROUP)
    file.write_text("def keep(samples):\n    return samples[1].reward\n")
    with pytest.raises(FilterError, match=r"failed: TypeError: it returned 0\.25: it must be True"):
        group_filter.keeps(GROUP)
    file.write_text("def keep(samples):\n    return samples[1].reward > 0.5\n")
    assert not group_filter.keeps(GROUP)
    with pytest.raises(FilterError, match=r"can't be used: file .* has no kep; did you mean keep\?"):
        GroupFilter(f"{file}:kep")


def test_a_run_with_a_filter_gives_its_stage_the_columns(tmp_path: Path) -> None:
    text = 'run.steps = 1\nmodel.path = "m"\nreward.name = "math"\ndata.source = "addition"\n'
    needs = {stage.name: stage.needs for stage in stages_for(load(text + 'data.curriculum.filter = "a:b"'))}
    assert set(COLUMNS) <= set(needs["advantage"])
    assert "text" not in {stage.name: stage.needs for stage in stages_for(load(text))}["advantage"]


# --- what people see ------------------------------------------------------------------------------------------------


def test_status_shows_the_curriculum_of_a_run() -> None:
    text = (
        'run.steps = 1\nmodel.path = "m"\nreward.name = "math"\ndata.source = "addition"\ntrainer.groups_per_step = 4\n'
    )
    curriculum = Curriculum(load(text + "data.curriculum.max_pass_rate = 0.9"), Prompts(5))
    curriculum.record.observe([line(0, 1.0), line(0, 1.0, "retest"), line(1, 0.5)])
    console = Console(file=io.StringIO(), width=300)
    print_run(pb.Run(run_id="r", state=pb.RUN_STATE_RUNNING, metrics=curriculum.metrics()), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown == (
        "curriculum of r: prompts: 2 tried, 1 solved, 0 too hard; 0 groups replayed, 1 groups retested; "
        "by pass rate, 0 to 1: 0 0 0 0 0 1 0 0 0 1\n"
    )
    assert not curriculum.record.exhausted
    curriculum.record.observe([line(1, 1.0), line(1, 1.0), line(1, 1.0), line(1, 1.0), line(1, 1.0), line(1, 1.0)] * 3)
    first, _, last = curriculum.describe()
    assert first.startswith("curriculum: 2 of 5 prompts tried; 2 solved and 0 too hard ones are left out; 0 replays")
    assert last.startswith("the curriculum is exhausted: 3 of 5 prompts have a pass rate from 0.0 to 0.9 or are yet to")
    assert "fewer than a step's 4 groups (2 are solved, 0 too hard); all prompts are given again" in last
    assert Curriculum(load(text), Prompts(5)).metrics() == {}


# --- settings -------------------------------------------------------------------------------------------------------


@each(
    ("text", "message"),
    [
        ('sampler = "learnabel"', "data.curriculum.sampler = \"learnabel\": did you mean 'learnable'?"),
        ("min_pass_rate = 0.9\nmax_pass_rate = 0.5", "min_pass_rate is 0.9: it must be less than max_pass_rate = 0.5"),
        ("min_reward = 1", "min_reward is 1.0: it must be less than max_reward = 1.0"),
        ('sampler = "a:B"\nreplay = 0.1', 'a sampler of your own ("a:B") replays prompts itself'),
        ("settings = { a = 1 }", 'settings are for a sampler of your own, but sampler is "uniform"'),
        ('filter = "keep"', 'filter = "keep": name it as "package.module:function" or "file.py:function"'),
        ("retest = 2", "must be at most 1"),
    ],
)
def test_wrong_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            'run.steps = 1\nmodel.path = "m"\nreward.name = "math"\ndata.source = "addition"\n'
            f"[data.curriculum]\n{text}\n"
        )
    assert message in str(caught.value)
