"""The bundled rewards besides those of mathematics, as tables."""

import time

import pytest

from relaxd.rewards import RewardInput, UnknownRewardError, check_output, resolve

LONG = "so we think about it. " * 5000


def score(name, response, answer="", metadata=None, tokens=0, **settings):
    sample = RewardInput(prompt="", response=response, answer=answer, metadata=metadata or {}, tokens=tokens)
    output = check_output(resolve(name, settings)(sample))
    return {"reward": output.reward, **output.parts}


@pytest.mark.parametrize(
    ("response", "answer", "accuracy", "form"),
    [
        ("#### 72", "72", 1, 1),
        ("so\n#### 72", "48/2 = 24\n#### 72", 1, 1),
        ("####72.", "72", 1, 1),
        ("#### $1,072.50", "1072.5", 1, 1),
        ("#### -3", "-3", 1, 1),
        ("#### 71\n#### 72", "72", 1, 1),
        ("#### 72\n#### 71", "72", 0, 1),
        ("72", "72", 0, 0),
        ("#### none", "72", 0, 0),
        ("", "72", 0, 0),
        ("#### 72" + LONG, "72", 0, 0),
        ("#### 1.2.3", "72", 0, 1),
    ],
)
def test_gsm8k(response, answer, accuracy, form):
    assert score("gsm8k", response, answer) == {"reward": accuracy, "accuracy": accuracy, "format": form}


@pytest.mark.parametrize(
    ("response", "settings", "expected"),
    [
        ("<think>a</think> b", {"pattern": r"(?s)<think>.*</think>"}, 1),
        ("a\nb", {"pattern": "a.b"}, 0),
        (" 12 ", {"pattern": "[0-9]+", "full": True}, 1),
        ("12a", {"pattern": "[0-9]+", "full": True}, 0),
        ("12a", {"pattern": "[0-9]+"}, 1),
        ("", {"pattern": "x"}, 0),
        ("abc", {}, 1),
    ],
)
def test_regex(response, settings, expected):
    assert score("regex", response, "b", **settings)["reward"] == expected


def test_a_regex_that_hangs_is_no_match(monkeypatch):
    monkeypatch.setattr("relaxd.rewards.hub.regex.MATCH_SECONDS", 0.2)
    assert score("regex", "a" * 5000 + "!", pattern="(a|a)*$", full=True) == {"reward": 0, "too_slow": 1}
    with pytest.raises(ValueError, match=r"is no regular expression: missing \)"):
        score("regex", "a", pattern="(")
    with pytest.raises(ValueError, match="there is no pattern"):
        score("regex", "a")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("tokens", "reward"), [(1, 0), (60, 0), (70, -0.25), (80, -0.5), (100, -1), (101, -1), (1000, -1)]
)
def test_overlong_is_equation_13_of_dapo(tokens, reward):
    assert score("overlong", "", tokens=tokens, max_tokens=100, buffer_tokens=40) == {"reward": reward}
    halved = score("overlong", "", tokens=tokens, max_tokens=100, buffer_tokens=40, penalty=0.5)
    assert halved == {"reward": reward / 2}


def test_overlong_needs_its_settings_and_the_tokens():
    with pytest.raises(ValueError, match="needs 0 < buffer_tokens <= max_tokens"):
        score("overlong", "", tokens=3)
    with pytest.raises(ValueError, match=r"overlong needs sample.tokens"):
        score("overlong", "", max_tokens=100, buffer_tokens=40)


def test_random_and_dummy():
    assert {score("random", "")["reward"] for _ in range(64)} == {0, 1}
    assert score("dummy", "right", "right") == {"reward": 0}


@pytest.mark.parametrize(
    ("name", "response", "reward"),
    [
        ("boxed_exact_match", r"so \boxed{Paris}", 1),
        ("boxed_exact_match", "Paris", 0),
        ("boxed_f1", r"no \boxed{in Paris}", 2 / 3),
        ("boxed_multiple_choice", r"\boxed{A} or \boxed{P}", 0),
    ],
)
def test_the_prefix_boxed(name, response, reward):
    answer = "B" if "choice" in name else "Paris"
    assert score(name, response, answer)["reward"] == pytest.approx(reward)


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


# --- ifeval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "instructions", "arguments", "followed"),
    [
        ("one, two", ["punctuation:no_comma"], [{}], 0),
        ("one two", ["punctuation:no_comma"], [None], 1),
        ("one two", ["punctuation:no_comma", "change_case:english_capital"], [{}, {}], 0.5),
        ("ONE TWO IS ENGLISH", ["punctuation:no_comma", "change_case:english_capital"], [{}, {}], 1),
        ("one " * 20, ["length_constraints:number_words"], [{"num_words": 10, "relation": "at least"}], 1),
        ("one " * 5, ["length_constraints:number_words"], [{"num_words": 10, "relation": "at least", "x": None}], 0),
        ('"quoted"', ["startend:quotation"], None, 1),
        ("<think>a, b</think>one two", ["punctuation:no_comma"], [{}], 1),
        ('{"a": 1}', ["detectable_format:json_format"], [{}], 1),
        ("", ["punctuation:no_comma"], [{}], 0),
    ],
)
def test_ifeval(response, instructions, arguments, followed):
    metadata = {"instruction_id_list": instructions, "kwargs": arguments}
    scored = score("ifeval", response, metadata=metadata)
    assert (scored["reward"], scored["followed"]) == (followed == 1, followed)


@pytest.mark.parametrize(
    ("response", "names", "arguments", "followed"),
    [
        ("onetwothree", ["format:no_whitespace"], [{}], 1),
        ("one two", ["format:no_whitespace"], [{}], 0),
        ("<think>one two</think>onetwo", ["format:no_whitespace"], [{"N": None}], 1),
        ("Sum: 7, 14, 21", ["count:numbers", "format:no_whitespace"], [{"N": 3}, {}], 0.5),
    ],
)
def test_ifbench(response, names, arguments, followed):
    metadata = {"instruction_id_list": names, "kwargs": arguments}
    scored = score("ifbench", response, metadata=metadata)
    assert (scored["reward"], scored["followed"]) == (followed == 1, followed)


def test_ifbench_names_what_only_ifeval_knows():
    with pytest.raises(ValueError, match="'punctuation:no_comma', which ifbench doesn't know"):
        score("ifbench", "one", metadata={"instruction_id_list": ["punctuation:no_comma"]})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "instruction_id_list is None"),
        ({"instruction_id_list": []}, "needs a list of instructions"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "'punctuation:no_coma', which ifeval doesn't know"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "must be a list of 1 objects"),
    ],
)
def test_ifeval_gives_no_silent_zero(metadata, message):
    with pytest.raises(ValueError, match=message):
        score("ifeval", "one", metadata=metadata)
