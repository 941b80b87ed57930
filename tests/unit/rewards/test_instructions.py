# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The rewards of verifiable instructions, as tables. Expected is what the instructions' own words say."""

import pytest

from relaxd.rewards import RewardInput, resolve
from tests.unit.rewards.scoring import LONG, score

COMMA, CAPITALS, SMALL = "punctuation:no_comma", "change_case:english_capital", "change_case:english_lowercase"
WORDS, LETTERS, KEYWORD = "length_constraints:number_words", "keywords:letter_frequency", "keywords:existence"
ELEVEN = {"num_words": 11, "relation": "less than"}


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    """Import the checkers and load their languages, so that no case is charged for it."""
    import if_verifiable.ifbench  # noqa: F401

    metadata = {"instruction_id_list": [COMMA]}
    resolve("ifeval", {})(RewardInput(prompt="", response="", answer="", metadata=metadata, tokens=0))


@pytest.fixture(autouse=True)
def _little_time_for_what_is_wrong(request, monkeypatch):
    if (
        hasattr(request.node, "callspec") and request.node.callspec.params.get("followed") == 0
    ):  # some would compute for long
        monkeypatch.setattr("relaxd.rewards.hub.instructions.CHECK_SECONDS", 0.3)


@pytest.mark.parametrize(
    ("response", "instructions", "arguments", "followed"),
    [
        ("one, two", [COMMA], [{}], 0),
        ("one two", [COMMA], [None], 1),
        ("one two", [COMMA, CAPITALS], [{}, {}], 0.5),
        ("one, two", [COMMA, CAPITALS], [{}, {}], 0),
        ("ONE TWO IS ENGLISH", [COMMA, CAPITALS], [{}, {}], 1),
        ("this is written in small english letters", [SMALL], [{}], 1),
        ("This is not", [SMALL], [{}], 0),
        ("one " * 20, [WORDS], [{"num_words": 10, "relation": "at least"}], 1),
        ("one " * 10, [WORDS], [{"num_words": 10, "relation": "at least"}], 1),
        ("one " * 5, [WORDS], [{"num_words": 10, "relation": "at least", "x": None}], 0),
        ("one " * 10, [WORDS], [ELEVEN], 1),
        ("one " * 11, [WORDS], [ELEVEN], 0),
        ('"quoted"', ["startend:quotation"], None, 1),
        ('"quoted', ["startend:quotation"], None, 0),
        ("it is done. Bye!", ["startend:end_checker"], [{"end_phrase": "Bye!"}], 1),
        ("Bye! it is done", ["startend:end_checker"], [{"end_phrase": "Bye!"}], 0),
        ('{"a": 1}', ["detectable_format:json_format"], [{}], 1),
        ("{a: 1}", ["detectable_format:json_format"], [{}], 0),
        ("<<Song>>\nla", ["detectable_format:title"], [{}], 1),
        ("<Song>\nla", ["detectable_format:title"], [{}], 0),
        ("* a\n* b", ["detectable_format:number_bullet_lists"], [{"num_bullets": 2}], 1),
        ("* a\n* b\n* c", ["detectable_format:number_bullet_lists"], [{"num_bullets": 2}], 0),
        ("*a* and *b*", ["detectable_format:number_highlighted_sections"], [{"num_highlights": 2}], 1),
        ("[name] at [place]", ["detectable_content:number_placeholders"], [{"num_placeholders": 2}], 1),
        ("[name] at place", ["detectable_content:number_placeholders"], [{"num_placeholders": 2}], 0),
        ("Hi\n\nP.S. call me", ["detectable_content:postscript"], [{"postscript_marker": "P.S."}], 1),
        ("one ****** two", ["combination:two_responses"], [{}], 1),
        ("one ****** one", ["combination:two_responses"], [{}], 0),
        ("Say it. It is said.", ["combination:repeat_prompt"], [{"prompt_to_repeat": "Say it."}], 1),
        ("a sea of trees", [KEYWORD], [{"keywords": ["sea", "trees"]}], 1),
        ("a sea", [KEYWORD], [{"keywords": ["sea", "trees"]}], 0),
        ("a sea", ["keywords:forbidden_words"], [{"forbidden_words": ["sea"]}], 0),
        ("a season", ["keywords:forbidden_words"], [{"forbidden_words": ["sea"]}], 1),
        ("zzz", [LETTERS], [{"letter": "z", "let_frequency": 3, "let_relation": "at least"}], 1),
        ("zz", [LETTERS], [{"letter": "z", "let_frequency": 3, "let_relation": "at least"}], 0),
        # thinking, nothing, unicode
        ("<think>a, b</think>one two", [COMMA], [{}], 1),
        ("<think>a b</think>one, two", [COMMA], [{}], 0),
        ("<think>one two", [COMMA], [{}], 0),
        ("", [COMMA], [{}], 0),
        (" \n", [COMMA], [{}], 0),
        ("eins、zwei，drei", [COMMA], [{}], 1),
        ("Äpfel und Öl", [KEYWORD], [{"keywords": ["äpfel"]}], 1),
        # long, and made to hang
        (LONG, [COMMA], [{}], 1),
        (LONG + ",", [COMMA], [{}], 0),
        ("[" * 100_000, ["detectable_content:number_placeholders"], [{"num_placeholders": 1}], 0),
        ("<<" * 50_000, ["detectable_format:title"], [{}], 0),
        ("a" * 3000 + "!", [KEYWORD], [{"keywords": ["(a|a)*$b"]}], 0),
        ("[" * 100_000, ["detectable_format:json_format"], [{}], 0),
    ],
)
def test_ifeval(response, instructions, arguments, followed):
    metadata = {"instruction_id_list": instructions, "kwargs": arguments}
    scored = score("ifeval", response, metadata=metadata)
    assert (scored["reward"], scored["accuracy"], scored["followed"]) == (followed == 1, followed == 1, followed)


@pytest.mark.parametrize(
    ("response", "names", "arguments", "followed"),
    [
        ("onetwothree", ["format:no_whitespace"], [{}], 1),
        ("one two", ["format:no_whitespace"], [{}], 0),
        ("one\u00a0two", ["format:no_whitespace"], [{}], 0),
        ("<think>one two</think>onetwo", ["format:no_whitespace"], [{"N": None}], 1),
        ("Sum: 7, 14, 21", ["count:numbers", "format:no_whitespace"], [{"N": 3}, {}], 0.5),
        ("1,234 and 1.5", ["count:numbers"], [{"N": 2}], 1),
        ("1/2", ["count:numbers"], [{"N": 2}], 0),
        ("none", ["count:numbers"], [{"N": 0}], 1),
        ("one two two", ["count:unique_word_count"], [{"N": 2}], 1),
        ("one One, one.", ["count:unique_word_count"], [{"N": 2}], 0),
        ("this and that, but not so", ["count:conjunctions"], [{"small_n": 3}], 1),
        ("this and that and so on", ["count:conjunctions"], [{"small_n": 3}], 0),
        ("Emma met Liam", ["count:person_names"], [{"N": 2}], 1),
        ("Emma met Emma", ["count:person_names"], [{"N": 2}], 0),
        ("I told him, she/her too", ["count:pronouns"], [{"N": 4}], 1),
        ("nobody", ["count:pronouns"], [{"N": 1}], 0),
        ("Apes buy cars", ["words:alphabet"], [{}], 1),
        ("Zebras are big", ["words:alphabet"], [{}], 1),
        ("Apes can", ["words:alphabet"], [{}], 0),
        ("a bad cat", ["words:vowel"], [{}], 1),
        ("I am of use", ["words:vowel"], [{}], 0),
        ("strong trees stand", ["words:consonants"], [{}], 1),
        ("a tree", ["words:consonants"], [{}], 0),
        ("It is the odd sea", ["words:prime_lengths"], [{}], 1),
        ("four", ["words:prime_lengths"], [{}], 0),
        ("a b a b a", ["words:repeats"], [{"small_n": 3}], 1),
        ("a b a b a", ["words:repeats"], [{"small_n": 2}], 0),
        ("big cats dance", ["words:no_consecutive"], [{}], 1),
        ("big bats dance", ["words:no_consecutive"], [{}], 0),
        ("a\nb\nc", ["format:newline"], [{}], 1),
        ("a b\nc", ["format:newline"], [{}], 0),
        ("((([{x}])))", ["format:parentheses"], [{}], 1),
        ("((([x])))(", ["format:parentheses"], [{}], 0),
        ("a\n b\n  c", ["format:line_indent"], [{}], 1),
        ("a\n b\n c", ["format:line_indent"], [{}], 0),
        ("Yes!", ["format:options"], [{"options": "yes/no/maybe"}], 1),
        ("perhaps", ["format:options"], [{"options": "yes/no/maybe"}], 0),
        ("Why? What?! Yes. No, not; so: oh!", ["count:punctuation"], [{}], 1),
        ("14, 21, 28, 35, 42, 49", ["custom:multiples"], [{}], 1),
        ("7, 14, 21, 28, 35, 42, 49", ["custom:multiples"], [{}], 0),
        ("1800-02-29, 1815-06-18", ["custom:date_format_list"], [{}], 1),
        ("1800-02-30", ["custom:date_format_list"], [{}], 0),
        ("My Answer: a My Conclusion: b Future Outlook: c", ["format:output_template"], [{}], 1),
        # nothing, unicode, what the checker itself fails at
        ("", ["format:no_whitespace"], [{}], 0),
        ("<think>x", ["format:no_whitespace"], [{}], 0),
        ("東京", ["count:words_japanese"], [{"N": 1}], 1),
        ("Tokyo", ["count:words_japanese"], [{"N": 1}], 0),
        ("12345.", ["format:quote_unquote"], [{}], 1),
        ("a\tb", ["custom:csv_quotes"], [{}], 0),
        # long, and made to hang
        ("a" * 100_000, ["format:no_whitespace"], [{}], 1),
        (LONG, ["format:no_whitespace"], [{}], 0),
        ("(" * 100_000, ["format:parentheses"], [{}], 0),
        ("\n" * 100_000 + "x", ["format:line_indent"], [{}], 1),
        ("a\n" + "b\n \n" * 30_000, ["format:line_indent"], [{}], 0),
    ],
)
def test_ifbench(response, names, arguments, followed):
    metadata = {"instruction_id_list": names, "kwargs": arguments}
    scored = score("ifbench", response, metadata=metadata)
    assert (scored["reward"], scored["accuracy"], scored["followed"]) == (followed == 1, followed == 1, followed)


def test_the_same_reply_is_always_in_the_same_language():
    """Two English words, of which langdetect by itself says now this and now that."""
    metadata = {"instruction_id_list": [SMALL]}
    assert len({score("ifeval", "hello an", metadata=metadata)["reward"] for _ in range(40)}) == 1


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
