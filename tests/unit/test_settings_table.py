"""The table of settings, the pages and the TOML that are written from it, and names from other frameworks."""

import importlib.util
from pathlib import Path

import pytest

from relaxd.config.equivalents import EQUIVALENTS, FRAMEWORKS
from relaxd.config.load import ConfigError, load, load_file
from relaxd.config.settings import sections, settings
from relaxd.config.suggest import suggest
from relaxd.config.write import dump, dump_changes, dump_explained

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


@pytest.mark.parametrize("name", ["settings", "coming_from"])
def test_the_page_is_written_from_the_table(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), f"run: .venv/bin/python docs/{name}.py"


def test_every_setting_and_section_says_what_it_means() -> None:
    assert [setting.name for setting in settings().values() if not setting.meaning] == []
    assert [place for place, meaning in sections().items() if not meaning] == []
    lr = settings()["trainer", "optimizer", "lr"]
    assert (lr.kind, lr.required, lr.default) == ("number > 0", False, 1e-6)
    assert settings()["run", "steps"].required
    assert settings()["data", "overlong"].kind == '"error" or "skip"'
    assert settings()["run", "folder"].default == "runs"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_what_is_written_reads_back_as_the_same(example: Path) -> None:
    config = load_file(example)
    for text in (dump(config), dump_explained(config), dump_changes(config)):
        assert load(text) == config


def test_every_setting_is_explained_and_only_changes_are_kept() -> None:
    config = load_file(ROOT / "examples" / "addition.toml", ["--rollout.top_k", "5"])
    explained, changes = dump_explained(config), dump_changes(config)
    for setting in settings().values():
        assert f"\n{setting.place[-1]} = " in explained or f"\n# {setting.place[-1]} is not set" in explained
        assert setting.meaning.split()[0] in explained
    assert "# Number of steps, each of which makes one version of the weights.\nsteps = 24\n" in explained
    assert "top_k = 5  # default: 0\n" in explained
    assert "steps = 24\n" in changes
    assert "top_k = 5  # default: 0\n" in changes
    assert "temperature" not in changes  # the example sets it to the default
    assert "[health]" not in changes


def test_tables_and_odd_texts_are_written_as_toml() -> None:
    base = dump_changes(load_file(ROOT / "examples" / "addition.toml"))
    odd = {"a b": "x = 'y'", "list": [1, {"deep": "''' \n"}], "none": "\x7f"}
    config = load(base)
    data = config.data.model_copy(
        update={"reasoning_gym": config.data.reasoning_gym.model_copy(update={"settings": odd})}
    )
    changed = config.model_copy(update={"data": data})
    for text in (dump(changed), dump_explained(changed), dump_changes(changed)):
        assert load(text) == changed


def test_the_table_of_other_names_is_sound() -> None:
    assert {one.setting for one in EQUIVALENTS} - {""} <= {setting.name for setting in settings().values()}
    assert all(one.setting or one.note for one in EQUIVALENTS)
    for framework in FRAMEWORKS:
        names = [name for one in EQUIVALENTS for name in one.names[framework]]
        assert len(names) > 30
        assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        ("trainer.num_generations", "TRL's num_generations is rollout.samples_per_prompt here"),
        ("rollout.n", "verl's actor_rollout_ref.rollout.n is rollout.samples_per_prompt here"),
        ("rollout.rollout_max_response_len", "Relax's --rollout-max-response-len is rollout.max_new_tokens here"),
        ("orchestrator.group_size", "prime-rl's orchestrator.group_size is rollout.samples_per_prompt here"),
        ("trainer.total_epochs", "verl's trainer.total_epochs is run.steps here: steps, not epochs"),
        (
            "rollout.rollout_stop_token_ids",
            "an answer ends at the model's own end tokens (Relax's --rollout-stop-token-ids)",
        ),
        ("algorithm.gamma", "GRPO has no discount and no GAE (verl's algorithm.gamma)"),
        ("rollout.temprature", "did you mean rollout.temperature?"),
        ("trainer.optimizer.beta", "did you mean trainer.optimizer.beta"),  # TRL's beta is another thing
        ("algorithm.beta", "TRL's beta is algorithm.kl_coef here"),
        ("rollout.lr", "did you mean trainer.optimizer.lr?"),
        ("nothing.like_it", "there is no section [nothing]"),
    ],
)
def test_an_unknown_setting_is_answered_with_what_it_is_here(unknown: str, expected: str) -> None:
    assert suggest(tuple(unknown.split("."))).startswith(expected)


def test_a_section_of_another_framework_is_answered_setting_by_setting() -> None:
    base = dump_changes(load_file(ROOT / "examples" / "addition.toml"))
    with pytest.raises(ConfigError) as caught:
        load(base + "\n[actor_rollout_ref.rollout]\nn = 8\nname = 'vllm'\n", ["--num_generations=4"], name="x.toml")
    assert "unknown option --num_generations; TRL's num_generations is rollout.samples_per_prompt" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load("max_steps = 3\n" + base + "\n[actor_rollout_ref.rollout]\nn = 8\nname = 'vllm'\n", name="x.toml")
    lines = str(caught.value).splitlines()
    assert lines[0] == "x.toml line 1: max_steps is not a known setting; TRL's max_steps is run.steps here"
    assert [line.partition(": ")[2].partition(" ")[0] for line in lines[1:]] == [
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.name",
    ]
