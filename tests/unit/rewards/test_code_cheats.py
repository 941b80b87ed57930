"""Answers to the reward `code` that try to decide their own tests, and honest ones that look like these."""

from typing import Any

import pytest

from relaxd.rewards import RewardInput, check_output, resolve
from tests.unit.rewards.scoring import LIMITS

ABS = {"test": "def check(candidate):\n    assert abs(candidate(2) - 4.0) < 1e-6\n", "entry_point": "f"}
SET = {"test_list": ["assert set(f((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))"]}
RANGE = {
    "test": "def check(candidate):\n    for i in range(5):\n        assert candidate(i) == i * i",
    "entry_point": "f",
}
MATH = {"test_list": ["assert math.isclose(f(2), 4.0)"]}
IMPORTED = {"test_list": ["assert isclose(f(2), 4.0)"], "test_imports": ["from math import isclose"]}
STARRED = {"test_list": ["assert isclose(f(2), 4.0)"], "test_setup_code": "from math import *"}
UNIMPORTED = {"test": "def check(candidate):\n    assert isclose(candidate(2), 4.0)", "entry_point": "f"}
MAPPED = {
    "test": "def check(candidate):\n    for x, y in zip(map(candidate, [1, 2]), [1, 4]):\n        assert x == y",
    "entry_point": "f",
}
HELPED = {
    "prompt_text": "import math\n\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\n"
    'def f(xs):\n    """Find a zero of poly."""\n',
    "test": "def check(candidate):\n    assert math.fabs(poly([1, 2], candidate([1, 2]))) < 1e-4",
    "entry_point": "f",
}
TWO = {
    "prompt_text": 'def encode(x):\n    """Add 1."""\n\ndef f(x):\n    """Undo encode."""\n',
    "test": "def check(candidate):\n    assert encode(1) == 2 and candidate(encode(1)) == 1",
    "entry_point": "f",
}
STUB = {"prompt_text": "def g():\n    return 4\n\ndef f(x):\n    # the square", **ABS}
SUM = {"test_list": ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]}
CALL = {"answer": '{"inputs": ["2"], "outputs": ["4"], "fn_name": "f"}'}
EQUAL = "class {}({}):\n    def __eq__(self, x): return True\n"
WRONG = "def f(*x): return 1\n"
TEXT = {"test_list": ["assert f(2) == 'expected-value'"]}
SEARCH = "import gc, sys\ndef f(*x):\n    needle = '-'.join(['expected', 'value'])\n    {}\n"

CHEATS: dict[str, tuple[str, dict[str, Any]]] = {
    "set": (WRONG + "def set(x): return 0", SET),
    "set, as a class": (EQUAL.format("set", "") + "    def __init__(self, x): pass\n" + WRONG, SET),
    "abs": (WRONG + "def abs(x): return 0", ABS),
    "abs, in a prompt's function": (WRONG + "def abs(x): return 0", STUB),
    "range": (WRONG + "def range(n): return []", RANGE),
    "a value": (WRONG + "range = abs = set = isclose = math = None", RANGE),
    "the builtins' module": ("import builtins\nbuiltins.abs = lambda x: 0\n" + WRONG, ABS),
    "a module": ("class math:\n    isclose = staticmethod(lambda *x: True)\n" + WRONG, MATH),
    "another module by its name": ("import operator as math\nmath.isclose = lambda *x: True\n" + WRONG, MATH),
    "a module among those imported": ("import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *x: True\n"
                                      "sys.modules['math'] = m\nimport math\n" + WRONG, MATH),
    "a module patched": ("import math\nmath.isclose = lambda *x: True\n" + WRONG, MATH),
    "operators patched": ("import operator\noperator.eq = lambda *x: True\n" + WRONG, SET),
    "what the tests import": (WRONG + "def isclose(*x): return True", IMPORTED),
    "what the tests import with a star": (WRONG + "def isclose(*x): return True", STARRED),
    "what the tests forgot to import": (WRONG + "def isclose(*x): return True", UNIMPORTED),
    "the end of an iteration": ("def f(x): raise StopIteration", MAPPED),
    "a function of the prompt": ("def poly(xs, x): return 0\n" + WRONG, HELPED),
    "a module of the prompt": ("class math:\n    fabs = staticmethod(lambda x: 0)\n" + WRONG, HELPED),
    "a prompt's function without a body": ("x = 1", STUB),
    "the checker": (WRONG + "def check(candidate): pass", ABS),
    "an assertion that cannot fail": (WRONG + "AssertionError = None\n__debug__x = False", ABS),
    "other builtins": (WRONG + "__builtins__ = {'abs': lambda x: 0}", ABS),
    "a name for everything": (WRONG + "def __getattr__(name): return lambda *x: 0", ABS),
    "a number that is no number": ("def f(x): return float('nan')", {"test_list": ["assert f(2) == 4"]}),
    "a float equal to everything": (EQUAL.format("F", "float") + "    __lt__ = __eq__\ndef f(x): return F(1)", ABS),
    "a list equal to everything": (EQUAL.format("L", "list") + "def f(*x): return L([1])", SET),
    "text equal to everything": (EQUAL.format("S", "str") + "def f(x): return S('1')", CALL),
    "values in memory": (SEARCH.format("return needle if needle in repr(gc.get_objects()) else 0"), TEXT),
    "values in frames": (SEARCH.format("g = sys._getframe(1)\n    while g:\n        if needle in repr(g.f_locals): "
                                       "return needle\n        g = g.f_back"), TEXT),
    "the tests' sources": (SEARCH.format("import linecache\n    return 4.0 if linecache.cache else 1"), ABS),
    "a marker on every descriptor": ("import os\nfor n in range(64):\n    try: os.write(n, b'{\"passed\": true}\\n')\n"
                                     "    except OSError: pass\n" + WRONG, ABS),
    "an end": ("import os\ndef f(x): os._exit(0)", ABS),
    "an exit": ("def f(x): raise SystemExit(0)", ABS),
    "an answer within its answer": ("def f(x): return {'passed': True}", ABS),
}  # fmt: skip
HONEST: dict[str, tuple[str, dict[str, Any]]] = {
    "abs of its own": ("def abs(x): return -x if x < 0 else x\ndef f(x): return abs(-x) ** 2.0", ABS),
    "no module imported": ("def f(x): return x ** 2", MATH),
    "a module by another name": ("import operator as math\ndef f(x): return math.mul(x, x)", MATH),
    "names imported": ("def f(x): return x * x", IMPORTED),
    "names not imported": ("def f(x): return x * x", UNIMPORTED),
    "an iteration": ("def f(x): return x * x", MAPPED),
    "the prompt's functions": ("def f(xs):\n    return -0.5", HELPED),
    "the prompt's functions, completed": ("    return -0.5", HELPED),
    "two functions to write": ("def encode(x):\n    return x + 1\n\ndef f(x):\n    return x - 1", TWO),
    "a function named like a builtin": ("def sum(a, b):\n    total = 0\n    for x in range(1, a + 1):\n"
                                        "        total += x * (a % x == b % x == 0)\n    return total", SUM),
    "a comment for a body": ("def f(x): return x * x", STUB),
    "functions named like others of the library": ("def add(a, b): return a + b + 1\ndef search(a): return [a]",
                                                   {"test_list": ["assert add(1, 2) == 4", "assert search(1) == [1]"]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def reward():
    return resolve("code", LIMITS)


def score(reward: Any, code: str, tests: dict[str, Any]) -> float:
    """Return the reward of an answer."""
    metadata = {key: value for key, value in tests.items() if key != "answer"}
    reply = f"```python\n{code}\n```"
    return check_output(reward(RewardInput("p", reply, answer=tests.get("answer", ""), metadata=metadata))).reward


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_not_paid(reward, name):
    assert score(reward, *CHEATS[name]) == 0


@pytest.mark.parametrize("name", HONEST)
def test_honest_answers_are_paid(reward, name):
    assert score(reward, *HONEST[name]) == 1


def test_the_same_process_takes_no_builtins_from_an_answer_either():
    together = resolve("code", LIMITS | {"separate": False})
    for name in ("set", "abs", "range", "a module", "what the tests import", "what the tests forgot to import"):
        assert score(together, *CHEATS[name]) == 0
    for name in ("abs of its own", "no module imported", "a function named like a builtin", "the prompt's functions"):
        assert score(together, *HONEST[name]) == 1


def test_no_argument_tells_what_is_expected(reward):
    """The prompt's own function computes it, and runs with the tests."""
    told = (
        "seen = []\ndef poly(xs, x):\n    seen.append(x)\n    return 0\ndef f(xs):\n    return seen[-1] if seen else 1"
    )
    tests = HELPED | {
        "test": "def check(candidate):\n    y = poly([1, 2], 1)\n    assert candidate(poly([1, 2], -0.5)) == y"
    }
    assert score(reward, told, tests) == 0


def test_tests_of_nothing_but_builtins_name_the_function():
    reward = resolve("code", LIMITS)
    tests = {"test_list": ["assert len(sum(1, 2)) == 2"]}
    with pytest.raises(
        ValueError, match=r"only names of builtins \(len, sum\): name the tested function in metadata.entry"
    ):
        score(reward, "def sum(a, b): return [a, b]", tests)
    assert score(reward, "def sum(a, b): return [a, b]", tests | {"entry_point": "sum"}) == 1
