"""Replies that paid the wrong reward: each is of a kind that users of such rewards have reported."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relaxd.media.messages import without_thinking
from relaxd.rewards.hub.code import same_output, same_value
from relaxd.rewards.hub.code_cases import code_in
from tests.kit.cases import each
from tests.unit.rewards.scoring import SECONDS, score

BMATRIX, PMATRIX = r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"
PYTHON = (
    "python3.11",
    "{.python}",
    "{.python .numberLines}",
    "{ .py }",
    "python:main.py",
    "Python3",
    "language-python",
)
HALF = r"\begin{bmatrix} 1 & \frac{1}{2} \\ 3 & 4 \end{bmatrix}"
FORMULAS = (
    "sqrt(2)",
    "2pi",
    "x**2",
    "2*pi",
    "sqrt(3)/2",
    "sin(x)",
    "x^10",
    "ln(2)",
    "sqrt((1+x)/2)",
    "|x|",
    "5!",
    "e^x",
    PMATRIX,
)
CASES: list[tuple[str, str, str, int]] = [
    # Without dollars math-verify would read one number of these.
    ("openr1mm", "<answer>10</answer>", "(-6, 10)", 0),
    ("openr1mm", "<answer>$(-6, 10)$</answer>", "(-6, 10)", 1),
    ("openr1mm", "<answer>(-6, 10)</answer>", "$(-6,10)$", 1),
    ("openr1mm", "<answer>$(-6,10)$</answer>", r"\boxed{(-6, 10)}", 1),
    ("openr1mm", "<answer>$2$</answer>", "2x", 0),
    ("openr1mm", "<answer>$2x$</answer>", "2x", 1),
    ("openr1mm", "<answer>7</answer>", "[-2, 7]", 0),
    ("openr1mm", "<answer>n=4 or n=7</answer>", "n=5 or n=7", 0),
    ("openr1mm", "<answer>x=3,y=4</answer>", "x=2,y=4", 0),
    ("openr1mm", "<answer>1 1/2</answer>", "2 1/2", 0),
    ("openr1mm", "<answer>3x+4y+14=0</answer>", "3*x-1*y+13=0", 0),
    ("openr1mm", "<answer>The value is 5</answer>", "5", 1),
    ("openr1mm", "The answer is 5", "5", 1),
    ("openr1mm", "<answer>10 cm</answer>", "10", 1),
    ("openr1mm", r"<answer>\frac12</answer>", "0.5", 1),
    ("openr1mm", "<answer>10</answer>", r"(-6, 10)\text{ units}", 0),
    ("openr1mm", "<answer>(-6, 10)</answer>", r"(-6, 10)\text{ units}", 1),
    ("openr1mm", "<answer>(-6, 10) units</answer>", "(-6, 10)", 1),
    ("openr1mm", "<answer>10</answer>", r"10\text{ cm}^2", 1),
    ("openr1mm", "<answer>10 meters^2</answer>", "10", 1),
    ("openr1mm", "<answer>5 km/h</answer>", "5", 1),
    ("openr1mm", r"<answer>\$100</answer>", "100", 1),
    ("openr1mm", "<answer>100</answer>", r"\$100", 1),
    # Several numbers in a sentence are a list if "or" or "and" joins them, else only the same text is right.
    ("openr1mm", "<answer>7</answer>", "either 5 or 7", 0),
    ("openr1mm", "<answer>7 or 5</answer>", "either 5 or 7", 1),
    ("openr1mm", "<answer>I think that it is 5 or 7</answer>", "7", 0),
    ("openr1mm", "<answer>7</answer>", "between 5 and 7", 0),
    ("openr1mm", "<answer>20</answer>", "3 hours 20 minutes", 0),
    ("openr1mm", "<answer>20</answer>", "$3$ hours $20$ minutes", 0),
    ("openr1mm", "<answer>7, 5</answer>", "$5$ or $7$", 1),
    ("openr1mm", "<answer>5</answer>", "$x = 5$, where $x$ is the side", 1),
    ("openr1mm", "<answer>3 hours 20 minutes</answer>", "3 hours 20 minutes", 1),
    ("openr1mm", "<answer>72</answer>", "She sold 48 / 2 = 24 clips in May.\n#### 72", 1),
    *(
        ("openr1mm", f"<answer>{half}</answer>", "2 1/2", 1)
        for half in ("5/2", "2.5", r"2 \frac{1}{2}", "2\u00bd", "$5/2$")
    ),
    ("openr1mm", "<answer>-2 1/2</answer>", "-5/2", 1),
    ("openr1mm", "<answer>3/2</answer>", "2 1/2", 0),
    ("openr1mm", "<answer>1/2</answer>", "$2 1/2$", 0),
    ("openr1mm", "<answer>1.5e3</answer>", "1500", 1),
    # Formulas without tags, dollars and LaTeX.
    *(("openr1mm", formula, formula, 1) for formula in FORMULAS),
    *(("openr1mm", f"We add.\nSo the answer is: **{formula}**.", formula, 1) for formula in FORMULAS),
    *(
        ("openr1mm", reply, r"\sqrt{2}", 1)
        for reply in ("sqrt(2)", "\u221a2", "It is sqrt(2).", r"<answer>$\sqrt2$</answer>")
    ),
    *(("openr1mm", reply, r"\sqrt{2}", 0) for reply in ("2", "sqrt(3)", "It is 2.", "The answer is sqrt(22).")),
    ("openr1mm", "<answer>pi</answer>", "2pi", 0),
    ("openr1mm", "x", "x**2", 0),
    ("openr1mm", "The point is (-6, 10).", "(-6, 10)", 1),
    ("openr1mm", "It is (-6, 11).", "(-6, 10)", 0),
    ("openr1mm", f"The matrix is {BMATRIX}", PMATRIX, 1),
    ("openr1mm", f"The answer is ${BMATRIX}$", PMATRIX, 1),
    ("openr1mm", f"<answer>2{BMATRIX}</answer>", PMATRIX, 0),
    ("openr1mm", "2", PMATRIX, 0),
    # verl 0.9.1 opens nested braces, and takes a box where there is no "Answer:".
    ("dapo", r"Answer: $\boxed{\frac{1}{2}}$", r"\frac{1}{2}", 1),
    ("dapo", r"Answer: \boxed{\sqrt{2}}", r"\sqrt{2}", 1),
    ("dapo", r"Answer: $\boxed{2^{10}}$", "2^{10}", 1),
    ("dapo", r"Answer: $\boxed{\text{25}}$", "25", 1),
    ("dapo", r"So it is \boxed{25}.", "25", 1),
    ("dapo", r"So it is \boxed{25}.", "52", 0),
    *(("dapo", r"So it is \boxed{25}.", boxed, 1) for boxed in (r"\boxed{25}", r"$\fbox{25}$", r"It is \boxed{25}.")),
    ("dapo", r"So it is \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}", 1),
    ("dapo", r"So it is \boxed{52}.", r"\boxed{25}", 0),
    ("dapo", r"Answer: \text{\frac{1}{2}}", r"\frac{1}{2}", 1),
    ("dapo", r"Answer: \boxed{\boxed{25}}", "25", 1),
    ("dapo", r"Answer: \overline{\text{AB}}", "AB", 1),
    ("dapo", "\\boxed{25}\nAnswer: 24", "25", 0),
    ("math", rf"\boxed{{{BMATRIX}}}", PMATRIX, 1),
    ("math", rf"\boxed{{{HALF}}}", r"\begin{pmatrix}1&0.5\\3&4\end{pmatrix}", 1),
    ("math", rf"\boxed{{{HALF}}}", r"\left(\begin{array}{cc}1&\frac12\\3&4\end{array}\right)", 1),
    ("math", rf"\boxed{{{HALF}}}", r"\begin{pmatrix}1&0.5\\3&5\end{pmatrix}", 0),
    ("math", rf"\boxed{{{BMATRIX}}}", r"\begin{pmatrix}1&2\end{pmatrix}", 0),
    ("math", r"\boxed{\begin{vmatrix}1\end{vmatrix}}", r"\begin{pmatrix}1\end{pmatrix}", 0),
    ("math", r"\boxed{1e3}", "1000", 1),
    ("math", r"\boxed{0.015}", "1.5e-2", 1),
    ("math", r"\boxed{1e3}", "1001", 0),
    *(
        ("math", rf"\boxed{{{name}{BMATRIX}}}", PMATRIX, 1)
        for name in ("A = ", r"\mathbf{A} = ", r"\vec{v}=", "A_1=", "$A=")
    ),
    ("math", rf"\boxed{{{PMATRIX}}}", f"A = {BMATRIX}.", 1),
    ("math", r"\boxed{A=\begin{pmatrix}1\\3\end{pmatrix}}", PMATRIX, 0),
    ("math", rf"\boxed{{A^{{-1}} = {BMATRIX}}}", f"A^{{-1}} = {PMATRIX}", 1),
    ("math", rf"\boxed{{A^{{-1}} = {BMATRIX}}}", PMATRIX, 0),
    ("math", rf"\boxed{{\frac12 {BMATRIX}}}", rf"\frac{{1}}{{2}}{PMATRIX}", 1),
    ("math", rf"\boxed{{2{BMATRIX}}}", PMATRIX, 0),
    ("math", rf"\boxed{{{BMATRIX}, {PMATRIX}}}", rf"{PMATRIX},\ {PMATRIX}", 1),
    ("math", r"\boxed{\[\displaystyle \begin{pmatrix} 1 \cr 2 \\ \end{pmatrix}\]}", PMATRIX, 1),
    ("math", r"\boxed{x = 1e3}", "1000", 1),
    ("math", r"\boxed{1000}", "x = 1e3", 1),
    ("math", r"\boxed{x = 1.5e-2}", "0.015", 1),
    ("math", r"\boxed{x = 1e3}", "1001", 0),
    ("math", r"\boxed{(1e3, +2E+2)}", "(1000, 200)", 1),
    ("math", r"\boxed{1e3 \text{ m}}", "1000", 1),
    ("math", r"\boxed{1e3 or 2e3}", "1000, 2000", 1),
    ("math", r"\boxed{x+2e3}", "x+2000", 0),  # e is a letter of formulas
    # A name is dropped only where an answer begins with it.
    ("math", r"\boxed{10x=5}", "15", 0),
    ("math", r"\boxed{10x=5}", "105", 0),
    ("math", r"\boxed{xyz=5}", "x5", 0),
    *(
        (name, f"<{tag}>The answer is B.{end}", "B", 0)
        for name in ("multiple_choice", "gpqa")
        for tag, end in (("thinking", "</thinking> I choose (C)."), ("Think", "</Think>I choose C"), ("thinking", ""))
    ),
    ("multiple_choice", "<think>The answer is B.</think>I choose (C).", "B", 0),
    ("multiple_choice", "<think>Perhaps the answer is B. But let me check option C more", "B", 0),
    ("multiple_choice", "Perhaps the answer is B.</think>So (C)", "B", 0),
    ("multiple_choice", "<think>The answer is B.</think>The answer is C.", "C", 1),
]


@each(("name", "response", "answer", "expected"), CASES)
def test_the_reward_is_right(name: str, response: str, answer: str, expected: int) -> None:
    assert score(name, response, answer)["accuracy"] == expected


@pytest.mark.parametrize(("thinking", "right"), [("", 1), ("<think>", 0), ("<thinking>", 0), ("<think></think>", 1)])
def test_json_in_unfinished_thinking_is_none(thinking: str, right: int) -> None:
    metadata = {"json_schema": {"type": "array"}}
    assert score("json_schema", f"{thinking}\n```json\n[1]\n```", metadata=metadata)["reward"] == right


def test_math_verify_says_nothing_of_its_limits(capfd: pytest.CaptureFixture[str]) -> None:
    """It warned in the log of every reward worker; ours are in their place."""
    program = (
        "from relaxd.rewards import RewardInput, resolve\n"
        "resolve('openr1mm')(RewardInput('', '<answer>$\\\\frac{1}{2}$</answer>', '$0.5$', {}, tokens=1))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert capfd.readouterr().err == ""


def test_null_among_the_targets_is_no_target() -> None:
    metadata: dict[str, Any] = {"reward_model": {"ground_truth": {"target": ["Paris", None]}}}
    assert score("search_r1", "<answer>None</answer>", metadata=metadata)["accuracy"] == 0
    assert score("search_r1", "<answer>paris</answer>", metadata=metadata)["accuracy"] == 1


@each(
    ("printed", "expected", "same"),
    [
        ("1000000006.0", "1000000006", True),
        ("999990006.99993", "1000000006", False),  # 1000000007 * 0.99999
        ("1e9", "1000000006", False),
        ("1e3", "1000", False),
        ("4", "4.0", True),
        ("0.33333334", "0.3333333333", True),
        ("inf", "3", False),
        ("4.", "4", True),
        ("+4", "4", True),
        ("-0.0", "0", True),
        ("--5.0", "5", False),
        ("\u00b2.0", "2", False),
        ("2", "\u00b2", False),
        ("5.0", "--5", False),
        (f"{'7' * 5000}.0", "7" * 5000, True),
        (f"{'7' * 5000}.0", "5", False),
        ("1.0", "001", False),
        ("1_0", "10.0", False),
        ("1e999", f"{'7' * 500}.5", False),
    ],
)
def test_an_expected_whole_number_is_exact(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


def test_only_a_list_of_one_value_stands_for_its_value() -> None:
    assert same_value(0, [0])
    assert not same_value(0, [0, 1])
    assert same_value((0, 1), [0, 1])


@each(
    ("reply", "code"),
    [
        ("```python\na = 1\n```\nIt prints:\n```\n1\n```", "a = 1\n"),
        ("```\na = 1\n```\n```json\n{}\n```", "a = 1\n"),
        ("~~~python\na = 1\n~~~", "a = 1\n"),
        ("````python\ns = '''```'''\n````", "s = '''```'''\n"),
        ("```python title=x\na = 1", "a = 1"),
        # Lists and quotes.
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n2. Done.", "def f():\n    return 1\n"),
        ("1. ```python\n   def f():\n       return 1\n   ```\n2. Done.", "def f():\n    return 1\n"),
        ("- ```python\n  def f():\n      return 1\n  ```", "def f():\n    return 1\n"),
        ("1. ```python\ndef f():\n  return 1\n```", "def f():\n  return 1\n"),
        ("- Code: ```python\n  a = 1\n  ```", "a = 1\n"),
        ("\t```python\n\ta = 1\n\t```", "a = 1\n"),
        ("> ```python\n> a = 1\n>\n> b = 2\n> ```\nYes.", "a = 1\n\nb = 2\n"),
        # No fences.
        ("It takes ~~~5 ms.\n```python\na = 1\n```", "a = 1\n"),
        ("~~~ about 5 ms\n```python\na = 1\n```", "a = 1\n"),
        ("Plan\n~~~~\n```python\na = 1\n```", "a = 1\n"),
        ("Call ```f(1)``` first\n```\na = 1\n```", "a = 1\n"),
        ("```f(1)``` is called\n```\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\nIt has ```python fences.", "a = 1\n"),
        ("```python\ns = '```'\nprint(s)\n```", "s = '```'\nprint(s)\n"),
        ("```python\ns = '''\n    ```\n'''\n```", "s = '''\n    ```\n'''\n"),
        # Fences at odd places.
        ("<answer>```python\n    return 1\n```</answer>", "    return 1\n"),
        ("Code: ```\na = 1\n```", "a = 1\n"),
        ("```python\na = 1```\nIt prints:\n```\n1\n```", "a = 1"),
        ("```python\na = 1```</answer>", "a = 1"),
        ("```python\na = 1\n```python\nb = 2\n```", "b = 2\n"),
        # Names of Python.
        *((f"```{name}\na = 1\n```\nIt prints:\n```\n1\n```", "a = 1\n") for name in PYTHON),
        *((f"```py\na = 1\n```\nIt prints:\n```{name}\n1\n```", "a = 1\n") for name in ("pycon", "python-repl")),
        # Thinking.
        ("```python\nprint('<think>')\n```", "print('<think>')\n"),
        ("```python\na = 1\n```\n<think>\n```python\nb = 2\n```", "a = 1\n"),
    ],
)
def test_code_is_found_in_its_fence(reply: str, code: str) -> None:
    assert code_in(reply) == (code, True)


@pytest.mark.parametrize("fence", ["", "\n```python\n"])
@pytest.mark.parametrize("tag", ["<think>", "<thinking>"])
def test_code_in_unfinished_thinking_is_none(tag: str, fence: str) -> None:
    assert code_in(f"{tag}{fence}print(9)\n```") == ("", False)


@each(
    ("reply", "said"),
    [
        ("a<think>b</think>c", "ac"),
        ("a</think>b<think>c</think>d", "bd"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("a<think>b", "a"),
        ("<thinking>a</thinking>b<THINK>c", "b"),
        ("<think", "<think"),
    ],
)
def test_thinking_is_removed(reply: str, said: str) -> None:
    assert without_thinking(reply) == said


@each("line", ["~~~\n", "> ", "1. ", "```python\n", "`", "x: ```\n", "```x```\n"])
def test_code_is_found_in_linear_time(line: str) -> None:
    began = time.process_time()
    code_in(line * (100_000 // len(line)))
    assert time.process_time() - began < SECONDS


@pytest.fixture
def punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of nltk's sentence splitter without learned abbreviations: none can be downloaded here."""
    pytest.importorskip("if_verifiable", reason="the extra ifeval is not installed")
    import nltk

    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])


@pytest.mark.parametrize(
    ("instruction", "arguments", "response", "follows"),
    [
        # IFBench's own tests.
        ("words:words_position", {"keyword": "hello"}, "Start Hello middle HELLO end", 1),
        ("words:words_position", {"keyword": "hello"}, "Start hello middle hello end.", 1),
        ("words:words_position", {"keyword": "hello"}, "hello middle hello end", 0),
        ("words:words_position", {"keyword": "hello"}, "hello", 0),
        ("words:keywords_specific_position", {"keyword": "test", "n": 1, "m": 1}, "TEST is here.", 1),
        ("words:keywords_specific_position", {"keyword": "test", "n": 2, "m": 2}, "One here. So, test it.", 1),
        ("words:keywords_specific_position", {"keyword": "test", "n": 3, "m": 1}, "One here. Test it.", 0),
        ("format:title_case", {}, "I Am A Test", 1),
        ("format:title_case", {}, "i Am A Test", 0),
        ("format:title_case", {}, "Test (With Parentheses), 123 Numbers!", 1),
        ("format:title_case", {}, "Test with Words", 0),
        ("format:quote_unquote", {}, '"Be" is a verb. "So" is none of them.', 1),
        ("format:quote_unquote", {}, 'He said "so"', 0),
        ("format:quote_unquote", {}, '"Be" "so"', 0),
        ("format:quote_unquote", {}, "123...", 1),
    ],
)
@pytest.mark.usefixtures("punkt")
def test_ifbench_checks_as_its_authors_do(
    instruction: str, arguments: dict[str, Any], response: str, follows: int
) -> None:
    metadata = {"instruction_id_list": [instruction], "kwargs": [arguments]}
    assert score("ifbench", response, metadata=metadata)["accuracy"] == follows
