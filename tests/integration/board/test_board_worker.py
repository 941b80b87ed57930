"""The loop of a stage, on a real Redis: batches, failures, pause, drain, leases, an outage, killed processes."""

import signal
import subprocess
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from relaxd.board import Board, Drop, StageWorker
from relaxd.config import BoardConfig
from tests.kit.boards import STAGES, audit, end_leases, group, make_board, output, take
from tests.kit.processes import kill, start_python
from tests.kit.waiting import wait_until

WAIT = 60.0
"""Longest wait for what should happen at once."""


@pytest.fixture
def start(redis_url):
    """Factory of workers that end with the test."""
    workers = []

    def make(board, stage, process, *, name="worker", concurrency=4, **settings):
        worker = StageWorker(board, stage, name, process, concurrency=concurrency, **settings)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.stop()


def publish(board, count):
    board.publish(term=1, groups=[group(f"g{i}") for i in range(count)])


def waiting(board, stage):
    return next(depth.waiting for depth in board.queues() if depth.stage == stage)


def test_groups_flow_through_workers_of_every_stage(redis_url, start):
    board = make_board(redis_url, groups_per_step=20)
    seen = []

    def process(delivery, columns):
        seen.append((delivery.stage, tuple(columns)))
        return output(delivery.stage)

    workers = [start(board, stage.name, process) for stage in STAGES[:-1]]
    for worker in workers:
        worker.start()
    publish(board, 20)
    wait_until(lambda: waiting(board, "train") == 20)
    wait_until(lambda: [worker.done for worker in workers] == [20] * 4)
    assert set(seen) == {(stage.name, stage.needs) for stage in STAGES[:-1]}
    assert all(worker.held == 0 for worker in workers)
    audit(board)


def test_columns_that_are_too_large_are_made_once(redis_url, start):
    board = make_board(redis_url, max_group_bytes=1 << 16)
    publish(board, 2)
    made = []

    def process(delivery, columns):
        made.append(delivery.group_id)
        return output("rollout", tokens=100_000 if delivery.group_id == "g0" else 3)

    start(board, "rollout", process).start()
    wait_until(lambda: board.counts().dropped_by_reason == {"too_large": 1})
    wait_until(lambda: waiting(board, "reward") == 1)
    assert sorted(made) == ["g0", "g1"]
    audit(board)


def test_filtered_groups_are_no_failures(redis_url, start):
    board = make_board(redis_url)
    publish(board, 3)
    start(board, "rollout", lambda delivery, columns: Drop("dull", filtered=delivery.group_id != "g0")).start()
    wait_until(lambda: board.counts().dropped == 3)
    assert (board.counts().consecutive_drops, board.counts().consecutive_filtered) == (1, 2)
    audit(board)


def test_no_more_groups_are_held_than_asked_for(redis_url, start):
    board = make_board(redis_url)
    publish(board, 6)
    futures: list[Future] = []
    limit = 2

    def process(delivery, columns):
        futures.append(Future())
        return futures[-1]

    worker = start(board, "rollout", process, concurrency=lambda: limit)
    worker.start()
    wait_until(lambda: len(futures) == 2)
    assert waiting(board, "rollout") == 4
    limit = 3
    wait_until(lambda: len(futures) == 3)
    futures[0].set_result(output("rollout"))
    wait_until(lambda: len(futures) == 4)
    assert worker.held == 3
    futures[1].cancel()  # handed back, uncounted, and taken again
    wait_until(lambda: len(futures) == 5)
    futures[2].set_exception(RuntimeError("an engine failed"))
    wait_until(lambda: len(futures) == 6)
    assert worker.done == 1


def test_drops_and_failures(redis_url, start, caplog):
    board = make_board(redis_url, max_deliveries=3)
    publish(board, 4)
    attempts = []

    def process(delivery, columns):
        attempts.append((delivery.group_id, delivery.attempt))
        match delivery.group_id:
            case "g0":
                return Drop("not_wanted")
            case "g1":
                raise RuntimeError("this group always fails")
            case "g2":
                return {"tokens": np.zeros(1)}
        return output("rollout")

    worker = start(board, "rollout", process)
    worker.start()
    wait_until(lambda: board.counts().dropped == 3 and waiting(board, "reward") == 1)
    assert board.counts().dropped_by_reason == {"not_wanted": 1, "poison": 2}
    assert sorted(a for g, a in attempts if g == "g1") == sorted(a for g, a in attempts if g == "g2") == [1, 2, 3]
    assert "this group always fails" in caplog.text
    assert "got tokens" in caplog.text
    wait_until(lambda: worker.held == 0)
    assert worker.done == 2
    audit(board)


def test_a_broken_payload_fails_its_own_group_only(redis_url, start):
    board = make_board(redis_url, max_deliveries=2)
    publish(board, 3)
    key = next(iter(board._connection.client.keys("*columns:g1.*")))
    board._connection.client.set(key, b"rubbish")
    start(board, "rollout", lambda delivery, columns: output("rollout")).start()
    wait_until(lambda: waiting(board, "reward") == 2)
    wait_until(lambda: board.counts().dropped_by_reason == {"poison": 1})


def test_a_paused_worker_takes_nothing(redis_url, start):
    board = make_board(redis_url)
    worker = start(board, "rollout", lambda delivery, columns: output("rollout"))
    worker.pause()
    worker.start()
    publish(board, 2)
    time.sleep(0.2)  # nothing is to happen: there is no event to wait for
    assert waiting(board, "rollout") == 2
    worker.resume()
    wait_until(lambda: worker.done == 2)
    worker.pause()
    time.sleep(0.6)  # the read that was under way is over
    board.publish(term=1, groups=[group("later")])
    time.sleep(0.2)
    assert waiting(board, "rollout") == 1


def test_drain_finishes_what_it_can_and_hands_back_the_rest(redis_url, start):
    board = make_board(redis_url)
    publish(board, 3)
    end, begun = threading.Event(), []

    def process(delivery, columns):
        begun.append(delivery.group_id)
        if delivery.group_id == "g0":
            wait_until(lambda: worker._draining)  # then it ends at once
        else:
            end.wait(WAIT)
        return output("rollout")

    worker = start(board, "rollout", process)
    worker.start()
    wait_until(lambda: len(begun) == 3)
    assert worker.drain(1.0) == 2
    assert (worker.done, worker.held) == (1, 0)
    assert [(d.group_id, d.attempt) for d in take(board, "rollout")] == [("g1", 1), ("g2", 1)]
    end.set()
    audit(board)


def test_who_drains_takes_no_more_whoever_resumes(redis_url, start):
    """As the engine of a rollout replica does after each sample."""
    board = make_board(redis_url)
    publish(board, 3)
    end, begun = threading.Event(), []

    def process(delivery, columns):
        begun.append(delivery.group_id)
        end.wait(WAIT)
        worker.resume()
        return output("rollout")

    worker = start(board, "rollout", process, concurrency=1)
    worker.start()
    wait_until(lambda: begun)
    drain = threading.Thread(target=worker.drain, args=(WAIT,))
    drain.start()
    wait_until(lambda: worker._draining)
    end.set()
    drain.join(WAIT)
    assert not drain.is_alive()
    assert (begun, worker.done, worker.held) == (["g0"], 1, 0)
    assert waiting(board, "rollout") == 2
    audit(board)


def test_holds_are_kept_while_work_goes_on(redis_url, start):
    board = make_board(redis_url, lease_seconds=1.0)
    publish(board, 1)
    end = threading.Event()

    def process(delivery, columns):
        end.wait(WAIT)
        return output("rollout")

    worker = start(board, "rollout", process)
    worker.start()
    wait_until(lambda: worker.held == 1)
    assert board.take("rollout", "thief", count=1, block_seconds=2.2) == []
    end.set()
    wait_until(lambda: worker.done == 1)


def test_a_group_that_comes_back_while_it_is_worked_on_is_worked_on_once(redis_url, start):
    board = make_board(redis_url, lease_seconds=1.0)
    publish(board, 1)
    end, begun = threading.Event(), []

    def process(delivery, columns):
        begun.append(delivery.attempt)
        end.wait(WAIT)
        return Drop("done with it")

    worker = start(board, "rollout", process)
    worker.start()
    wait_until(lambda: worker.held == 1)

    def came_back():
        end_leases(board, "rollout")  # again and again: a renewal may come first
        return worker._held["g0"].attempt >= 2

    wait_until(came_back)
    end.set()
    wait_until(lambda: worker.done == 1)
    assert begun == [1]
    audit(board)


def test_work_goes_on_over_a_restart_of_redis_and_before_the_run_is_there(redis_server, caplog):
    server = redis_server(append_only=True)
    board = Board(server.url, "run", STAGES, BoardConfig(), timeout_seconds=2.0, retry_seconds=0.3)
    workers = [
        StageWorker(board, stage.name, "worker", lambda d, c: output(d.stage), concurrency=2) for stage in STAGES[:-1]
    ]
    for worker in workers:
        worker.start()
    time.sleep(0.1)  # they find no run
    make_board(server.url, groups_per_step=40)
    publish(board, 40)
    wait_until(lambda: workers[0].done > 3)
    server.kill()
    time.sleep(0.5)
    server.start()
    wait_until(lambda: waiting(board, "train") == 40)
    for worker in workers:
        assert worker.stop() == 0
    messages = [
        r.message for r in caplog.records if "waits for the board" in r.message and "stage rollout" in r.message
    ]
    assert 1 <= len(messages) <= 4  # once an outage, not once a try
    audit(board)


CRASHER = """
import os, random, sys, time
from relaxd.board import StageWorker
from tests.kit.boards import STAGES, Board, output
from relaxd.config import BoardConfig
url, stage, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
random.seed(seed)
board = Board(url, "run", STAGES, BoardConfig(lease_seconds=0.5, max_deliveries=1000))
def process(delivery, columns):
    time.sleep(random.random() * 0.02)
    if random.random() < 0.03:
        raise RuntimeError("now and then")
    return output(stage, tokens=random.choice([3, 20_000]))
StageWorker(board, stage, f"{stage}-{os.getpid()}", process, concurrency=4).start()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_killed_and_stalled_processes_lose_and_double_nothing(redis_url):
    """Two processes a stage work while others kill (SIGKILL) or stall (SIGSTOP, longer than the lease) them."""
    groups, steps = 120, 6
    board = make_board(redis_url, groups_per_step=groups, lease_seconds=0.5, max_deliveries=1000)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}

    def launch(stage, seed):
        return start_python("-c", CRASHER, redis_url, stage, str(seed), **pipes)

    stages = [stage.name for stage in STAGES[:-1]] * 2
    processes = [launch(stage, number) for number, stage in enumerate(stages)]
    try:
        for process in processes:
            assert process.stdout.readline() == b"up\n"
        publish(board, groups)
        term, trained = board.new_trainer_term(), 0
        for step in range(1, steps + 1):
            victim = step % len(stages)
            processes[victim].kill()
            stalled = processes[(victim + 3) % len(stages)]
            stalled.send_signal(signal.SIGSTOP)
            taken = []
            deadline = time.monotonic() + 120
            while len(taken) < groups // steps:
                assert time.monotonic() < deadline, f"groups do not arrive: {board.queues()}"
                need = groups // steps - len(taken)
                found = board.take("train", "trainer", count=need, block_seconds=0.2)
                taken += [d for d in found if d.group_id not in {t.group_id for t in taken}]
                board.renew("train", "trainer", taken)
            plan = {"groups": [d.group_id for d in taken]}
            board.commit_step(term=term, step=step, plan=plan, metrics={})
            trained += len(taken)
            stalled.send_signal(signal.SIGCONT)
            processes.append(launch(stages[victim], 100 + step))
            processes[victim].wait(timeout=60)
            processes[victim] = processes.pop()
        counts = board.counts()
        assert (counts.published, counts.trained, counts.open, counts.dropped) == (groups, groups, 0, 0)
        assert trained == groups
        kill(*processes)  # one that was stalled may still commit in vain, between two looks of the audit
        audit(board)
        assert all(depth.waiting == depth.held == 0 for depth in board.queues())
    finally:
        kill(*processes)
