"""Groups that people look for, logs, and the tokens of samples."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from relaxd.data.tokenizer import PromptTokenizer
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from relaxd.run_folder import GROUPS, LOGS
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.runs import run_messages
from services.coordinator.runs.run_messages import find_groups, group_tests, read_logs, sample_message, token_texts
from services.coordinator.state.records import RunRecord
from tests.kit.tokenizer import write_tokenizer

LINES = (
    {"group": "0-000000", "index": 4, "step": 1, "tokens": 12.5, "reward": 0.5, "source": "math"},
    {"group": "0-000001", "index": 7, "reason": "stale", "stage": "train", "tokens": 80.0, "retried": True},
    {"group": "0-000001~1", "index": 7, "step": 2, "tokens": 20.0, "reward": 1.0},
    {"group": "0-000002", "index": 9, "reason": "zero_variance", "stage": "advantage", "tokens": 5.0, "reward": 0.0},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / GROUPS).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def found(folder: Path, **asked: str) -> list[str]:
    return [one.group_id for one in find_groups(folder, group_tests(pb.GetGroupsRequest(**asked)), 0).groups]


def test_groups_are_found_newest_first(folder: Path) -> None:
    assert found(folder) == ["0-000002", "0-000001~1", "0-000001", "0-000000"]
    assert found(folder, prompt="7") == ["0-000001~1", "0-000001"]
    assert found(folder, prompt="0-000001") == ["0-000001~1", "0-000001"]
    assert found(folder, where="reason = stale and tokens > 70") == ["0-000001"]
    assert found(folder, prompt="7", where="fate = trained") == ["0-000001~1"]
    newest = find_groups(folder, [], 2)
    assert ([one.group_id for one in newest.groups], newest.complete) == (["0-000002", "0-000001~1"], True)


def test_a_group_has_what_its_line_has(folder: Path) -> None:
    _, again, stale, trained = find_groups(folder, [], 0).groups
    assert (trained.step, trained.row, trained.source, trained.tokens, trained.reward) == (1, 4, "math", 12.5, 0.5)
    assert (trained.reason, trained.retry, trained.retried) == ("", 0, False)
    assert (stale.reason, stale.stage, stale.retried, stale.retry) == ("stale", "train", True, 0)
    assert not stale.HasField("step")
    assert not stale.HasField("reward")
    assert (again.step, again.retry) == (2, 1)


def test_no_call_looks_at_too_many_groups(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_messages, "MAX_READ_GROUPS", 3)
    answer = find_groups(folder, group_tests(pb.GetGroupsRequest(where="step = 1")), 0)
    assert (len(answer.groups), answer.complete) == (0, False)
    assert find_groups(folder, group_tests(pb.GetGroupsRequest(where="step = 2")), 1).complete


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_groups": 1001}, "max_groups: is 1001"),
        ({"max_groups": -1}, "max_groups: is -1"),
        ({"where": "reazon = stale"}, "did you mean reason"),
        ({"run_id": "/"}, "run_id"),
    ],
)
def test_a_wrong_question_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        group_tests(pb.GetGroupsRequest(**asked))


def test_tokens_of_a_sample_have_texts_and_all_their_numbers(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model")
    record = RunRecord(run_id="r", folder="/", config_json=json.dumps({"model": {"path": str(model)}}))
    texts = token_texts(record)
    ids = PromptTokenizer(model).encode_text("aéb")
    assert texts(ids) == ["a", "", "é", "b"]  # a token is a byte
    tokens = {"ids": ids, "trained": [1], "advantages": [0.5], "versions": [3, 3, 4, 4], "engine_logprobs": [-0.1] * 4}
    sample = {"group_id": "0-0", "length": 4, "tokens": tokens, "reward_parts": {"style": 0.25}, "sample": 2}
    message = sample_message(sample, texts)
    assert list(message.tokens.texts) == ["a", "", "é", "b"]
    assert (list(message.tokens.trained), list(message.tokens.advantages)) == ([True] * 4, [0.5] * 4)
    assert list(message.tokens.versions) == [3, 3, 4, 4]
    assert (list(message.tokens.trainer_logprobs), dict(message.reward_parts)) == ([], {"style": 0.25})
    assert message.sample == 2
    assert not sample_message(sample).HasField("tokens")
    record = record.model_copy(update={"config_json": json.dumps({"model": {"path": str(tmp_path)}})})
    assert token_texts(record)(ids) == []


def test_logs_of_services_that_stay_up_are_those_of_the_runs_time(tmp_path: Path) -> None:
    stack, begun = tmp_path / "logs", datetime(2026, 1, 1, 12, 0, 10, tzinfo=UTC)
    stack.mkdir()
    seconds = (5, 10, 30, 45, 59)
    (stack / "trainer.log").write_text("".join(f"2026-01-01T12:00:{at:02}.500Z INFO trainer {at}\n" for at in seconds))
    record = RunRecord(run_id="r", config_json="{}", folder=str(tmp_path / "r"), create_time=begun)

    def shown(**more: Any) -> list[str]:
        answer = read_logs(record.model_copy(update=more), str(stack), pb.GetLogsRequest())
        return [line.text.rpartition(" ")[2] for line in answer.lines]

    assert shown() == ["10", "30", "45", "59"]
    assert shown(end_time=begun + timedelta(seconds=26)) == ["10", "30", "45"]  # some seconds for what is logged of it
    with pytest.raises(FailedPrecondition, match="the coordinator has no logs of run r"):
        read_logs(record, "", pb.GetLogsRequest())
    of_run = tmp_path / "r" / LOGS
    of_run.mkdir(parents=True)
    (of_run / "rollout.log").write_text("x" * 5000 + "\n2026-99-01T12:00:00.000Z INFO no such month\n")
    long, odd = read_logs(record, str(stack), pb.GetLogsRequest()).lines
    assert (long.service, len(long.text), long.HasField("log_time")) == ("rollout", 4000, False)
    assert (odd.is_problem, odd.HasField("log_time")) == (False, False)
