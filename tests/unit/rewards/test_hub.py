"""The bundled rewards besides those of mathematics, as tables."""

import time

import pytest

from relaxd.rewards import UnknownRewardError, resolve
from tests.kit.cases import each
from tests.unit.rewards.scoring import LONG, score

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


@each(
    ("response", "valid", "form"),
    [
        ('{"name": "Ann"}', 1, 1),
        ('{"name": "Ann", "age": 3}', 1, 1),
        ('{"name": "Ann", "age": 3, "other": []}', 1, 1),
        ('{"name": "Ann", "age": -3}', 0, 1),
        ('{"name": "Ann", "age": "3"}', 0, 1),
        ('{"name": "Ann", "age": 3.0}', 1, 1),
        ('{"name": "Ann", "age": 3.5}', 0, 1),
        ('{"age": 3}', 0, 1),
        ("{}", 0, 1),
        ("[]", 0, 1),
        ("null", 0, 1),
        ('"Ann"', 0, 1),
        ('  {"name": "Änn ☃"}\n', 1, 1),
        ('```json\n{"name": "Ann"}\n```', 1, 1),
        ('Here:\n```\n{"name": "Ann"}\n```\nDone.', 1, 1),
        ('```json\n{}\n```\nbetter:\n```json\n{"name": "Ann"}\n```', 1, 1),
        ('```JSON\n{"name": 3}\n```', 0, 1),
        ('<think>{"name": 3}</think>{"name": "Ann"}', 1, 1),
        ('{"name": "Ann"} is it', 0, 0),
        ("{'name': 'Ann'}", 0, 0),
        ('{"name": "Ann",}', 0, 0),
        ('{"name": NaN}', 0, 0),
        ("", 0, 0),
        ("no", 0, 0),
        ("```json\n", 0, 0),
        ("[" * 100_000, 0, 0),
        ("[" * 900 + "]" * 900, 0, 1),
        ("9" * 100_000, 0, 0),
        ('{"name": "' + "a" * 100_000 + '"}', 1, 1),
        ("```\n" * 30_000, 0, 0),
        ('{"name": "a", "name": 3}', 0, 1),
    ],
)
def test_json_schema(response, valid, form):
    assert score("json_schema", response, schema=SCHEMA) == {"reward": valid, "format": form}


def test_json_schema_is_taken_from_the_prompt_and_never_fetched():
    assert score("json_schema", "3", metadata={"json_schema": {"type": "integer"}})["reward"] == 1
    assert score("json_schema", "3", answer='{"type": "string"}')["reward"] == 0
    with pytest.raises(ValueError, match="there is no schema"):
        score("json_schema", "3")
    with pytest.raises(ValueError, match="is no JSON schema"):
        score("json_schema", "3", schema={"type": "intger"})
    with pytest.raises(LookupError, match=r"refers to http://127\.0\.0\.1:9/x, which isn't in it and isn't fetched"):
        score("json_schema", "3", schema={"$ref": "http://127.0.0.1:9/x"})
    assert score("json_schema", '"' + "a" * 5000 + '!"', schema={"pattern": "^(a|a)*$"})["reward"] == 0


MINE = {"max_tokens": 100, "buffer_tokens": 40}
"""The fall is from 60 tokens on to 100."""


@each(
    ("tokens", "settings", "reward"),
    [
        (1, MINE, 0),
        (59, MINE, 0),
        (60, MINE, 0),
        (61, MINE, -0.025),
        (62, MINE, -0.05),
        (64, MINE, -0.1),
        (68, MINE, -0.2),
        (70, MINE, -0.25),
        (76, MINE, -0.4),
        (80, MINE, -0.5),
        (90, MINE, -0.75),
        (99, MINE, -0.975),
        (100, MINE, -1),
        (101, MINE, -1),
        (1000, MINE, -1),
        (10**9, MINE, -1),
        # another penalty
        (60, MINE | {"penalty": 0.5}, 0),
        (70, MINE | {"penalty": 0.5}, -0.125),
        (80, MINE | {"penalty": 0.5}, -0.25),
        (100, MINE | {"penalty": 0.5}, -0.5),
        (200, MINE | {"penalty": 0.5}, -0.5),
        (80, MINE | {"penalty": 2.0}, -1),
        (80, MINE | {"penalty": 0.0}, 0),
        # the whole length is the fall
        (1, {"max_tokens": 100, "buffer_tokens": 100}, -0.01),
        (50, {"max_tokens": 100, "buffer_tokens": 100}, -0.5),
        # one token is the fall
        (99, {"max_tokens": 100, "buffer_tokens": 1}, 0),
        (100, {"max_tokens": 100, "buffer_tokens": 1}, -1),
        # the paper's lengths
        (16384, {"max_tokens": 20480, "buffer_tokens": 4096}, 0),
        (18432, {"max_tokens": 20480, "buffer_tokens": 4096}, -0.5),
        (20479, {"max_tokens": 20480, "buffer_tokens": 4096}, -4095 / 4096),
        (20480, {"max_tokens": 20480, "buffer_tokens": 4096}, -1),
    ],
)
def test_overlong_is_equation_13_of_dapo(tokens, settings, reward):
    for response in ("", "of any length " * (tokens < 1000)):
        assert score("overlong", response, tokens=tokens, **settings) == pytest.approx({"reward": reward})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "max_tokens = 0, buffer_tokens = 0"),
        ({"max_tokens": 100}, "needs 0 < buffer_tokens <= max_tokens"),
        ({"max_tokens": 100, "buffer_tokens": 101}, "needs 0 < buffer_tokens <= max_tokens"),
        ({"max_tokens": 100, "buffer_tokens": -1}, "needs 0 < buffer_tokens <= max_tokens"),
        (MINE | {"penalty": -1.0}, "penalty >= 0"),
    ],
)
def test_overlong_needs_right_settings_and_the_tokens(settings, message):
    with pytest.raises(ValueError, match=message):
        score("overlong", "", tokens=3, **settings)
    with pytest.raises(ValueError, match=r"overlong needs sample\.tokens"):
        score("overlong", "", **MINE)


ANYTHING = [
    *(
        "",
        " ",
        "\n",
        "5",
        "right",
        "Right",
        "1/2",
        "0.5",
        "1,234",
        "5 cm",
        "[1, 2)",
        "(1, 2]",
        r"\frac{1}{2}",
        r"\boxed{5}",
    ),
    *(r"\boxed{\boxed{5}}", r"\boxed{", "5 or 6", "#### 5", "Answer: 5", "<answer>5</answer>", "<think>", "</think>5"),
    *("Zürich", "北京", "😀", "\u200b", "\0", "nan", "1e999", "__import__('os')", "(" * 100_000, LONG, "9^9^9^9"),
]


@each("response", ANYTHING)
def test_random_and_dummy_read_nothing(response):
    for answer in ("", response):
        assert score("dummy", response, answer) == {"reward": 0}
        drawn = [score("random", response, answer) for _ in range(64)]
        assert {one["reward"] for one in drawn} == {0, 1}  # by chance wrong once in 2**63
        assert all(one.keys() == {"reward"} for one in drawn)


@each(
    ("name", "response", "answer", "reward"),
    [
        ("exact_match", r"so \boxed{Paris}", "Paris", 1),
        ("exact_match", r"\fbox{Paris}", "Paris", 1),
        ("exact_match", r"\boxed{ Paris }", "Paris", 1),
        ("exact_match", r"\boxed{paris}", "Paris", 0),
        ("exact_match", "Paris", "Paris", 0),
        ("exact_match", "", "Paris", 0),
        ("exact_match", r"\boxed{}", "Paris", 0),
        ("exact_match", r"\boxed{Paris", "Paris", 0),
        ("exact_match", r"\boxed{Rome} no: \boxed{Paris}", "Paris", 1),
        ("exact_match", r"\boxed{Paris} no: \boxed{Rome}", "Paris", 0),
        ("exact_match", r"\boxed{\boxed{Paris}}", "Paris", 1),
        ("exact_match", r"\boxed{x = \boxed{Paris}}", "Paris", 1),
        ("exact_match", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1),
        ("exact_match", r"\boxed{\frac{1}{2}}", "0.5", 0),
        ("exact_match", r"\boxed{[1, 2)}", "[1, 2)", 1),
        ("exact_match", r"\boxed{5\text{ cm}}", r"5\text{ cm}", 1),
        ("exact_match", r"\boxed{Zürich}", "Zürich", 1),
        ("f1", r"no \boxed{in Paris}", "Paris", 2 / 3),
        ("f1", r"Paris \boxed{Rome}", "Paris", 0),
        ("f1", "Paris", "Paris", 0),
        ("multiple_choice", r"\boxed{A} or \boxed{P}", "B", 0),
        ("multiple_choice", r"\boxed{B}", "B", 1),
        ("multiple_choice", "B", "B", 0),
        ("multiple_choice", r"<answer>B</answer> \boxed{A}", "B", 0),
        ("gpqa", r"A \boxed{(B)}", "B", 1),
        ("gpqa", r"\boxed{B} A", "A", 0),
        ("addition", r"1 \boxed{1,046} 2", "1046", 1),
        ("addition", "1046", "1046", 0),
        ("regex", r"a \boxed{b} c", "^b$", 1),
        ("regex", "b", "^b$", 0),
        ("json_schema", r'\boxed{{"a": 1}}', '{"required": ["a"]}', 1),
        ("json_schema", '{"a": 1}', '{"required": ["a"]}', 0),
        ("openr1mm", r"<answer>4</answer>\boxed{5}", "5", 1),
        ("dummy", r"\boxed{5}", "5", 0),
        ("exact_match", LONG + r"\boxed{Paris}" + LONG, "Paris", 1),
        ("exact_match", r"\boxed{" * 15_000, "Paris", 0),
        ("exact_match", r"\boxed{" * 15_000 + "Paris" + "}" * 15_000, "Paris", 1),
        ("exact_match", "{" * 100_000 + r"\boxed{Paris}", "Paris", 1),
    ],
)
def test_the_prefix_boxed(name, response, answer, reward):
    assert score(f"boxed_{name}", response, answer)["reward"] == pytest.approx(reward)


def test_the_prefix_boxed_is_refused_where_it_makes_no_sense():
    with pytest.raises(UnknownRewardError, match="math finds the answer in the reply by itself"):
        resolve("boxed_math")
    with pytest.raises(UnknownRewardError, match=r"did you mean boxed_exact_match\?"):
        resolve("boxed_exact_mach")


def test_tags_that_are_never_closed_take_no_time():
    begun = time.process_time()
    for name in ("multiple_choice", "openr1mm"):
        assert score(name, "<answer>" * 20_000, "B")["reward"] == 0
    assert time.process_time() - begun < 2
