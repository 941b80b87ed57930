"""The table of settings, the pages and the TOML that are written from it, and names from other frameworks."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from relaxd.cli.preparing.first_steps import demo_overrides
from relaxd.config.algorithm import BUILT_IN, OWN
from relaxd.config.load_toml import ConfigError, load, load_file, suggest
from relaxd.config.other_frameworks import EQUIVALENTS, FRAMEWORKS
from relaxd.config.settings_table import sections, settings
from relaxd.config.write_toml import dump, dump_changes, dump_explained
from tests.kit.cases import each

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.toml"))


@pytest.mark.parametrize("name", ["algorithms", "calls", "coming_from", "python", "settings"])
def test_the_page_is_written_from_the_table(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), f"run: .venv/bin/python docs/{name}.py"


def test_the_page_for_users_of_trl_says_what_the_table_says() -> None:
    page = (ROOT / "docs" / "coming-from-trl.md").read_text()
    names = page.partition("## Names")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| (?:`([\w.]+)`|none) \|", names, re.MULTILINE)
    known = {(name, one.setting) for one in EQUIVALENTS for name in one.names["TRL"]}
    known.add(("report_to", "tracking.trackers"))
    assert len(found) > 30
    assert [pair for pair in found if pair not in known] == []


def test_the_example_for_users_of_trl_is_a_configuration() -> None:
    (example,) = re.findall(
        r"```python\n(import relaxd\n.*?)```", (ROOT / "docs" / "coming-from-trl.md").read_text(), re.DOTALL
    )
    made = example.partition("with relaxd.run")[0]
    names: dict[str, Any] = {}
    exec(made, names)
    assert names["config"].trainer.groups_per_step == 8


def test_every_setting_and_section_says_what_it_means() -> None:
    assert [setting.name for setting in settings().values() if not setting.meaning] == []
    assert [place for place, meaning in sections().items() if not meaning] == []
    lr = settings()["trainer", "optimizer", "lr"]
    assert (lr.kind, lr.required, lr.default) == ("number > 0", False, 1e-6)
    assert settings()["run", "steps"].required
    assert settings()["data", "overlong"].kind == '"error" or "skip"'
    assert settings()["run", "folder"].default == "runs"


@each("example", EXAMPLES)
def test_what_is_written_reads_back_as_the_same(example: Path) -> None:
    config = load_file(example)
    for text in (dump(config), dump_explained(config), dump_changes(config)):
        assert load(text) == config


def test_every_setting_is_explained_and_only_changes_are_kept() -> None:
    config = load_file(ROOT / "examples" / "addition.toml", ["--rollout.top_k", "5"])
    explained, changes = dump_explained(config), dump_changes(config)
    for setting in settings("grpo").values():
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


@each("name", [*BUILT_IN, "my.module:Mine"])
def test_a_section_has_the_defaults_of_its_algorithm(name: str) -> None:
    overrides = ["--algorithm.name", name, "--board.max_staleness", "0"]
    if ":" in name:
        overrides += ["--algorithm.settings.rate", "0.5"]
    if name == "opd":
        overrides += ["--roles.teacher.model", "big"]
    config = load_file(ROOT / "examples" / "addition.toml", overrides)
    changes = dump_changes(config)
    for text in (dump(config), dump_explained(config), changes):
        assert load(text) == config
    section = changes.partition("[algorithm]\n")[2].partition("\n\n")[0]
    expected = [f'name = "{name}"  # default: "grpo"'] if name != "grpo" else []
    expected += ["settings = { rate = 0.5 }  # default: {}"] if ":" in name else []
    assert section.splitlines() == expected
    if name in BUILT_IN:
        assert config.algorithm == BUILT_IN[name]()


def test_the_demo_has_no_teacher() -> None:
    with pytest.raises(ConfigError, match=r"roles.teacher.model is empty: set it to the teacher's model"):
        load_file(ROOT / "examples" / "addition.toml", demo_overrides("opd"))


@each("name", [name for name in BUILT_IN if name != "opd"])
def test_the_demo_runs_with_every_other_algorithm(name: str) -> None:
    config = load_file(ROOT / "examples" / "addition.toml", [*demo_overrides(name), "--run.steps", "3"])
    assert (config.algorithm.name, config.board.max_staleness, config.run.steps) == (name, 1, 3)


@pytest.mark.parametrize("name", ["gspo", "reinforce_plus_plus"])
def test_an_algorithms_example_is_its_demo(name: str) -> None:
    demo = load_file(ROOT / "examples" / "addition.toml", demo_overrides(name))
    assert load_file(ROOT / "examples" / f"{name.replace('_', '-')}.toml") == demo


@each(
    ("overrides", "expected"),
    [
        ("name=gspoo", "algorithm.name = \"gspoo\" is not allowed: one of 'grpo', "),
        ("name=gspoo", "did you mean 'gspo'?"),
        ("name=gpro", "did you mean 'grpo'?"),
        ("name=GRPO", "did you mean 'grpo'?"),
        ("name=module:", 'an algorithm of your own is named "package.module:Class"'),
        ("name=sapo dual_clip=3", "it is a setting of algorithm.name = 'grpo' or 'dr_grpo' or"),
        (
            "name=sapo tau_positve=3",
            "algorithm.tau_positve is not a known setting; did you mean algorithm.tau_positive?",
        ),
        ("name=sapo tau_positive=0", "algorithm.tau_positive = 0: must be more than 0"),
        ("name=my:Mine clip_low=0.1", "algorithm.clip_low is not a known setting; it is a setting of"),
        ("dual_clip=0.5", "algorithm.dual_clip is 0.5: it must be more than 1"),
        ("veto_high=1", "algorithm.veto_high is 1: it must be more than 1"),
        ("tis_clip_low=3", "algorithm.tis_clip_low is 3: it must be less than tis_clip, 2"),
        ("overlong_buffer=8", "algorithm.overlong_limit is 0: with overlong_buffer = 8 it must be longer"),
        ("kl_coef=0.1 kl_reward_coef=0.1", "the divergence counts in the loss or in the reward"),
        ("name=rloo", 'algorithm.name is "rloo", but board.max_staleness is 1: set 0'),
        ("name=rloo staleness=0 epochs=2", "but a step has 2 updates: set trainer.mini_batches = 1"),
        ("name=rloo correction=tis samples=1", "rollout.samples_per_prompt is 1: its baseline is made of the group's"),
        ("name=grpo samples=1", "there must be at least 2; for one sample a prompt use"),
        ("name=dr_grpo samples=1", "there must be at least 2; for one sample a prompt use"),
        ("name=reinforce_plus_plus mask_truncated=true", "use overlong_buffer instead"),
        ("name=ppo mask_truncated=true", "use overlong_buffer instead"),
        ("name=ppo distill_coef=0.5", "ppo would sum it over the tokens that follow: use distill_loss_coef instead"),
        ("name=ppo gae_lambda=1.1", "algorithm.gae_lambda = 1.1: must be at most 1"),
        (
            "name=ppo placement=beside",
            "roles.critic.placement = \"beside\" is not allowed: one of 'trainer', 'service'",
        ),
        ("name=ppo max_value_staleness=2", 'but roles.critic.placement is "trainer", where values are never stale'),
        ("name=grpo placement=service", 'roles.critic is set, but algorithm.name is "grpo", which trains no critic'),
        ("name=grpo critic_lr=1e-4", 'roles.critic is set, but algorithm.name is "grpo", which trains no critic'),
        ("name=ppo critic_offload=true", 'roles.critic.optimizer.cpu_offload needs trainer.dtype = "bfloat16"'),
        (
            "name=ppo critic_offload=true critic_moments=bfloat16",
            'roles.critic.optimizer.moments is "bfloat16", but roles.critic.optimizer.cpu_offload is true',
        ),
    ],
)
def test_what_does_not_fit_an_algorithm_is_refused(overrides: str, expected: str) -> None:
    words = [f"--algorithm.{word}" for word in overrides.split()]
    places = {"samples": "rollout.samples_per_prompt", "staleness": "board.max_staleness", "epochs": "trainer.epochs"}
    critic = {
        "placement": "placement",
        "max_value_staleness": "max_value_staleness",
        "critic_lr": "optimizer.lr",
        "critic_offload": "optimizer.cpu_offload",
        "critic_moments": "optimizer.moments",
    }
    places |= {name: f"roles.critic.{place}" for name, place in critic.items()}
    for name, place in places.items():
        words = [word.replace(f"algorithm.{name}=", f"{place}=") for word in words]
    with pytest.raises(ConfigError) as caught:
        load_file(ROOT / "examples" / "addition.toml", words)
    assert expected in str(caught.value)


@each(
    ("unknown", "expected"),
    [
        ("trainer.num_generations", "TRL's num_generations is rollout.samples_per_prompt here"),
        ("rollout.n", "verl's actor_rollout_ref.rollout.n is rollout.samples_per_prompt here"),
        ("rollout.rollout_max_response_len", "Relax's --rollout-max-response-len is rollout.max_new_tokens here"),
        ("orchestrator.group_size", "prime-rl's orchestrator.group_size is rollout.samples_per_prompt here"),
        ("trainer.total_epochs", "verl's trainer.total_epochs is run.steps here: steps, not epochs"),
        (
            "rollout.rollout_stop_token_ids",
            "Relax's --rollout-stop-token-ids is rollout.stop_token_ids here",
        ),
        ("rollout.presence_penalty", "there are no penalties"),
        ("data.sources.0.temperature", "all sources have rollout.temperature"),
        ("algorithm.lam", "verl's algorithm.lam is algorithm.gae_lambda here"),
        ("algorithm.importance_sampling_level", "TRL's importance_sampling_level is algorithm.name here"),
        ("rollout.temprature", "did you mean rollout.temperature?"),
        ("data.train_path", "did you mean data.eval_path or data.path?"),
        ("trainer.optimizer.beta", "did you mean trainer.optimizer.beta"),  # TRL's beta is another thing
        ("algorithm.beta", "TRL's beta is algorithm.kl_coef here"),
        ("rollout.lr", "did you mean trainer.optimizer.lr or roles.critic.optimizer.lr?"),
        ("eval.every", "did you mean eval.interval?"),
        ("trainer.checkpoint.interval", "did you mean trainer.checkpoint.every?"),
        ("nothing.like_it", "there is no section [nothing]"),
    ],
)
def test_an_unknown_setting_is_answered_with_what_it_is_here(unknown: str, expected: str) -> None:
    assert suggest(tuple(unknown.split("."))).startswith(expected)


def test_blocks_in_docs_have_settings_that_there_are() -> None:
    known = set().union(*(settings(name) for name in (*BUILT_IN, OWN)))

    def unknown(table: dict[str, Any], place: tuple[str, ...] = ()) -> list[str]:
        found = []
        for name, value in table.items():
            if (inner := (*place, name)) not in known:
                found += unknown(value, inner) if inner in sections() else [".".join(inner)]
        return found

    blocks = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page.name == "sweeps-and-hub.md":  # its first block is a sweep
            continue
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
            assert unknown(tomllib.loads(block)) == [], page
            blocks += 1
    assert blocks > 40


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
