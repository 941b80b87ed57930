"""Large columns: written in slices outside of scripts, kept while a group points to them, freed when none does."""

import json
import threading

import numpy as np
import pytest

from relaxd.board import BoardError, NewGroup, StageWorker, payload_transfer
from relaxd.board.attempts import SLICE_BYTES, Attempt
from relaxd.board.column_encoding import encode_columns
from relaxd.board.command_packing import CommandPacker
from relaxd.board.scripts import run_script
from relaxd.board.types import TooLate
from relaxd.config import LARGE_COLUMN_BYTES
from tests.kit.boards import LARGE, advance, audit, commands_of, group, make_board, make_overdue, output, take
from tests.kit.waiting import wait_until

TEXTS = ("", "x" * LARGE_COLUMN_BYTES, "ä" * (SLICE_BYTES // 2 + 7))


@pytest.fixture
def many_round_trips(monkeypatch):
    """Nothing is few enough bytes for the script to be sent with them."""
    monkeypatch.setattr(payload_transfer, "BYTES_TOGETHER", 1)


def payload_keys(board, pattern="*"):
    return sorted(key.decode() for key in board._connection.client.keys(f"{board.prefix}columns:{pattern}"))


@pytest.mark.parametrize(
    "tokens", [LARGE_COLUMN_BYTES // 4 - 1, LARGE_COLUMN_BYTES // 4, SLICE_BYTES // 4, 3 * SLICE_BYTES // 4 + 5]
)
@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_columns_of_any_size_come_back(redis_url, tokens, text):
    board = make_board(redis_url)
    columns = {"prompt_tokens": np.arange(tokens, dtype=np.int32), "prompt": {"text": text}}
    board.publish(term=1, groups=[NewGroup("a", columns), group("b")])
    audit(board)
    (loaded, _) = board.load(take(board, "rollout"), ["prompt_tokens", "prompt"])
    np.testing.assert_array_equal(loaded["prompt_tokens"], columns["prompt_tokens"])
    assert loaded["prompt"] == {"text": text}
    assert all(board._connection.client.strlen(key) <= SLICE_BYTES for key in payload_keys(board, "*:*:*:*"))


def test_slices_are_the_payload_cut_up():
    rng = np.random.default_rng(0)
    columns = {
        "a": rng.random((3, SLICE_BYTES // 8)),
        "b": rng.integers(0, 9, SLICE_BYTES, np.uint8),
        "c": "y" * LARGE_COLUMN_BYTES,
    }
    attempt = Attempt("p:", "name", columns | {"small": 1})
    slices = {one.key: b"".join(one.data.parts) for one in attempt.slices()}
    assert [one.data.nbytes for one in attempt.slices()] == list(map(len, slices.values()))
    assert attempt.pointer.startswith(f"name:{attempt.shared.nbytes},a:")
    for column, value in columns.items():
        whole = b"".join(data for key, data in slices.items() if f":{column}:" in key)
        assert whole == encode_columns({column: value})
    assert sum(map(len, slices.values())) == attempt.large_bytes
    assert b"".join(attempt.shared.parts) == encode_columns({"small": 1})


def test_a_large_columns_name_must_not_break_its_pointer():
    with pytest.raises(BoardError, match=r"column 'a:b': the name of a large column must not have"):
        Attempt("p:", "name", {"a:b": np.zeros(LARGE_COLUMN_BYTES)})


def test_only_what_is_read_is_fetched(redis_url):
    board = make_board(redis_url)
    columns = {"prompt_tokens": np.zeros(4 * SLICE_BYTES, np.uint8), "prompt": "short"}
    board.publish(term=1, groups=[NewGroup("a", columns)])
    client, deliveries = board._connection.client, take(board, "rollout")
    before = client.info("stats")["total_net_output_bytes"]
    assert board.load(deliveries, ["prompt"]) == [{"prompt": "short"}]
    between = client.info("stats")["total_net_output_bytes"]
    assert board.load(deliveries, ["prompt_tokens"])[0]["prompt_tokens"].size == 4 * SLICE_BYTES
    after = client.info("stats")["total_net_output_bytes"]
    assert between - before < 20_000 < 4 * SLICE_BYTES < after - between


def test_scripts_get_no_large_columns(redis_url, monkeypatch):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    delivery, other = take(board, "rollout")
    sent = commands_of(board, monkeypatch)
    assert board.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]
    assert board.commit([(other, output("rollout", tokens=SLICE_BYTES))]) == [True]
    scripts = [command for command in sent if command[0] == "EVALSHA"]
    assert len(scripts) == 4
    assert sum(len(b"".join(CommandPacker().pack(*command))) for command in scripts) < 4000
    audit(board)


@pytest.mark.usefixtures("many_round_trips")
def test_bytes_that_nobody_wants_are_not_written(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    first, second = take(board, "rollout")
    large = output("rollout", tokens=LARGE)
    assert board.commit([(first, large)]) == [True]
    board.drop_groups(["b"], term=1, reason="by_hand")
    keys = payload_keys(board)
    assert board.commit([(first, large), (second, large)]) == [False, False]
    assert payload_keys(board) == keys
    audit(board)


def test_few_bytes_that_nobody_wants_expire(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    first, second = take(board, "rollout")
    large = output("rollout", tokens=LARGE)
    assert board.commit([(first, large)]) == [True]
    board.drop_groups(["b"], term=1, reason="by_hand")
    keys = payload_keys(board)
    assert board.commit([(first, large), (second, large)]) == [False, False]
    assert set(payload_keys(board)) > set(keys)
    for key in set(payload_keys(board)) - set(keys):
        assert 0 < board._connection.client.ttl(key) <= 61
    audit(board)


def publish_large(board, _):
    board.publish(term=1, groups=[NewGroup(name, {"prompt_tokens": np.arange(LARGE), "prompt": "?"}) for name in "bc"])


def commit_large(board, delivery):
    assert board.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]


def save_large(board, delivery):
    assert board.save(delivery, output("rollout", tokens=LARGE), after="")


@pytest.mark.parametrize(
    ("work", "reached"),
    [
        *((publish_large, reached) for reached in range(9)),
        *((work, reached) for work in (commit_large, save_large) for reached in range(5)),
    ],
)
def test_a_round_trip_may_break_off_anywhere_and_come_again(redis_url, monkeypatch, work, reached):
    """Redis gets some of the commands, then all of them (their replies are lost), and then all of them again."""
    board = make_board(redis_url)
    client, write, sent = board._connection.client, board._connection.write, []
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")

    def broken_off(commands):
        sent.extend(commands)
        with client.client() as one:
            for command in sent[:reached]:
                one.execute_command(*command)
            one.connection.disconnect()
        audit(board)
        reply = write(commands)
        audit(board)
        write(commands)
        return reply

    with monkeypatch.context() as patched:
        patched.setattr(board._connection, "write", lambda commands: (patched.undo(), broken_off(commands))[1])
        work(board, delivery)
    assert reached <= len(sent)
    transaction = {"MULTI", "EVAL", "MSET", "EXEC"} if work is publish_large else set()
    assert {command[0] for command in sent} == {"EVALSHA", "SET"} | transaction
    make_overdue(board)
    board.sweep(term=1)
    audit(board)
    assert not client.exists(*(f"{board.prefix}{name}" for name in ("pending", "garbage", "unwanted")))
    if work is publish_large:
        loaded = board.load(take(board, "rollout"), ["prompt", "prompt_tokens"])
        assert [found["prompt_tokens"].size for found in loaded] == [LARGE, LARGE]
    elif work is commit_large:
        assert board.load([delivery], ["tokens"])[0]["tokens"].size == LARGE
    else:
        assert [part["tokens"].size for part in board.saved(delivery).parts] == [LARGE]


@pytest.mark.usefixtures("many_round_trips")
def test_a_writer_that_is_overtaken_leaves_nothing(redis_url, monkeypatch):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")
    write = payload_transfer.write
    results = []

    def overtaken(*arguments):
        yield from write(*arguments)
        monkeypatch.setattr(payload_transfer, "write", write)
        results.append(board.commit([(delivery, output("rollout", tokens=LARGE))]))

    monkeypatch.setattr(payload_transfer, "write", overtaken)
    assert board.commit([(delivery, output("rollout", tokens=LARGE))]) == [False]
    assert results == [[True]]
    audit(board)
    state = board._connection.client.hgetall(f"{board.prefix}state")
    assert int(state[b"garbage_bytes"]) > 12 * LARGE
    before = len(payload_keys(board))
    assert board.sweep(term=1) == 1
    assert len(payload_keys(board)) == before - 2
    assert board.load([delivery], ["tokens"])[0]["tokens"].size == LARGE
    audit(board)


@pytest.mark.usefixtures("many_round_trips")
def test_a_commit_that_comes_too_late_writes_again(redis_url, monkeypatch):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")
    write = payload_transfer.write
    times = []

    def slow(*arguments):
        yield from write(*arguments)
        times.append(1)
        if len(times) < 3:
            make_overdue(board)
            assert board.sweep(term=1) == 1

    monkeypatch.setattr(payload_transfer, "write", slow)
    assert board.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]
    assert len(times) == 3
    audit(board)
    assert board.load([delivery], ["tokens"])[0]["tokens"].size == LARGE


@pytest.mark.usefixtures("many_round_trips")
def test_what_expires_before_its_commit_is_late_and_said(redis_url, monkeypatch):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")
    write = payload_transfer.write

    def lost(*arguments):
        yield from write(*arguments)
        board._connection.client.delete(payload_keys(board, "*:versions:*")[0])

    monkeypatch.setattr(payload_transfer, "write", lost)
    with pytest.raises(TooLate, match=r"group a: what 'rollout' writes came too late 3 times: \d+ bytes took longer"):
        board.commit([(delivery, output("rollout", tokens=LARGE))])
    audit(board)
    board.sweep(term=1)
    assert len(payload_keys(board)) == 1  # the prompt
    monkeypatch.setattr(payload_transfer, "write", write)
    assert board.commit([(delivery, output("rollout", tokens=LARGE))]) == [True]


def test_what_a_dead_writer_left_expires_or_is_swept(redis_url):
    board = make_board(redis_url)
    board.orphan_seconds = 0.01
    board.publish(term=1, groups=[group("a")])
    attempt = Attempt(board.prefix, "a.1", output("rollout", tokens=LARGE))
    milliseconds = payload_transfer.patience(attempt.large_bytes, board.orphan_seconds)
    registered = run_script("register", board.prefix, milliseconds, "a", "rollout", attempt.pointer)
    assert board._run(registered) == []
    board._run(payload_transfer.write([attempt], milliseconds))
    assert len(payload_keys(board)) == 3
    wait_until(lambda: len(payload_keys(board)) == 1, "its slices have expired", 5)
    assert board.sweep(term=1) == 1
    assert not board._connection.client.exists(f"{board.prefix}pending", f"{board.prefix}garbage")
    audit(board)


@pytest.mark.parametrize("part", ["*:tokens:0", "a.*:??"])
def test_a_group_that_lost_a_payload_is_tried_again(redis_url, part):
    board = make_board(redis_url, max_retries=1)
    board.publish(term=1, groups=[group("a"), group("b")])
    advance(board, ["rollout"], tokens=LARGE)
    deliveries = take(board, "reward")
    board._connection.client.delete(payload_keys(board, part)[0])
    assert [found is None for found in board.load(deliveries, ["tokens", "versions"])] == [part == "*:tokens:0", False]
    if part != "*:tokens:0":  # the prompt, which this stage doesn't read
        assert board.load(deliveries, ["prompt"])[0] is None
    assert board.open_groups() == ["b"]
    (dropped,) = board.dropped()
    assert (dropped.group_id, dropped.reason, dropped.retried) == ("a", "payload_lost", True)
    assert [retry.group_id for retry in board.retries()] == ["a"]
    assert board.counts().consecutive_drops == 1


def test_a_worker_goes_on_when_a_payload_is_lost(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a"), group("b")])
    advance(board, ["rollout"], tokens=LARGE)
    board._connection.client.delete(payload_keys(board, "a.*:tokens:0")[0])
    seen = threading.Event()
    worker = StageWorker(
        board, "critic", "worker", lambda d, c: (seen.set(), output("critic", tokens=LARGE))[1], concurrency=4
    )
    worker.start()
    try:
        assert seen.wait(20)
        wait_until(lambda: worker.held == 0, "nothing is held", 20)
    finally:
        worker.stop()
    assert board.counts().dropped_by_reason == {"payload_lost": 1}
    assert worker.done == 1
    audit(board)


def test_a_damaged_pointer_is_named(redis_url):
    board = make_board(redis_url)
    board.publish(term=1, groups=[group("a")])
    (delivery,) = take(board, "rollout")
    delivery.pointers["@publish"] = "nonsense"
    with pytest.raises(BoardError, match="a pointer of group a is damaged"):
        board.load([delivery], ["prompt"])


def test_large_prompts_that_the_gate_refuses_are_freed(redis_url):
    board = make_board(redis_url, groups_per_step=1, max_staleness=0)
    large = {"prompt_tokens": np.arange(LARGE, dtype=np.int32), "prompt": "x"}
    board.publish(term=1, groups=[NewGroup("a", large)])
    with pytest.raises(BoardError, match="gate is closed"):
        board.publish(term=1, groups=[NewGroup("b", large), NewGroup("c", large)])
    board.publish(term=1, groups=[NewGroup("a", large)])  # repeated: the reply was lost
    audit(board)
    assert board.sweep(term=1) == 3
    assert len(payload_keys(board)) == 2
    audit(board)


def test_the_gate_counts_payloads_until_they_are_freed(redis_url):
    board = make_board(redis_url, groups_per_step=1, max_staleness=9, high_water_bytes=600_000)
    board.publish(term=1, groups=[group("a")])
    advance(board, ["rollout"], tokens=LARGE)  # 240 kB
    board.publish(term=1, groups=[group("b")])
    advance(board, ["rollout"], tokens=LARGE)
    assert board.admission(200_000).limit == "memory"
    board.drop_groups(["a"], term=1, reason="by_hand")
    board.drop_groups(["b"], term=1, reason="by_hand")
    # The open step lacks a group, which passes; a second one doesn't while the payloads are there.
    assert board.admission(200_000).room == 1
    board.sweep(term=1)
    assert board.admission(200_000).room == 3


def test_a_sweep_frees_many_attempts_in_pieces(redis_url, monkeypatch):
    monkeypatch.setattr("relaxd.board.sides.coordinator_side.SWEPT_TOGETHER", 3)
    board = make_board(redis_url, groups_per_step=10)
    board.publish(term=1, groups=[group(f"g{i}") for i in range(10)])
    advance(board, ["rollout"], tokens=LARGE)
    for group_id in board.open_groups():
        board.drop_groups([group_id], term=1, reason="by_hand")
    assert board.sweep(term=1) == 20
    assert not payload_keys(board)
    assert json.loads(board._run(board._state("garbage_bytes"))) == 0
