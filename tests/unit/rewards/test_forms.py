"""The forms in which people bring rewards, and how a run's reward is put together from them."""

import asyncio
import sys

import numpy as np
import pytest

from relaxd.config import RewardConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.config.write_toml import dump
from relaxd.rewards import BadRewardError, RewardInput, UnknownRewardError, check_output
from relaxd.rewards.calling import call
from relaxd.rewards.loading import adapt, check_signature
from relaxd.rewards.scorers import check_names, scorer_of

FORMS = '''
import asyncio
from dataclasses import dataclass

def plain(sample):
    return len(sample.response)

def scaled(sample, factor=1.0, *, offset=0.0):
    return factor * len(sample.response) + offset

def open_settings(sample, **settings):
    return settings["a"]

async def later(sample):
    await asyncio.sleep(0)
    return {"score": len(sample.response), "pred": sample.response, "acc": True, "none": None}

class Judge:
    def __init__(self, model, factor=1.0):
        self.model, self.factor, self.calls = model, factor, 0
    def __call__(self, sample):
        self.calls += 1
        return {"reward": self.factor * len(sample.response), "calls": self.calls}

class GroupJudge:
    def __call__(self, samples):
        return [len(samples)] * len(samples)

@dataclass
class Strict:
    limit: int
    def __call__(self, sample):
        return float(len(sample.response) <= self.limit)

def rank(samples):
    order = sorted(range(len(samples)), key=lambda one: len(samples[one].response))
    return [order.index(one) for one in range(len(samples))]

async def rank_later(samples):
    await asyncio.sleep(0)
    return [{"reward": len(one.response), "length": len(one.response)} for one in samples]

def numpy_batch(samples):
    import numpy as np
    return np.array([len(one.response) for one in samples])

def too_few(samples):
    return [1.0]

def text(samples):
    return "12"

meeting = None
async def meet(sample):
    """Return 1 only if all samples of a group are in flight at once."""
    global meeting
    meeting = meeting or asyncio.Barrier(3)
    async with asyncio.timeout(5):
        await meeting.wait()
    return 1.0

def nested_run(sample):
    async def inner():
        return 3.0
    return asyncio.run(inner())
'''
VERL = """
import re
from verl_helper import HELP

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if data_source == "bad":
        raise NotImplementedError(data_source)
    right = solution_str.strip() == str(ground_truth)
    return {"score": float(right) + bonus, "acc": right, "pred": solution_str, "index": extra_info["index"]}

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(said == truth) for said, truth in zip(solution_strs, ground_truths)]

def no_extra(data_source, solution_str, ground_truth):
    return HELP
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path, monkeypatch):
    (tmp_path / "forms.py").write_text(FORMS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "score.py").write_text(VERL)
    (tmp_path / "sub" / "verl_helper.py").write_text("HELP = 7.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("forms", "verl_helper", "relaxd_reward_score"):
        sys.modules.pop(name, None)


def samples(*responses, answer="", tokens=0, **metadata):
    return [RewardInput(prompt="?", response=one, answer=answer, metadata=metadata, tokens=tokens) for one in responses]


def score(some, **config):
    scorer = scorer_of(RewardConfig.model_validate(config))
    with asyncio.Runner() as runner:
        outcomes = scorer.score(some, runner)
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
    return [{"reward": one.reward, **one.parts} for one in outcomes]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("forms:plain", {}, [1, 2, 3]),
        ("forms.py:plain", {}, [1, 2, 3]),
        ("./forms.py:plain", {}, [1, 2, 3]),
        ("forms:scaled", {"factor": 2, "offset": 1}, [3, 5, 7]),
        ("forms:open_settings", {"a": 4}, [4, 4, 4]),
        ("forms:later", {}, [1, 2, 3]),
        ("forms:Judge", {"model": "m", "factor": 2}, [2, 4, 6]),
        ("forms:Strict", {"limit": 2}, [1, 1, 0]),
        ("forms:GroupJudge", {}, [3, 3, 3]),
        ("forms:rank", {}, [0, 1, 2]),
        ("forms:rank_later", {}, [1, 2, 3]),
        ("forms:numpy_batch", {}, [1, 2, 3]),
        ("forms:meet", {}, [1, 1, 1]),
        ("forms:nested_run", {}, [3, 3, 3]),
    ],
)
def test_forms_of_rewards(name, settings, expected):
    scored = score(samples("a", "bb", "ccc"), name=name, settings=settings)
    assert [one["reward"] for one in scored] == expected


def test_a_class_lives_as_long_as_its_worker():
    assert [one["calls"] for one in score(samples("a", "b"), name="forms:Judge", settings={"model": "m"})] == [1, 2]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("forms:scaled", {"facto": 2}, r"reward.settings.facto is not a setting of .* did you mean factor\?"),
        ("forms:plain", {"factor": 2}, "reward.settings.factor is not a setting of .* it takes none"),
        ("forms:Judge", {}, "reward.settings.model is missing"),
        ("regex", {"patern": "a"}, r"reward.settings.patern is not a setting .* did you mean pattern\?"),
        ("math", {"answer": "a"}, "reward.settings.answer is not a setting"),
        ("forms:Strict", {"limit": 2, "sample": 1}, "reward.settings.sample is not a setting"),
    ],
)
def test_wrong_settings_are_named(name, settings, message):
    with pytest.raises(BadRewardError, match=message):
        score(samples("a"), name=name, settings=settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [("forms:too_few", "1 values for 2 samples"), ("forms:text", "returned 2 values|returned str")],
)
def test_a_group_reward_returns_one_for_each_sample(name, message):
    with pytest.raises(BadRewardError, match=rf"(too_few|text) \(forms.py:\d+\): .*({message})"):
        score(samples("a", "b" * (name == "forms:too_few") or "b"), name=name)


# --- verl ---------------------------------------------------------------------------------------------------------

VERL_META = {"data_source": "my", "extra_info": {"index": 7}, "reward_model": {"ground_truth": "46", "style": "rule"}}


def test_a_file_of_verl_is_used_unchanged():
    scored = score(samples("46", "47", answer="ignored", **VERL_META), name="sub/score.py:compute_score")
    assert scored == [{"reward": 1, "acc": 1, "index": 7}, {"reward": 0, "acc": 0, "index": 7}]
    (bonus,) = score(
        samples("46", **VERL_META), name="sub/score.py:compute_score", settings={"bonus": 0.5}, key="score"
    )
    assert bonus["reward"] == 1.5
    assert score(samples("x", **VERL_META), name="sub/score.py:no_extra") == [{"reward": 7}]
    batch = scorer_of(RewardConfig(name="sub/score.py:batch"))
    assert batch.takes_group
    assert [one["reward"] for one in score(samples("46", "47", answer="46"), name="sub/score.py:batch")] == [1, 0]


def test_an_error_names_the_line_in_the_file():
    from relaxd.rewards.calling import describe_error

    with pytest.raises(NotImplementedError) as caught:
        score(samples("46", data_source="bad"), name="sub/score.py:compute_score")
    assert describe_error(caught.value) == "NotImplementedError: bad (sub/score.py:7, in compute_score)"
    with pytest.raises(UnknownRewardError, match=r"there is no file .*nope\.py"):
        score(samples("a"), name="nope.py:f")
    with pytest.raises(UnknownRewardError, match=r"did you mean compute_score\?"):
        score(samples("a"), name="sub/score.py:compute_scores")


@pytest.mark.parametrize(
    ("value", "key", "reward", "parts"),
    [
        ({"score": 1, "acc": True, "pred": "x"}, "", 1, {"acc": 1}),
        ({"reward": 2, "score": 1}, "", 1, {"reward": 2}),
        ({"reward": 2, "score": 1}, "reward", 2, {"score": 1}),
        ({"mine": 3, "text": "x", "list": [1]}, "mine", 3, {}),
        ({"reward": 1, "parts": {"a": 2, "why": "because"}}, "", 1, {"a": 2}),
    ],
)
def test_the_key_and_what_is_no_number(value, key, reward, parts):
    output = check_output(value, key)
    assert (output.reward, output.parts) == (reward, parts)


def test_a_mapping_without_the_key_says_which_there_are():
    with pytest.raises(BadRewardError, match=r"without \"acc\"; its keys are .*'score'"):
        check_output({"score": 1}, "acc")
    with pytest.raises(BadRewardError, match=r"or set reward\.key"):
        check_output({"acc": 1})


# --- terms --------------------------------------------------------------------------------------------------------


def test_terms_are_weighted_clipped_and_gated():
    terms = [
        {"name": "forms:plain", "weight": 2.0, "maximum": 2},
        {"name": "regex", "label": "form", "settings": {"pattern": "b"}, "weight": 0.5, "only_if": "exact_match"},
        {"name": "exact_match", "weight": 10.0},
        {"name": "overlong", "settings": {"max_tokens": 10, "buffer_tokens": 4}, "minimum": -0.5},
    ]
    scored = score(samples("bbb", "ab", answer="bbb", tokens=9), terms=terms)
    assert scored[0] == {
        "reward": 2 * 2 + 0.5 + 10 - 0.5,
        "plain": 2,
        "form": 1,
        "form_too_slow": 0,
        "exact_match": 1,
        "overlong": -0.5,
    }
    assert scored[1]["reward"] == 2 * 2 + 0 + 0 - 0.5


def test_a_sum_with_a_group_reward_takes_groups():
    terms = [{"name": "forms:rank"}, {"name": "forms:later", "weight": 0.0}]
    assert scorer_of(RewardConfig.model_validate({"terms": terms})).takes_group
    assert [one["reward"] for one in score(samples("bb", "a"), terms=terms)] == [1, 0]


# --- a reward for each sample -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "config", "reward"),
    [
        ({"rm_type": "exact_match"}, {"choose_by": "rm_type"}, 0),
        ({"rm_type": "math"}, {"choose_by": "rm_type"}, 1),
        ({"rm_type": "boxed_exact_match"}, {"choose_by": "rm_type"}, 1),
        ({"rm_type": "mine"}, {"choose_by": "rm_type", "choices": {"mine": "forms:plain"}}, 9),
        ({}, {"choose_by": "rm_type", "name": "forms:plain"}, 9),
        ({}, {"choose_by": "rm_type", "terms": [{"name": "forms:plain", "weight": 2}]}, 18),
        ({"data_source": "lighteval/MATH"}, {"choose_by": "data_source"}, 1),
        ({"data_source": "openai/gsm8k"}, {"choose_by": "data_source"}, 0),
        ({"data_source": "hiyouga/geometry3k"}, {"choose_by": "data_source"}, 0.9),
        ({"data_source": "math"}, {"choose_by": "data_source", "choices": {"math": "math"}}, 1),
        ({"a": "b"}, {"choose_by": "a", "choices": {"b": {"name": "regex", "settings": {"pattern": "5.$"}}}}, 1),
        ({"a": "b"}, {"choose_by": "a", "choices": {"b": {"name": "forms:scaled", "settings": {"factor": 2}}}}, 18),
        ({"a": "b"}, {"choose_by": "a", "choices": {"b": {"name": "forms:later", "key": "acc"}}}, 1),
        ({"data_source": "searchR1_nq"}, {"choose_by": "data_source"}, 0),
    ],
)
def test_the_metadata_choose_the_reward(metadata, config, reward):
    assert score(samples(r"\boxed{5}", answer="5", **metadata), **config)[0]["reward"] == reward


@pytest.mark.parametrize("source", ["aime2024", "math"])
def test_verl_scores_some_sources_as_dapo_does(source):
    assert score(samples("5", answer="5", data_source=source), choose_by="data_source")[0]["reward"] == -1


def test_the_data_may_not_name_code():
    with pytest.raises(UnknownRewardError, match=r"metadata.rm_type is 'os:getcwd', neither a bundled reward nor in"):
        score(samples("a", rm_type="os:getcwd"), choose_by="rm_type", choices={"mine": "forms:plain"})
    with pytest.raises(ValueError, match=r"metadata.rm_type is missing"):
        score(samples("a"), choose_by="rm_type")


# --- configuration ------------------------------------------------------------------------------------------------

RUN = """
run.steps = 1
model.path = "m"
data.source = "addition"
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[reward]\nworkers = 1", "reward.name is missing"),
        ('[reward]\nname = "math"\n[[reward.terms]]\nname = "f1"', "give one of them"),
        ('[[reward.terms]]\nname = "f1"\n[[reward.terms]]\nname = "f1"', "has 'f1' twice"),
        ('[[reward.terms]]\nname = "f1"\nonly_if = "g"', "not the label of another term; there are none"),
        ('[[reward.terms]]\nname = "f1"\nminimum = 1\nmaximum = 0', "minimum of 'f1' is above its maximum"),
        ("[[reward.terms]]\nweight = 1", "reward.terms: name is missing"),
        ('[[reward.terms]]\nname = "f1"\naddress = "h:1"', "name is 'f1', but there is an address, too"),
        ('[[reward.terms]]\naddress = "h"', 'must be "host:port"'),
        ('[[reward.terms]]\nname = "f1"\naddress_token = "KEY"', "address_token is for a service at address"),
        ('[reward]\nchoose_by = "a"\n[[reward.terms]]\naddress = "h:1"', "can't be combined with reward.terms at"),
        ('[reward]\nchoose_by = "a"\nchoices = {b = {nam = "f1"}}', r"reward.choices.b.nam\b"),
        ('[[reward.terms]]\nname = "f1"\nweigth = 1', "reward.terms.0.weigth"),
        ('[reward]\nname = "f1"\non_failure = "ignore"', "one of 'drop', 'zero', 'retry'"),
        ('[reward]\nname = "f1"\nchoices = {a = "f1"}', r"reward.choices needs reward.choose_by"),
        ('[reward]\nkey = "x"\n[[reward.terms]]\nname = "f1"', "give each of reward.terms its own"),
    ],
)
def test_wrong_configurations_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        load(RUN + text)


def test_choices_survive_being_written():
    choices = 'choices = { a = "f1", "b/c" = { name = "regex", settings = { pattern = "x" }, key = "reward" } }'
    config = load(f'{RUN}[reward]\nchoose_by = "k"\n{choices}')
    assert load(dump(config)) == config
    assert config.reward.choices["a"].name == "f1"
    with pytest.raises(UnknownRewardError, match="regexx"):
        check_names(load(f'{RUN}[reward]\nchoose_by = "k"\n{choices.replace("regex", "regexx")}').reward)


def test_wrong_settings_of_a_choice_are_named():
    with pytest.raises(BadRewardError, match=r"patern is not a setting .* did you mean pattern\?"):
        score([], choose_by="a", choices={"b": {"name": "regex", "settings": {"patern": "x"}}})


def test_terms_survive_being_written():
    terms = '[[reward.terms]]\nname = "regex"\nsettings = { pattern = "a\\"b" }\nweight = 0.5\n'
    terms += '[[reward.terms]]\nname = "f1"'
    config = load(RUN + terms)
    assert load(dump(config)) == config
    assert config.reward.shown == "regex + f1"
    with pytest.raises(UnknownRewardError, match="regexx"):
        check_names(load(RUN + terms.replace('"regex"', '"regexx"')).reward)


def verl_with_keywords(solution_str, ground_truth, **kwargs):
    return {"score": float(solution_str == ground_truth), "reward": 7.0, "source": kwargs["data_source"] == "gsm8k"}


def verl_of_keywords_alone(**kwargs):
    return float(kwargs["solution_str"] == kwargs["ground_truth"]) + kwargs["extra_info"]["bonus"]


def verl_without_source(solution_str, ground_truth):
    return np.bool_(solution_str == ground_truth)


@pytest.mark.parametrize(
    ("reward", "expected", "parts"),
    [
        # A mapping with both pays the score, as in verl; the other number is a part.
        (verl_with_keywords, [1.0, 0.0], {"reward": 7.0, "source": 1.0}),
        (verl_of_keywords_alone, [1.5, 0.5], {}),
        (verl_without_source, [1.0, 0.0], {}),
    ],
)
def test_verls_forms_are_called_as_verl_calls_them(reward, expected, parts):
    metadata = {"data_source": "gsm8k", "extra_info": {"bonus": 0.5}, "reward_model": {"ground_truth": "46"}}
    adapted = adapt(reward)
    check_signature(adapted)
    with asyncio.Runner() as runner:
        found = call(adapted, samples("46", "47", **metadata), runner)
    assert [one.reward for one in found] == expected
    assert found[0].parts == parts


def says(solution_str, **kwargs):
    return len(solution_str) + len(kwargs["ground_truth"])


def says_of_source(data_source, solution_str, **kwargs):
    return float(data_source == "gsm8k") + float("data_source" not in kwargs and "ground_truth" in kwargs)


def says_and_sets(solution_str, bonus=1.0):
    return len(solution_str) * bonus


def only_truth(*, ground_truth, **kwargs):
    return len(ground_truth)


def all_by_default(data_source="", solution_str="", ground_truth=""):
    return len(solution_str)


def all_say(solution_strs, **kwargs):
    return [len(one) for one in solution_strs] if len(kwargs["ground_truths"]) == 2 else []


def all_say_with_sources(data_sources, solution_strs):
    return [float(one == "gsm8k") + 1 for one in data_sources]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (says, [4.0, 4.0]), (says_of_source, [2.0, 2.0]), (says_and_sets, [2.0, 2.0]), (only_truth, [2.0, 2.0]),
        (all_by_default, [2.0, 2.0]), (all_say, [2.0, 2.0]), (all_say_with_sources, [2.0, 2.0]),
    ],
)  # fmt: skip
def test_any_of_verls_arguments_make_its_form(reward, expected):
    metadata = {"data_source": "gsm8k", "reward_model": {"ground_truth": "46"}}
    adapted = adapt(reward)
    check_signature(adapted)
    with asyncio.Runner() as runner:
        assert [one.reward for one in call(adapted, samples("46", "47", **metadata), runner)] == expected


def with_args(sample, args=None):
    return 1.0


def with_more(sample, *args):
    return 1.0


def with_names_of_others(sample, completions=None, queries=None, ground_truth=None, solution_str=""):
    return 1.0


@pytest.mark.parametrize("reward", [with_args, with_more, with_names_of_others])
def test_settings_may_have_names_that_are_arguments_elsewhere(reward):
    assert adapt(reward) is reward
    check_signature(reward)


def trl(prompts, completions, **kwargs): ...


def trl_of_ids(completion_ids, **kwargs): ...


def trl_with_truth(completions, ground_truth): ...


def slime(args, sample, **kwargs): ...


def slime_of_group(args, samples, **kwargs): ...


def openrlhf(queries, prompts, labels): ...


def verl(solution_str, ground_truth, tokenizer): ...


@pytest.mark.parametrize(
    ("reward", "framework"),
    [
        (trl, "TRL"), (trl_of_ids, "TRL"), (trl_with_truth, "TRL"), (slime, "slime"), (slime_of_group, "slime"),
        (openrlhf, "OpenRLHF"), (verl, "verl"),
    ],
)  # fmt: skip
def test_forms_of_other_frameworks_are_named(reward, framework):
    with pytest.raises(
        BadRewardError, match=rf"{reward.__name__} \(.*\) takes \(.*\), the form of {framework}; here a re"
    ):
        check_signature(adapt(reward))
