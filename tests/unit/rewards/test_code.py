"""The reward `code`: every form of tests, and answers that cheat, hang, or attack the machine. All run for real."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relaxd.rewards import RewardInput, UnknownRewardError, check_output, resolve
from relaxd.rewards.hub.code import same_output, same_value
from relaxd.rewards.hub.code_cases import code_in
from relaxd.sandbox.limits import Limits
from relaxd.sandbox.processes import Sandbox
from tests.kit.processes import is_alive, start_python
from tests.kit.waiting import wait_until
from tests.unit.rewards.scoring import LIMITS

SQUARES = {"inputs": ["3", "4"], "outputs": ["9", "16"]}
SQUARE = {"inputs": ["3", "-4"], "outputs": ["9", "16"], "fn_name": "square"}
ASSERTS = {"test_list": ["assert square(3) == 9", "assert square(-4) == 16"]}
HUMAN = {
    "prompt_text": 'import math\n\ndef helper(x):\n    return x * x\n\ndef square(x):\n    """Square a number."""\n',
    "test": "def check(candidate):\n    for x in range(50):\n        assert candidate(x) == helper(x)\n",
    "entry_point": "square",
}
TRIPLES = {"inputs": ["3", "4"], "outputs": ["9", "12"]}
SETUP = {"test_list": ["assert math.isclose(square(2), four)"], "test_setup_code": "import math\nfour = 4"}
MAPPING = {"inputs": ['1\n"x"'], "outputs": ['[1, {"1": "x"}]'], "fn_name": "f"}
SQUARE_CODE = "def square(x):\n    return x * x\n"


@pytest.fixture(scope="module")
def reward():
    return resolve("code", LIMITS)


@pytest.fixture(scope="module")
def share():
    return resolve("code", LIMITS | {"credit": "share"})


def sample(code: str, tests: dict, fenced: bool = True) -> RewardInput:
    """Return a reply; pairs are the answer, other tests the metadata."""
    response = f"Here it is:\n```python\n{code}\n```" if fenced else code
    if "inputs" in tests:
        return RewardInput("Square it.", response, answer=json.dumps(tests))
    return RewardInput("Square it.", response, metadata=tests)


@pytest.mark.parametrize(
    ("code", "tests", "right"),
    [
        # Standard input and output.
        ("print(int(input()) ** 2)", SQUARES, 1),
        ("import sys\nfor line in sys.stdin:\n    print(int(line) ** 2, end='  \\n\\n')", SQUARES, 1),
        ("if __name__ == '__main__':\n    print(int(input()) ** 2)", SQUARES, 1),
        ("import os\nx = int(os.read(0, 99))\nos.write(1, b'%d' % (x * x))\nos._exit(0)", SQUARES, 1),
        ("print(int(input()) ** 2)\nexit()", SQUARES, 1),
        ("print(int(input()) * 3)", SQUARES, 0),
        ("print(int(input()) ** 2)\nraise ValueError", SQUARES, 0),
        ("print(int(input()) ** 2", SQUARES, 0),
        ("from collections import deque\nprint(sum(deque([int(input())] * 3)))", TRIPLES, 1),
        ("print(pow(int(input()), 2))\nx: List[int] = list(Counter('ab'))", SQUARES, 1),
        ("print(1 / 3)", {"inputs": [""], "outputs": ["0.333333333"]}, 1),
        ("print(sum(map(int, open(0).read().split())))", {"inputs": [["1 2", "3"]], "outputs": ["6"]}, 1),
        # Functions.
        (SQUARE_CODE, SQUARE, 1),
        ("class Solution:\n    def square(self, x: int) -> int:\n        return x * x", SQUARE, 1),
        ("def square(x):\n    return x + 6", SQUARE, 0),
        ("def squares(x):\n    return x * x", SQUARE, 0),
        ("def f(a, b):\n    return a, {1: b}", MAPPING, 1),
        ("def f(a):\n    return len(a)", {"inputs": [[[1, 2]]], "outputs": [2], "fn_name": "f"}, 1),
        # Asserts.
        (SQUARE_CODE, ASSERTS, 1),
        ("square = lambda x: x + 6", ASSERTS, 0),
        ("def pair(x):\n    return (x, {x})", {"test_list": ["assert pair(2) == (2, {2})", "assert pair(0)"]}, 1),
        ("def pair(x):\n    return [x, {x}]", {"test_list": ["assert pair(2) == (2, {2})"]}, 0),
        (SQUARE_CODE, SETUP, 1),
        ("def bad(x):\n    raise KeyError(x)", {"test_list": ["try:\n  bad(1)\n  assert 0\nexcept KeyError: pass"]}, 1),
        ("def both(f, x):\n    return f(f(x))\n" + SQUARE_CODE, {"test_list": ["assert both(square, 2) == 16"]}, 1),
        # HumanEval: the answer completes the prompt, or repeats it.
        (SQUARE_CODE, HUMAN, 1),
        ("    return helper(x)\n", HUMAN, 1),
        ("def square(x):\n    return 2 * helper(x)", HUMAN, 0),
        # Limits that honest answers feel.
        ("import numpy\nprint(int(numpy.square(int(input()))))", SQUARES, 1),
        ("import threading\nout = []\nt = threading.Thread(target=lambda: out.append(int(input()) ** 2))\nt.start()\n"
         "t.join()\nprint(out[0])", SQUARES, 1),
        ("def f(n):\n    return n and f(n - 1)\nf(5000)\nprint(int(input()) ** 2)", SQUARES, 1),
    ],
)  # fmt: skip
def test_answers(reward, code, tests, right):
    scored = check_output(reward(sample(code, tests)))
    assert (scored.reward, scored.parts["accuracy"], scored.parts["unplain"]) == (right, right, 0)


RIGHT = "print(int(input()) ** 2)"
CHEAT = "def square(x):\n    "
PARENT = "os.getppid()"
HOSTILE = {
    "an infinite loop": ("while True: pass", SQUARES),
    "a loop in a function": (CHEAT + "while True: pass", ASSERTS),
    "a sleep": ("import time\ntime.sleep(60)", SQUARES),
    "a gigabyte": ("x = bytearray(1 << 30)\nprint(int(input()) ** 2)", SQUARES),
    "lists without end": ("x = []\nwhile True: x.append([0] * 100_000)", SQUARES),
    "output without end": ("while True: print('x' * 1000)", SQUARES),
    "a huge value": (CHEAT + "return 'x' * 10**6 if x > 3 else x * x", {**SQUARE, "inputs": ["4", "4"]}),
    "a fork bomb": ("import os\nwhile True: os.fork()", SQUARES),
    "a fork through libc": ("import ctypes\nif ctypes.CDLL(None).fork() < 0: raise SystemExit\nprint(9)", SQUARES),
    "another program": ("import subprocess\nsubprocess.run(['sh', '-c', 'echo 9'])", SQUARES),
    "another program in place": ("import os\nos.execv('/bin/echo', ['echo', '9'])", SQUARES),
    "endless threads": ("import threading as t, time\nwhile 1: t.Thread(target=time.sleep, args=[9]).start()", SQUARES),
    "a thread that outlives": ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
                               "raise ValueError", SQUARES),
    "an end before the tests": ("import os\nos._exit(0)", HUMAN),
    "sys.exit before the tests": ("import sys\nsys.exit(0)", ASSERTS),
    "an end in the call": (CHEAT + "import os; os._exit(0)", ASSERTS),
    "equal to everything": ("class Any:\n    def __eq__(self, other): return True\n" + CHEAT + "return Any()", HUMAN),
    "a number equal to everything": ("class Any(int):\n    def __eq__(self, other): return True\n"
                                     + CHEAT + "return Any()", HUMAN),
    "no more assertions": ("import builtins\nbuiltins.AssertionError = KeyError\n" + CHEAT + "return 0", HUMAN),
    "the checker replaced": ("def check(candidate): pass\n" + CHEAT + "return 0", HUMAN),
    "expected values in memory": ("import gc\n" + CHEAT + "return next(o for o in gc.get_objects() if '16' in str(o))",
                                  SQUARE),
    "a forged message": ("import os\nos.write(3, b'\\x10\\0\\0\\0{\"passed\": true}')\nos._exit(0)", ASSERTS),
    "a sentinel on every descriptor": ("import os\nfor n in range(64):\n  try: os.write(n, b'{\"passed\": true}\\n')\n"
                                       "  except OSError: pass\n" + CHEAT + "return 0", ASSERTS),
    "the parent's environment": (f"import os\nopen(f'/proc/{{{PARENT}}}/environ').read()\nprint(int(input()) ** 2)",
                                 SQUARES),
    "its parent's memory": (f"import os\nopen(f'/proc/{{{PARENT}}}/mem', 'rb').read(1)\nprint(int(input()) ** 2)",
                            SQUARES),
    "a file elsewhere": ("print(open('/etc/hostname').read())\nprint(int(input()) ** 2)", SQUARES),
    "writing": ("open('/tmp/answer', 'w').write('x')\nprint(int(input()) ** 2)", SQUARES),
    "writing to the sources": ("import json\nopen(json.__file__, 'a').write('x')\nprint(int(input()) ** 2)", SQUARES),
    "a mode changed": ("import os\nos.chmod('/tmp', 0o777)\nprint(int(input()) ** 2)", SQUARES),
    "its parent killed": (f"import os\nos.kill({PARENT}, 9)\nprint(int(input()) ** 2)", SQUARES),
    "everybody killed": ("import os\nos.kill(-1, 9)\nprint(int(input()) ** 2)", SQUARES),
    "the network": ("import socket\nsocket.socket()\nprint(int(input()) ** 2)", SQUARES),
    "a local socket": ("import socket\nsocket.socket(socket.AF_UNIX)\nprint(int(input()) ** 2)", SQUARES),
    "a group of its own": ("import os\nos.setsid()\nprint(int(input()) ** 2)", SQUARES),
    "higher limits": ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (1 << 40,) * 2)\n" + RIGHT, SQUARES),
    "a namespace": ("import ctypes\nassert not ctypes.CDLL(None).unshare(0x10000000)\n" + RIGHT, SQUARES),
    "the other set of calls": ("import ctypes\nassert ctypes.CDLL(None).syscall(0x40000000 + 39) > 0\n"
                               "print(int(input()) ** 2)", SQUARES),
    "a crash of the interpreter": ("import ctypes\nctypes.string_at(0)", SQUARES),
    "a crash of the compiler": ("x = " + "(" * 5000 + ")" * 5000, SQUARES),
    "no text": ("\0\ud800", SQUARES),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_score_0_and_hurt_nobody(reward, name):
    code, tests = HOSTILE[name]
    began = time.monotonic()
    assert check_output(reward(sample(code, tests))).reward == 0
    assert time.monotonic() - began < LIMITS["total_seconds"] + 3
    assert check_output(reward(sample(SQUARE_CODE, SQUARE))).reward == 1, "the next answer is scored as ever"


def test_an_answer_sees_no_secret_and_no_file_but_pythons(reward, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (tmp_path / "token").write_text("secret")
    code = f"""
import os, sys
seen = [*os.environ.values(), *sys.argv, *sys.path]
for place in ("/", "/proc/self", "/proc/1", "/run", "/etc", "/home", "/root", "/tmp", {str(tmp_path)!r}, os.getcwd()):
    try:
        seen += os.listdir(place)
        print("lists", place)
    except OSError:
        pass
for place in ({str(tmp_path / "token")!r}, "/proc/self/environ", "/etc/passwd", {__file__!r}):
    try:
        print("reads", place, len(open(place).read()))
    except OSError:
        pass
print([one for one in seen if "secret" in one])
"""
    assert reward(sample(code, {"inputs": [""], "outputs": ["[]"]}))["reward"] == 1


@pytest.mark.parametrize(
    ("code", "tests", "passed"),
    [
        ("print(9)", SQUARES, 0.5),
        ("x = int(input())\nwhile x == 3: pass\nprint(x * x)", SQUARES, 0.5),
        (CHEAT + "return 9", SQUARE, 0.5),
        (CHEAT + "import os; return x * x if x > 0 else os._exit(1)", SQUARE, 0.5),
        (CHEAT + "import os; return x * x if x < 0 else os._exit(1)", ASSERTS, 0.5),
        (CHEAT + "return 9", ASSERTS, 0.5),
        (SQUARE_CODE, ASSERTS, 1.0),
        ("nonsense(", ASSERTS, 0.0),
    ],
)
def test_partial_credit(share, code, tests, passed):
    scored = check_output(share(sample(code, tests)))
    assert (scored.reward, scored.parts["passed"], scored.parts["accuracy"]) == (passed, passed, passed == 1)


def test_tests_with_objects_need_the_answers_process(reward):
    code = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)"
    tests = {"test_list": ["s = Stack()\ns.push(1)\nassert s.items == [1]"]}
    assert reward(sample(code, tests)) == {"reward": 0, "accuracy": 0, "format": 1, "unplain": 1}
    together = resolve("code", LIMITS | {"separate": False})
    assert together(sample(code, tests))["reward"] == 1
    for name in ("an end before the tests", "sys.exit before the tests", "a sentinel on every descriptor"):
        assert together(sample(*HOSTILE[name]))["reward"] == 0


def test_tests_after_the_time_of_all_fail():
    """The first test alone would compute for a minute; the others, which are right, come after the time of all."""
    slow = resolve("code", LIMITS | {"seconds": 60, "total_seconds": 0.5, "credit": "share"})
    code = "x = int(input())\nwhile x == 1: pass\nprint(x)"
    began = time.monotonic()
    scored = slow(sample(code, {"inputs": ["1", *["2"] * 99], "outputs": ["1", *["2"] * 99]}))
    assert scored["passed"] == 0
    assert time.monotonic() - began < 50, "the first test was not stopped"


PAUSED = """
import os, signal, threading
from relaxd.rewards import RewardInput
from relaxd.rewards.hub.code import Code
from relaxd.sandbox.processes import Sandbox

start = Sandbox.start

def start_and_stop(*arguments):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return start(*arguments)

Sandbox.start = start_and_stop
answer = "import time\\ntime.sleep(1)\\nprint(int(input()) ** 2)"
tests = '{"inputs": ["3"], "outputs": ["9"]}'
print(Code(seconds=1.0, total_seconds=4.0)(RewardInput("", answer, tests)))
"""
"""Scores a right answer that takes a second, and stops itself meanwhile."""


def test_a_pause_of_the_worker_is_not_the_answers_fault():
    program = start_python("-c", PAUSED, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: psutil.Process(program.pid).status() == psutil.STATUS_STOPPED, "it stops")
    time.sleep(5.0)  # longer than its limits
    program.send_signal(signal.SIGCONT)
    output, _ = program.communicate(timeout=60)
    assert output.startswith("{'reward': 1.0"), output


def test_processes_end_with_whoever_started_them():
    """The pool kills a worker at its deadline; what the answer started must not go on."""
    sandbox = Sandbox(Limits(seconds=60))
    job = {"kind": "script", "programs": ["while True: pass"], "contest": False}
    process = sandbox.start(job, time.monotonic() + 60)
    pid, zygote = process._pid, sandbox._zygote
    assert pid is not None
    assert zygote is not None
    zygote.kill()
    zygote.wait()
    wait_until(lambda: not is_alive(pid), "the confined process ends with its zygote", 10)
    other = Sandbox(Limits(seconds=60))
    other.start(job, time.monotonic() + 60).end()
    assert other._zygote is not None
    other._control.close()
    assert other._zygote.wait(timeout=10) == 0, "a zygote ends when the socket to it closes"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the reward code needs tests"),
        ({"answer": '{"inputs": ["1"], "outputs": []}'}, "answer has 1 inputs and 0 outputs: give a list of as many"),
        ({"answer": '{"inputs": [], "outputs": []}'}, "answer has 0 inputs and 0 outputs"),
        ({"answer": '{"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}'}, r"answer.inputs\[0\] is 'x': with fn_name"),
        ({"metadata": {"test_list": "assert f()"}}, "metadata.test_list is 'assert f()': it must be a list of asserts"),
        ({"metadata": {"test_list": ["assert ("]}}, "the tests can't be compiled: SyntaxError"),
        ({"metadata": {"test": "def check(", "entry_point": "f"}}, "the tests can't be compiled: SyntaxError"),
        ({"metadata": {"test_list": ["f()"], "test_setup_code": "while 1: pass"}}, "the tests' setup doesn't end"),
    ],
)
def test_wrong_tests_are_an_error_and_no_silent_0(reward, fields, message):
    with pytest.raises(ValueError, match=message.replace("()", r"\(\)")):
        reward(RewardInput("", "def f(): return 1", **fields))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"credit": "some"}, 'credit is \'some\': it must be "all" or "share"'),
        ({"seconds": 0}, "seconds is 0: it must be above 0"),
        ({"memory": 1}, r"reward.settings.memory is not a setting of the reward \"code\": did you mean memory_mb"),
    ],
)
def test_wrong_settings_are_named_when_it_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        resolve("code", settings)


def test_a_kernel_without_landlock_is_named_when_it_is_loaded(monkeypatch):
    monkeypatch.setattr("relaxd.sandbox.landlock.version", lambda: 0)
    with pytest.raises(UnknownRewardError, match="this kernel has no Landlock"):
        resolve("code")
    unconfined = resolve("code", LIMITS | {"confine_files": False})
    assert unconfined(sample(SQUARE_CODE, SQUARE))["reward"] == 1
    for name in ("writing", "the network", "a fork bomb", "a mode changed", "its parent killed"):
        assert unconfined(sample(*HOSTILE[name]))["reward"] == 0


@pytest.mark.parametrize(
    ("reply", "code", "fenced"),
    [
        ("print(1)", "print(1)", False),
        ("```python\na\n```\nor\n```python\nb\n```", "b\n", True),
        ("```py\na\n```\n```text\nout\n```", "a\n", True),
        ("```\na\n```", "a\n", True),
        ("```rust\na\n```", "a\n", True),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n", True),
        ("```python\nprint(", "print(", True),
        ("```Python \r\na\n```", "a\n", True),
        ("", "", False),
    ],
)
def test_the_code_in_a_reply(reply, code, fenced):
    assert code_in(reply) == (code, fenced)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n\n3", "1 2\n3", True),
        ("3\n1 2", "1 2\n3", False),
        ("0.1", "0.10000001", True),
        ("1.0", "1", True),
        ("10", "11", False),
        ("100000001", "100000000", False),
        ("nan", "1", False),
        ("1", "", False),
        ("", "", True),
    ],
)
def test_outputs(ours, theirs, same):
    assert same_output(ours, theirs) is same


def test_values():
    assert same_value((1, {2: (3,)}), [1, {"2": [3]}])
    assert same_value(5, [5])
    assert not same_value({5}, [5])
    assert not same_value(None, [])


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(os.listdir("/tmp"))
    yield
    assert not Path("/tmp/answer").exists()
    assert not {one for one in set(os.listdir("/tmp")) - before if one.startswith("answer")}
