"""The account of every prompt's fate: from the board, through the run's folder, to `relaxd ledger`."""

import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from relaxd.board import Board, DropReason, NewGroup, stages_for
from relaxd.board.group_contents import facts_of
from relaxd.cli.main import app
from relaxd.config.data import CurriculumConfig
from relaxd.data.curriculum.prompt_record import GrowingRecord, PromptRecord
from relaxd.report import group_outcomes
from relaxd.report.group_outcomes import ConditionError, GroupSet, condition, of_prompt, read_fates, summarise_fates
from relaxd.run_folder import closed_groups
from services.coordinator.runs.run_files import RunFiles
from tests.integration.scoring.processes import run_config
from tests.kit.run_folders import write_run
from tests.kit.waiting import PATIENCE


def rollout(*lengths: int) -> dict:
    tokens = sum(lengths)
    return {
        "tokens": np.zeros(tokens, dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
        "loss_mask": np.ones(tokens, dtype=np.uint8),
        "rollout_logprobs": np.zeros(tokens, dtype=np.float32),
        "versions": np.zeros(tokens, dtype=np.int64),
        "finish": ["stop", "length"],
        "text": ["a", "b"],
        "sample_of_sequence": np.arange(2, dtype=np.int32),
        "shares_prompt": np.ones(2, dtype=np.uint8),
        "spans_weight_update": np.zeros(2, dtype=np.uint8),
    }


@pytest.fixture
def board(redis_url: str):
    config = run_config()
    board = Board(redis_url, "run", stages_for(config), config.board)
    board.create(term=1, groups_per_step=4, steps=9)
    board.set_gate(term=1, oldest_version=0, open=True)
    yield board
    board.close()


def publish(board: Board, *ids: str, **fields) -> None:
    columns = {"prompt_tokens": np.arange(3, dtype=np.int32), "prompt": {"text": "?", "answer": "2"}}
    groups = [NewGroup(id, columns, facts={"index": n, "source": "sums"}, **fields) for n, id in enumerate(ids)]
    board.publish(term=1, groups=groups)


def test_a_fate_has_what_each_stage_knew_and_is_told_once(board, tmp_path):
    publish(board, "0-1", "0-2", "0-3")
    taken = board.take("rollout", "r", count=3, block_seconds=5.0)
    board.commit([(delivery, rollout(3, 5)) for delivery in taken[:2]])
    scored = board.take("reward", "w", count=2, block_seconds=5.0)
    reward = {"reward": np.array([0.0, 1.0]), "reward_parts": {}}
    board.commit([(scored[0], reward)])
    board.drop(scored[1], reason=DropReason.REWARD_FAILED)
    board.drop(taken[2], reason=DropReason.STALE, retry=True)
    publish(board, "0-3~1", retry_of="0-3")
    board.drop_groups(["0-3~1"], term=1, reason=DropReason.RUN_ENDED, counts="")
    term = board.new_trainer_term()
    board.commit_step(term=term, step=1, plan={"groups": ["0-1"]}, metrics={})
    board.counts().check()

    fates = board.fates()
    sums = {"source": "sums"}
    common = {**sums, "tokens": 4.0, "truncated": 0.5}
    dropped = {"attempt": 1, "retried": False}
    assert [fate.record for fate in fates] == [
        {"group": "0-2", "index": 1, "reason": "reward_failed", "stage": "reward", **common, **dropped},
        {
            "group": "0-3",
            "index": 2,
            "source": "sums",
            "reason": "stale",
            "stage": "rollout",
            **dropped,
            "retried": True,
        },
        {"group": "0-3~1", "index": 2, **sums, "reason": "run_ended", "stage": "", **dropped, "attempt": 0},
        {"group": "0-1", "index": 0, "step": 1, "reward": 0.5, "samples": 2, "right": 1, **common},
    ]
    files = RunFiles(tmp_path)
    files.append_groups(fates[:2])
    with (tmp_path / "groups.jsonl").open("a") as file:
        file.write('{"group": "0-')  # the coordinator dies while it writes the third
    files.append_groups(board.fates(fates[1].entry_id))
    board.forget_fates(fates[-1].entry_id, term=1)
    assert board.fates() == []
    assert [line["group"] for line in read_fates(tmp_path)] == ["0-1", "0-3~1", "0-3", "0-2"]


@pytest.mark.parametrize(
    ("rewards", "facts"),
    [
        ([1.0, 1.5, 0.5], {"reward": 1.0, "samples": 3, "right": 2}),
        ([1.0, 1.0], {"reward": 1.0, "samples": 2, "right": 2, "equal_rewards": 1}),
        ([-0.5], {"reward": -0.5, "samples": 1, "right": 0, "equal_rewards": 1}),
    ],
)
def test_facts_tell_how_many_samples_are_right(rewards, facts):
    assert facts_of({"reward": np.array(rewards), "reward_parts": {}}) == facts


def test_facts_count_samples_and_not_their_sequences():
    columns = {"lengths": np.array([3, 4, 5, 6]), "sample_of_sequence": np.array([0, 0, 0, 1])}
    facts = facts_of(columns | {"finish": ["budget", "budget", "budget", "stop"]})
    assert facts == {"tokens": 9.0, "truncated": 0.5}


def test_facts_of_strange_columns_are_left_out():
    assert facts_of({"lengths": "three", "finish": [], "reward": np.array([])}) == {}


LINES = [
    {"group": "0-1", "index": 1, "step": 3, "source": "a", "tokens": 10.0, "reward": 0.5, "truncated": 0.0},
    {"group": "0-2", "index": 2, "reason": "stale", "stage": "train", "attempt": 1, "retried": True, "source": "a"}
    | {"tokens": 2000.0, "reward": 0.1},
    {"group": "0-2~1", "index": 2, "step": 5, "source": "a", "tokens": 1500.0, "reward": 0.2},
    {"group": "1-9", "index": 2, "reason": "bad_prompt", "stage": "rollout", "attempt": 1, "retried": False},
]


def write_lines(folder: Path, lines: list[dict]) -> None:
    (folder / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("reason = stale", ["0-2"]),
        ("reason != stale", ["1-9", "0-2~1", "0-1"]),
        ("fate = trained and tokens > 100", ["0-2~1"]),
        ("tokens>=1500", ["0-2~1", "0-2"]),
        ("retry = 1", ["0-2~1"]),
        ("retried = true", ["0-2"]),
        ("step <= 3", ["0-1"]),
        ('source = "a" and reward < 0.2', ["0-2"]),
        ("tokens = many", []),
    ],
)
def test_conditions(tmp_path, text, groups):
    write_lines(tmp_path, LINES)
    assert [line["group"] for line in read_fates(tmp_path) if condition(text)(line)] == groups


@pytest.mark.parametrize(
    ("text", "reason"),
    [("reson = stale", "did you mean reason?"), ("stale", "write FIELD = VALUE"), ("x = 1", "there are group,")],
)
def test_wrong_conditions(text, reason):
    with pytest.raises(ConditionError, match=reason):
        condition(text)


@pytest.mark.parametrize(
    ("prompt", "groups"), [("2", ["1-9", "0-2~1", "0-2"]), ("0-2", ["0-2~1", "0-2"]), ("0-2~1", ["0-2~1", "0-2"])]
)
def test_a_prompt_is_a_row_or_a_visit(tmp_path, prompt, groups):
    write_lines(tmp_path, LINES)
    assert [line["group"] for line in read_fates(tmp_path) if of_prompt(prompt)(line)] == groups


def test_the_newest_line_of_a_group_counts(tmp_path):
    write_lines(tmp_path, [*LINES, {"group": "0-2", "index": 2, "step": 7}])
    assert {line["group"]: line.get("step") for line in read_fates(tmp_path)}["0-2"] == 7
    summary = summarise_fates(tmp_path)
    assert (summary.all.closed, summary.all.trained, +summary.all.reasons) == (4, 3, {"bad_prompt": 1})
    assert sum(bucket.closed for bucket in summary.by["difficulty"].values()) == 4


def test_the_file_is_read_once_a_page_at_a_time(tmp_path, monkeypatch):
    choices = random.Random(1)
    written = [
        {"group": f"0-{number}", "index": choices.randrange(70), "step": 1, "reward": choices.random()}
        for number in range(209)
    ]
    write_lines(tmp_path, written)
    reads, pages = [], []
    monkeypatch.setattr(group_outcomes, "PAGE", 100)
    monkeypatch.setattr(group_outcomes, "closed_groups", lambda folder: reads.append(folder) or closed_groups(folder))
    curriculum = CurriculumConfig(sampler="hard")
    growing, known = GrowingRecord(curriculum), PromptRecord(70, curriculum)

    def see(lines):
        pages.append(len(lines))
        growing.observe(lines)

    assert summarise_fates(tmp_path, see).all.closed == len(written)
    assert (len(reads), pages) == (1, [100, 100, 9])
    known.observe(written)
    assert (growing.record.histogram, growing.record.tried) == (known.histogram, known.tried)
    np.testing.assert_array_equal(growing.record.pass_rate[:70], known.pass_rate)
    assert (growing.record.solved, growing.record.too_hard) == (known.solved, known.too_hard)


def test_ids_are_told_apart():
    seen = GroupSet()
    ids = ["0-000007", "0-000008", "0-7~1", "1-000007", "0-32775", "11-1", "1-11", "0-", "x", "0-1~", "-1", "0-1~10"]
    assert all(seen.add(id) for id in ids)
    assert not any(seen.add(id) for id in ids)
    assert not seen.add("0-7"), "the same place, written shorter"


def test_ids_of_many_groups_take_little_memory():
    seen = GroupSet()
    assert all(seen.add(f"{number % 3}-{number:06d}") for number in range(100_000))
    assert not any(seen.add(f"{number % 3}-{number:06d}") for number in range(0, 100_000, 97))
    assert not seen._others
    assert sum(map(sys.getsizeof, seen._chunks.values())) < 100_000, "as text they take 9 MB"


def test_the_summary_shows_whom_training_leaves_out(tmp_path):
    write_lines(tmp_path, LINES)
    summary = summarise_fates(tmp_path)
    assert (summary.all.closed, summary.all.trained, summary.retried) == (4, 2, 1)
    lengths = summary.by["length of the answers"]
    assert {label: (one.closed, one.trained) for label, one in lengths.items()} == {
        "8-15 tokens": (1, 1),
        "1024-2047 tokens": (2, 1),
        "no answers yet": (1, 0),
    }
    assert list(summary.by["difficulty"]) == ["mean reward 0 to 0.25", "mean reward 0.5 to 0.75", "not scored"]
    assert summary.by["source"]["no data_source"].reasons == {"bad_prompt": 1}
    of_all, of_trained = summary.means["tokens"]
    assert (of_all.value, of_trained.value) == (pytest.approx(1170), pytest.approx(755))


def test_how_often_answers_were_continued_is_told_counted_and_found(tmp_path, monkeypatch):
    facts = facts_of({**rollout(3, 5), "continued": np.array([0, 2], dtype=np.int32)})
    assert (facts["continued"], "continued" in facts_of(rollout(3, 5))) == (2, False)
    monkeypatch.chdir(tmp_path)
    folder = write_run("one", steps=2, done=2)
    write_lines(folder, [{"group": "0-1", "step": 1, **facts}, {"group": "0-2", "step": 1, "continued": 0}])
    run = CliRunner()
    shown = run.invoke(app, ["ledger", "one"], catch_exceptions=False).output
    assert "1 have answers that were cut off and continued" in " ".join(shown.split())
    shown = run.invoke(app, ["ledger", "one", "--where", "continued > 1"], catch_exceptions=False).output
    assert "continued" in shown
    assert "0-1" in shown
    assert "0-2" not in shown


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_run("one", steps=2, done=2)
    run = CliRunner()
    nothing = run.invoke(app, ["ledger", "one"])
    assert "has no groups.jsonl" in str(nothing.exception)
    write_lines(folder, LINES)
    shown = run.invoke(app, ["ledger", "one"], catch_exceptions=False).output
    assert "4 groups are closed: 2 trained, 2 dropped (1 bad_prompt, 1 stale); 1 were retries" in shown
    rates = shown[shown.index("prompts tried") :].splitlines()
    assert [" ".join(line.split()) for line in rates[2:4]] == ["0.1 to 0.2 1 50.0%", "0.5 to 0.6 1 50.0%"]
    shown = run.invoke(app, ["ledger", "one", "--prompt", "0-2"], catch_exceptions=False).output
    assert "trained in step 5 (try 2)" in shown
    assert "dropped: stale, to be tried again" in shown
    shown = run.invoke(app, ["ledger", "one", "--where", "reason = stale", "--json"], catch_exceptions=False).stdout
    assert json.loads(shown.splitlines()[-1])["group"] == "0-2"


@pytest.mark.night
def test_twenty_thousand_steps_are_read_quickly(tmp_path):
    line = LINES[0] | {"prompt_tokens": 100}
    with (tmp_path / "groups.jsonl").open("w") as file:
        for number in range(640_000):
            own = {"group": f"0-{number:06d}", "step": number // 32, "entry": f"{1700000000000 + number}-0"}
            file.write(json.dumps(line | own) + "\n")
    began = time.process_time()
    assert summarise_fates(tmp_path).all.trained == 640_000
    assert time.process_time() - began < 20 * PATIENCE
