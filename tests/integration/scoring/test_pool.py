"""The pool of reward workers, with real processes and rewards that go wrong in every way."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from services.reward.worker_enclosure import MissingVariableError
from services.reward.worker_pool import Failure, PoolClosedError, WorkerPool, WorkerStartError
from tests.kit.disks import no_descriptors
from tests.kit.processes import is_alive, python_path, start_python
from tests.kit.waiting import eventually, wait_until

BAD = "bad_rewards:by_response"
WRITES = RewardConfig(name=BAD, writable=(tempfile.gettempdir(),))
"""Rewards and tests speak through files."""
FILE = Path(__file__).with_name("bad_rewards.py").relative_to(Path.cwd())


def place(code: str) -> str:
    """Return the file and the line of some code among the bad rewards, as errors name it."""
    lines = FILE.read_text().splitlines()
    return f"{FILE}:{next(number for number, line in enumerate(lines, start=1) if code in line)}"


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerPool]:
    monkeypatch.setenv("PYTHONPATH", python_path(Path(__file__).parent))
    pool = WorkerPool(2, WRITES)
    yield pool
    pool.close()


async def score(pool: WorkerPool, *responses: str, timeout_seconds: float = 10.0) -> list[RewardOutput | Failure]:
    samples = [RewardInput(prompt="hot?", response=response) for response in responses]
    return await pool.score(BAD, samples, timeout_seconds)


async def gone(pid: int) -> None:
    await eventually(lambda: not is_alive(pid), f"worker {pid} is gone")


async def test_a_worker_gets_no_secret_but_those_that_are_named(pool, monkeypatch, tmp_path):
    secrets = {"RELAXD_TOKEN": "t", "RELAXD_TOKEN_FILE": "f", "RELAXD_REDIS": "r", "HF_TOKEN": "h", "JUDGE_KEY": "k"}
    for name, value in (secrets | {"LC_ALL": "C.UTF-8"}).items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "tokens").open("w") as tokens:
        os.set_inheritable(tokens.fileno(), True)
        given = WorkerPool(1, WRITES.model_copy(update={"environment": ("JUDGE_KEY",)}))
        for workers, passed in ((WorkerPool(1, WRITES), set()), (given, {"JUDGE_KEY"})):
            assert await score(workers, f"surroundings {tmp_path / 'seen'}") == [RewardOutput(1.0)]
            workers.close()
            seen = json.loads((tmp_path / "seen").read_text())
            assert set(seen["environment"]) & (set(secrets) | {"LC_ALL"}) == passed | {"LC_ALL"}
            for name in ("PATH", "HOME", "PYTHONPATH"):
                assert seen["environment"][name] == os.environ[name]
            # Standard input and output, and what its server of the pool's calls has opened: no file.
            assert seen["files"].pop("0") == "/dev/null"
            kinds = {target.partition(":")[0] for target in seen["files"].values()}
            assert kinds == {"pipe", "socket", "anon_inode"}, seen["files"]
    with pytest.raises(MissingVariableError, match=r"reward.environment names NO_SUCH_KEY, not set"):
        WorkerPool(1, RewardConfig(name=BAD, environment=("JUDGE_KEY", "NO_SUCH_KEY")))


async def test_scores_come_back_in_order(pool):
    answers = ["40", "41", "42", "43"]
    samples = [RewardInput(prompt="", response=str(n), answer="42") for n in answers]
    outputs = await pool.score("addition", samples, 10.0)
    assert [output.reward for output in outputs] == [0, 0, 1, 0]
    assert outputs[2] == RewardOutput(1.0, {"accuracy": 1.0, "format": 1.0})


async def test_a_sample_whose_process_was_killed_is_tried_once_more(pool, tmp_path):
    scoring = asyncio.create_task(score(pool, f"hang-once {tmp_path / 'pid'}"))
    pid = await eventually(lambda: (path := tmp_path / "pid").exists() and path.read_text(), "the worker's pid")
    os.kill(int(pid), signal.SIGKILL)
    assert await scoring == [RewardOutput(1.0)]


async def test_what_goes_wrong_is_the_failure_of_its_sample_alone(pool):
    expected = {
        "one": RewardOutput(1.0),
        "raise 5": f"IndexError: list index out of range ({place('[][int(text)]')}, in <lambda>)",
        "json": f"JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({place('json.loads(text)')},",
        "nan": f"by_response ({place('def by_response')}): the reward is nan: it must be finite",
        "inf": f"by_response ({place('def by_response')}): the reward is inf: it must be finite",
        "string": f"by_response ({place('def by_response')}): the reward is '0.7' (str): it must be a number",
        "none": f"by_response ({place('def by_response')}): the reward is None (NoneType): it must be a number",
        "sys.exit": "SystemExit: 0",
        "recurse": "RecursionError",
        "os._exit": "the process that ran the reward died: exit code 3",
        "abort": "the process that ran the reward died: killed by signal 11",
        "shout": RewardOutput(1.0),
        "alarm": RewardOutput(1.0),
        "torch": RewardOutput(0.0),
        "parts": RewardOutput(0.5, {"style": 0.25}),
        "nested": RewardOutput(1.0, {"style": 0.25}),
        "await": RewardOutput(0.5),
        "await-raise": f"ValueError: nothing ({place('raise ValueError')}, in later)",
    }
    for response, outcome in zip(expected, await score(pool, *expected), strict=True):
        if isinstance(expected[response], RewardOutput):
            assert outcome == expected[response]
        else:
            assert isinstance(outcome, Failure), response
            assert outcome.reason.startswith(expected[response]), response
            raised = not outcome.died and "the reward is" not in outcome.reason
            assert (outcome.traceback.startswith("Traceback:\n  File") and "bad_rewards" in outcome.traceback) == raised


async def test_an_async_reward_keeps_its_event_loop(pool):  # the fixture sets PYTHONPATH
    one = WorkerPool(1)
    first, second = await score(one, "loop", "loop")
    one.close()
    assert first == second


async def test_a_reward_that_hangs_is_killed_at_its_deadline(pool):
    await score(pool, "one", "one")  # starting the workers is not part of the deadline
    begun = time.monotonic()
    outcomes = await score(pool, "hang", "hang-in-c", "one", "one", timeout_seconds=2.0)
    assert time.monotonic() - begun < 60
    assert outcomes[2:] == [RewardOutput(1.0), RewardOutput(1.0)]
    for outcome, code, function in (
        (outcomes[0], "time.sleep(3600),", "<lambda>"),
        (outcomes[1], "PyDLL(None).sleep(3600)", "hang_in_c"),
    ):
        where = f"(at {place(code)}, in {function})"
        reason = f"scoring a sample took longer than 2 s {where}; its process was killed; the prompt: 'hot?'"
        assert outcome == Failure(reason, late=True)


async def test_of_a_reward_that_hangs_only_its_own_stack_is_shown(pool, capfd):
    for hang, functions in (("hang", ["<lambda>", "by_response"]), ("hang-deep", ["deep"] * 100)):
        (outcome,) = await score(pool, hang, timeout_seconds=2.0)
        assert isinstance(outcome, Failure)
        assert f", in {functions[0]})" in outcome.reason
        first, *frames = capfd.readouterr().err.splitlines()
        assert first == "the reward takes long; it is here (most recent call first):"
        found = [re.fullmatch(rf'  File "{re.escape(str(FILE.resolve()))}", line \d+ in (.*)', line) for line in frames]
        assert [frame and frame[1] for frame in found][-len(functions) :] == functions


def test_a_pause_of_the_process_is_not_the_rewards_fault(tmp_path):
    """A program that scores one sample, which takes a second, is stopped for longer than the sample's deadline."""
    started = tmp_path / "begun"
    program = start_python(
        "-c",
        "import asyncio, sys\n"
        "from relaxd.config import RewardConfig\n"
        "from relaxd.rewards import RewardInput\n"
        "from services.reward.worker_pool import WorkerPool\n"
        "async def main():\n"
        "    pool = WorkerPool(1, RewardConfig(name='dummy', sandbox='off'))\n"
        f"    sample = RewardInput(prompt='', response='begin-and-sleep {started}')\n"
        f"    print(*await pool.score('{BAD}', [sample], 4.0))\n"
        "    pool.close()\n"
        "asyncio.run(main())\n",
        environment={"PYTHONPATH": python_path(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(started.exists, "the sample is being scored")
    program.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    program.send_signal(signal.SIGCONT)
    output, _ = program.communicate(timeout=60)
    assert output.startswith("RewardOutput(reward=1.0"), output


async def test_a_reward_that_hangs_is_named_while_it_hangs(pool):
    await score(pool, "one", "one")
    assert pool.slowest() is None
    scoring = asyncio.create_task(score(pool, "hang", timeout_seconds=4.0))
    shown = await eventually(lambda: (one := pool.slowest()) and one.where and str(one), "the reward's place")
    assert not scoring.done()
    where = re.escape(f"(at {place('time.sleep(3600),')}, in <lambda>)")
    assert re.fullmatch(rf"a sample for [2-4] s {where}; its prompt: 'hot\?'", shown)
    pool.close()
    with pytest.raises(PoolClosedError):
        await scoring


async def test_what_a_reward_started_is_killed_with_it(pool, tmp_path):
    await score(pool, "one", "one")
    (outcome,) = await score(pool, f"hang-with-child {tmp_path / 'pid'}", timeout_seconds=2.0)
    assert isinstance(outcome, Failure)
    await gone(int((tmp_path / "pid").read_text()))


async def test_waiting_for_a_worker_is_not_part_of_the_deadline(pool):
    outcomes = await score(pool, *["sleep 0.3"] * 18, timeout_seconds=2.0)
    assert outcomes == [RewardOutput(1.0)] * 18


async def test_workers_are_reused_and_replaced_only_when_they_die(pool):
    first = {output.reward for output in await score(pool, *["pid"] * 20)}
    assert 1 <= len(first) <= 2
    await score(pool, "os._exit", "os._exit")
    second = {output.reward for output in await score(pool, *["pid"] * 20)}
    assert 1 <= len(second) <= 2
    assert not first & second


async def test_a_worker_that_was_killed_while_idle_costs_no_sample(pool):
    await score(pool, "one", "one", "one")
    children = [worker.child for worker in pool._workers if worker.child]
    for child in children:
        os.kill(child.pid, 9)
        await child.exited
    assert await score(pool, "one", "one", "one") == [RewardOutput(1.0)] * 3


async def test_cancelled_work_stops(pool):
    (output,) = await score(pool, "pid")
    task = asyncio.create_task(score(pool, "hang", "hang", "hang", timeout_seconds=3600))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await score(pool, "one", "one") == [RewardOutput(1.0)] * 2
    await gone(int(output.reward))


async def test_closing_kills_the_workers_and_blames_no_sample(pool):
    pids = {int(output.reward) for output in await score(pool, "pid", "pid")}
    task = asyncio.create_task(score(pool, "hang", "hang", "one", timeout_seconds=3600))
    await asyncio.sleep(0.2)
    pool.close()
    with pytest.raises(PoolClosedError):
        await task
    for pid in pids:
        await gone(pid)
    with pytest.raises(PoolClosedError):
        await score(pool, "one")


async def test_a_repaired_reward_is_loaded_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    own, samples = WorkerPool(1), [RewardInput(prompt="", response="")]
    (tmp_path / "own.py").write_text("def score(sample):\n    return 1\n")
    assert await own.score("own:score", samples, 10.0) == [RewardOutput(1.0)]
    (tmp_path / "own.py").write_text("def score(sample):\n    return 2 / 1\n")
    assert await own.score("own:score", samples, 10.0) == [RewardOutput(1.0)]
    own.reload()
    assert await own.score("own:score", samples, 10.0) == [RewardOutput(2.0)]
    own.close()


async def test_loading_says_what_is_wrong_with_a_name(pool):
    assert await pool.load(BAD) is None
    assert await pool.load("addition") is None
    for name, reason in [
        ("bad_rewards:by_respons", "has no by_respons; did you mean by_response?"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("additon", "did you mean addition?"),
        (
            "bad_rewards:two_arguments",
            f"two_arguments ({place('def two_arguments')}) takes (prompt, answer), but a reward takes one",
        ),
    ]:
        failure = await pool.load(name)
        assert isinstance(failure, Failure)
        assert reason in failure.reason


async def test_workers_that_cannot_be_started_are_no_failure_of_a_sample(pool, monkeypatch, tmp_path):
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with no_descriptors(os.getpid()), pytest.raises(WorkerStartError, match=r"started: .*Too many open files"):
        await score(pool, "one")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(WorkerStartError, match=r"started: .*No such file"):
            await pool.load(BAD)
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('broken', flush=True)\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = WorkerPool(1)
    died = r"died before it was ready: exit code 7; its last line: broken$"
    with pytest.raises(WorkerStartError, match=died):
        await broken.load("addition")
    await eventually(lambda: not list(folder.iterdir()), "nothing is left")
    assert await score(pool, "one") == [RewardOutput(1.0)]  # it works once the machine does
    pool.close()
    await eventually(lambda: not list(folder.iterdir()), "nothing is left")
    folder.rmdir()
