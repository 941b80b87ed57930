"""The source and the reward "reasoning_gym", against reasoning-gym itself."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from relaxd.config import ReasoningGymConfig, RunConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.config.write_toml import dump
from relaxd.data.dataset import load_data
from relaxd.data.examples import Example
from relaxd.data.sources.reasoning_gym_source import KEY, NOT_REPRODUCIBLE, reasoning_gym
from relaxd.models import DataError
from relaxd.rewards import RewardInput, check_output, resolve
from tests.kit.cases import each
from tests.kit.processes import run_python
from tests.kit.tokenizer import write_tokenizer

package = pytest.importorskip("reasoning_gym", reason="needs the extra reasoning")

SPELL = {"task": "spell_backward", "settings": {"min_word_len": 3, "max_word_len": 5}, "size": 60, "held_out": 20}
TOML = """
[run]
steps = 2
[model]
path = "{model}"
[data]
source = "reasoning_gym"
[data.reasoning_gym]
task = "chain_sum"
settings = {{ min_terms = 2, max_terms = 2 }}
size = 30
held_out = 10
[reward]
name = "reasoning_gym"
"""


def make(**settings: object) -> tuple[list[Example], list[Example]]:
    return reasoning_gym(ReasoningGymConfig.model_validate(settings))


def score(example: Example, response: str) -> dict[str, float]:
    metadata = json.loads(json.dumps(example.metadata))  # as it comes from the board
    sample = RewardInput(prompt=example.text, response=response, answer=example.answer, metadata=metadata)
    output = check_output(resolve("reasoning_gym")(sample))
    return {"reward": output.reward, **output.parts}


def test_examples_are_the_task_s_items() -> None:
    train, held_out = make(**SPELL, seed=3, instruction="Answer with the word only.")
    task = package.create_dataset("spell_backward", min_word_len=3, max_word_len=5, size=80, seed=3)
    for index, example in enumerate(held_out, start=60):
        assert example.prompt == task[index]["question"] + "\n\nAnswer with the word only."
        assert (example.answer, example.metadata[KEY]["index"]) == (task[index]["answer"], index)
    asked = {task[index]["question"] for index in range(60)} - {task[index]["question"] for index in range(60, 80)}
    assert {example.text.partition("\n")[0] for example in train} == asked
    assert make(**SPELL, seed=3)[0] != make(**SPELL, seed=4)[0]


def test_what_is_held_out_is_never_asked_in_training() -> None:
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = make(task="chain_sum", settings=settings, size=300, held_out=60)
    assert 0 < len(train) < 300
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}


def test_scores_are_the_task_s_own() -> None:
    train, _ = make(**SPELL)
    task = package.create_dataset("spell_backward", min_word_len=3, max_word_len=5, size=80, seed=0)
    partial = set()
    for example in train:
        entry = task[example.metadata[KEY]["index"]]
        for response in (example.answer, example.answer[:-1] + "?", example.answer[::-1], "no", ""):
            expected = task.score_answer(response, entry)
            assert score(example, f" {response}\n")["reward"] == pytest.approx(expected)
            partial.add(0 < expected < 1)
    assert partial == {True, False}


def test_the_last_tag_is_the_answer() -> None:
    example = make(**SPELL)[0][0]
    tagged = f"<think>hm\n</think> <answer>nope</answer> or <answer> {example.answer} </answer>."
    assert score(example, tagged) == {"reward": 1, "accuracy": 1, "format": 1}
    assert score(example, example.answer) == {"reward": 1, "accuracy": 1, "format": 1}
    long = score(example, f"The word is:\n{example.answer}")
    assert (long["accuracy"], long["format"]) == (0, 0)
    assert score(example, "")["format"] == 0


def test_an_answer_that_a_task_cannot_read_earns_nothing() -> None:
    (example, *_), _ = make(task="prime_factorization", size=3, held_out=0)
    entry = package.create_dataset("prime_factorization", size=3, seed=0)
    with pytest.raises(ValueError, match="invalid literal"):
        entry.score_answer("none at all", entry[0])
    assert score(example, "none at all") == {"reward": 0, "accuracy": 0, "format": 1}
    assert score(example, example.answer)["reward"] == 1


def test_a_reward_needs_the_item_of_the_prompt() -> None:
    example = make(**SPELL)[0][0]
    with pytest.raises(ValueError, match='has no "reasoning_gym" in its metadata'):
        resolve("reasoning_gym")(RewardInput(prompt="", response="x", answer="y"))
    with pytest.raises(ValueError, match="need the same version of reasoning-gym"):
        score(Example(example.prompt, "another answer", example.metadata), "x")


HASH_PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import reasoning_gym as package
found = {}
for name in json.loads(sys.argv[1]):
    task = package.create_dataset(name, size=3, seed=1)
    found[name] = [[task[i]["question"], str(task[i]["answer"])] for i in (0, 2)]
print()
print(json.dumps(found))
"""
SLOW = frozenset(
    {"futoshiki", "intermediate_integration", "arc_agi", "zebra_puzzles", "puzzle24", "sudoku", "knight_swap"}
)


@pytest.mark.slow
def test_every_other_task_makes_the_same_items_in_each_process() -> None:
    names = sorted(set(package.factory.DATASETS) - {"composite"} - NOT_REPRODUCIBLE - SLOW)
    found = []
    assert len(names) > 85
    for seed in ("1", "2"):
        program = ("-c", HASH_PROGRAM, json.dumps(names))
        done = run_python(*program, seconds=200, environment={"PYTHONHASHSEED": seed})
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))  # some tasks print
    assert [name for name in names if found[0][name] != found[1][name]] == []


@each(
    ("settings", "message"),
    [
        ({"task": "spell_backwards"}, r"data\.reasoning_gym\.task = 'spell_backwards' is not a task.*spell_backward"),
        (
            {"task": "ransom_note"},
            r"data\.reasoning_gym\.task = .*is not supported: reasoning-gym generates different items",
        ),
        (SPELL | {"settings": {"max_length": 3}}, r"refuses them: .*max_length.*its settings are .*max_word_len"),
        (SPELL | {"settings": {"max_word_len": 1}}, r"data\.reasoning_gym\.settings: .*max_word_len must be >="),
        (SPELL | {"settings": {"seed": 3}}, r"has seed: set data\.reasoning_gym\.size and \.seed instead"),
        (SPELL | {"settings": {"min_word_len": 90, "max_word_len": 99}}, r"can't generate an item: IndexError"),
        (
            {"task": "coin_flip", "settings": {"min_trials": 1, "max_trials": 1}, "size": 1, "held_out": 400},
            r"data\.reasoning_gym\.held_out = 400 holds out every question",
        ),
    ],
)
def test_what_a_task_refuses_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(**settings)


def test_a_missing_package_is_named_with_the_command(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from relaxd.config import ReasoningGymConfig\n"
        "from relaxd.data.sources.reasoning_gym_source import reasoning_gym\n"
        "from relaxd.rewards import UnknownRewardError, resolve\n"
        "try:\n"
        "    resolve('reasoning_gym')\n"
        "except UnknownRewardError as error:\n"
        "    print(error)\n"
        "reasoning_gym(ReasoningGymConfig(task='chain_sum'))\n"
    )
    done = run_python("-c", code)
    assert "(pip install 'relaxd[reasoning]')" in done.stdout
    assert "data.source: reasoning-gym is not installed: pip install 'relaxd[reasoning]'" in done.stderr


def test_the_package_is_imported_before_the_first_sample() -> None:
    code = (
        "import sys\n"
        "from relaxd.rewards import resolve\n"
        "before = 'reasoning_gym' in sys.modules\n"
        "resolve('reasoning_gym')\n"
        "print(before, 'reasoning_gym' in sys.modules)\n"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_run_s_data(tmp_path: Path) -> None:
    text = TOML.format(model=write_tokenizer(tmp_path / "model"))
    config = load(text, ["--data.reasoning_gym.settings.max_digits", "2", "--data.reasoning_gym.seed", "7"])
    assert config.data.reasoning_gym.settings == {"min_terms": 2, "max_terms": 2, "max_digits": 2}
    assert load(dump(config)) == config
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    data, again = load_data(config), load_data(config)
    assert len(data.evaluation["held_out"]) == 10
    assert 20 < len(data.train) <= 30
    first, second = data.train.prompt(3), again.train.prompt(3)
    assert (first.text, first.answer, first.metadata) == (second.text, second.answer, second.metadata)
    with pytest.raises(ConfigError, match=r"data\.reasoning_gym\.task is missing"):
        load(text, ["--data.reasoning_gym.task", ""])
    assert asdict(RewardInput(prompt="", response="", metadata=first.metadata))["metadata"][KEY]["task"] == "chain_sum"
