"""Reading a configuration: what is right passes through unchanged, what is wrong is named with its place."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, load, load_file
from relaxd.config.write_toml import dump
from tests.kit.cases import each

GOOD = """\
[run]
steps = 4

[model]
path = "smollm2-135m"
chat_template = '''
steps = not a key
'''

[data]
source = "addition"

[reward]
name = "addition"

[rollout]
top_p = 0.9

[trainer.optimizer]
lr = 1e-5
"""
EXAMPLE = Path(__file__).parents[3] / "examples" / "addition.toml"


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, overrides, name="x.toml")
    return str(caught.value)


def test_a_good_file_loads() -> None:
    config = load(GOOD)
    assert (config.run.steps, config.rollout.top_p, config.trainer.optimizer.lr) == (4, 0.9, 1e-5)
    assert config.rollout.samples_per_prompt == RunConfig.model_fields["rollout"].default.samples_per_prompt


def test_a_reward_names_the_variables_that_it_wants() -> None:
    assert load(GOOD).reward.environment == ()
    assert load(GOOD, ["--reward.environment", '["OPENAI_API_KEY", "HTTPS_PROXY"]']).reward.environment == (
        "OPENAI_API_KEY",
        "HTTPS_PROXY",
    )
    assert "'A=1' is not the name of an environment variable" in refusal(GOOD, "--reward.environment", '["A=1"]')
    assert "RELAXD_TOKEN is a setting or secret of relaxd" in refusal(GOOD, "--reward.environment", '["RELAXD_TOKEN"]')


def test_the_example_is_what_the_demo_needs() -> None:
    config = load_file(EXAMPLE)
    assert config.model.path == "smollm2-135m"
    assert config.board.max_staleness == 1
    assert config.eval.prompts == 100


def test_dump_reads_back_as_the_same() -> None:
    for config in (load(GOOD), *map(load_file, EXAMPLE.parent.glob("*.toml"))):
        assert load(dump(config)) == config


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_dump(text: str) -> None:
    config = load(GOOD)
    changed = config.model_copy(update={"model": config.model.model_copy(update={"chat_template": text})})
    assert load(dump(changed)) == changed


@each(
    ("old", "new", "expected"),
    [
        (
            "top_p = 0.9",
            "top_pp = 0.9",
            ["line 17: rollout.top_pp is not a known setting", "did you mean rollout.top_p?"],
        ),
        (
            "top_p = 0.9",
            "lr = 0.9",
            ["rollout.lr is not a known setting", "did you mean trainer.optimizer.lr or roles.critic.optimizer.lr?"],
        ),
        ("top_p = 0.9", "wholly_unknown = 0.9", ["[rollout] has samples_per_prompt, max_new_tokens"]),
        (
            "[rollout]\ntop_p = 0.9",
            "[rolout]\ntop_p = 0.9",
            ["x.toml line 16: rolout is not a known section", "rollout?"],
        ),
        ("top_p = 0.9", "top_p = 1.5", ["x.toml line 17: rollout.top_p = 1.5: must be at most 1"]),
        ("top_p = 0.9", "top_p = nan", ["rollout.top_p = NaN: must be a finite number"]),
        ("top_p = 0.9", 'top_p = "a"', ['rollout.top_p = "a": must be a number']),
        ("top_p = 0.9", 'dtype = "float23"', ["one of 'float32', 'bfloat16'; did you mean 'float32'?"]),
        ("top_p = 0.9", "top_p = 0.9\n[tracking]\ntrackers = ['wandbb']", ["x.toml line 19: tracking.trackers.0 ="]),
        ("top_p = 0.9", "top_p = 0.9\n[trainer]\ndtype = 'float32'\nhosts = 3", ["x.toml line 20: trainer.ranks is 1"]),
        ("steps = 4", "steps = true", ["x.toml line 2: run.steps = true: must be a whole number"]),
        ("steps = 4", "steps = 4.5", ["run.steps = 4.5: must be a whole number"]),
        ("steps = 4", 'steps = "4"', ['run.steps = "4": must be a whole number']),
        ("steps = 4", "steps = 0", ["run.steps = 0: must be at least 1"]),
        ("steps = 4", "", ["run.steps is missing: Number of steps, each of which makes one version of the weights."]),
        ("[reward]", "[[reward]]", ["line 13: reward", "must be a section"]),
        ('source = "addition"', 'source = "jsonl"', ["data.path is missing"]),
        ("lr = 1e-5", "lr = 1e-5\n[trainer]\ntensor_parallel = 2", ["trainer.ranks is 1: it must be a multiple of"]),
        (
            "lr = 1e-5",
            "lr = 1e-5\n[trainer]\nranks = 4\nhosts = 3",
            ["trainer.ranks is 4: it must be a multiple of trainer.hosts = 3"],
        ),
        (
            "lr = 1e-5",
            "lr = 1e-5\n[trainer]\nranks = 4\nhosts = 4\ntensor_parallel = 2",
            ["trainer.tensor_parallel is 2, but each of the trainer.hosts = 4 hosts has 1 ranks: it must divide them"],
        ),
        ("lr = 1e-5", "lr = 1e-5\ncpu_offload = true", ["trainer.optimizer.cpu_offload needs trainer.dtype"]),
        (
            "lr = 1e-5",
            'lr = 1e-5\ncpu_offload = true\nmoments = "bfloat16"',
            ['trainer.optimizer.moments is "bfloat16", but trainer.optimizer.cpu_offload is true'],
        ),
        ("steps = 4", "steps = ", ["x.toml line 2: not valid TOML: Invalid value"]),
        ("steps = 4", "steps = 4\nsteps = 5", ["x.toml line 3: not valid TOML: Cannot overwrite a value"]),
        ("lr = 1e-5", 'lr = "1', ["x.toml line 20: not valid TOML"]),
    ],
)
def test_a_mistake_is_named(old: str, new: str, expected: list[str]) -> None:
    assert old in GOOD
    message = refusal(GOOD.replace(old, new))
    for part in expected:
        assert part in message


def test_every_mistake_is_named_at_once() -> None:
    message = refusal(GOOD.replace("top_p", "topp").replace("steps = 4", "steps = -4"))
    assert "rollout.topp" in message
    assert "run.steps" in message


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot read the configuration: No such file"):
        load_file(tmp_path / "missing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.toml: cannot read"):
        load_file(tmp_path / "bytes.toml")


def test_overrides_win_and_have_their_types() -> None:
    overrides = "--run.steps 7 --trainer.optimizer.lr=5e-6 --data.shuffle false --model.path 123 "
    overrides += "--rollout.samples-per-prompt 2 --board.max_staleness 0 --data.eval_path x.jsonl"
    config = load(GOOD, overrides.split())
    assert (config.run.steps, config.trainer.optimizer.lr, config.data.shuffle) == (7, 5e-6, False)
    assert (config.model.path, config.rollout.samples_per_prompt, config.board.max_staleness) == ("123", 2, 0)
    assert config.data.eval_path == Path("x.jsonl")


SETS = (
    GOOD
    + """
[[eval.sets]]
name = "one"
path = "one.jsonl"

[[eval.sets]]
name = "two"
path = "two.jsonl"
"""
)


def test_an_override_sets_what_is_in_a_list_of_tables() -> None:
    overrides = "--eval.sets.1.samples_per_prompt 4 --eval.sets.1.k=[1,4] --eval.sets.0.reward exact_match"
    one, two = load(SETS, overrides.split()).eval.sets
    assert (one.samples_per_prompt, one.reward, two.samples_per_prompt, two.k) == (1, "exact_match", 4, (1, 4))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--eval.sets.2.k", "1"], "--eval.sets.2.k: eval.sets is a list of 2: settings of the first are eval.sets.0"),
        (["--eval.sets.one.k", "1"], "eval.sets is a list of 2"),
        (["--eval.sets.1", "x"], "eval.sets is a list of 2"),
        (
            ["--eval.sets.1.samples_per_prompt", "x"],
            '--eval.sets.1.samples_per_prompt: eval.sets.1.samples_per_prompt = "x"',
        ),
        (["--eval.sets.1.name.x", "1"], "eval.sets.1.name is a value, not a section"),
    ],
)
def test_a_wrong_override_in_a_list_of_tables_is_named(overrides: list[str], expected: str) -> None:
    assert expected in refusal(SETS, *overrides)


@each(
    ("overrides", "expected"),
    [
        (["--run.stepz", "1"], "--run.stepz: run.stepz is not a known setting; did you mean run.steps?"),
        (["--run.steps", "many"], '--run.steps: run.steps = "many": must be a whole number'),
        (["--run.steps"], "--run.steps needs a value"),
        (["--lr", "1"], "unknown option --lr; did you mean --trainer.optimizer.lr or --roles.critic.optimizer.lr?"),
        (["--name", "a"], "unknown option --name; the run's id, which names its folder, is the option --run-id"),
        (["--run.id", "a"], "run.id is not a known setting; the run's id, which names its folder, is the option"),
        (["--trainer.optimiser.lr", "1"], "--trainer.optimiser.lr: trainer.optimiser is not a known section"),
        (["--weights.interval", "9"], "--weights.interval: weights.interval is 9, but board.max_staleness is"),
        (["steps", "1"], "expected --section.key value, found 'steps'"),
        (["--run.steps.x", "1"], "run.steps is a value, not a section"),
        (["--run.steps", "1\nrun.seed = 3"], "must be a whole number"),
    ],
)
def test_a_wrong_override_is_named(overrides: list[str], expected: str) -> None:
    assert expected in refusal(GOOD, *overrides)


COLOCATE = GOOD + "\n[board]\nmax_staleness = 0\n"


def test_a_colocated_run_loads() -> None:
    config = load(COLOCATE, ["--run.colocate", "true", "--weights.transport", "cuda_ipc"])
    assert (config.run.colocate, config.weights.transport) == (True, "cuda_ipc")


@each(
    ("overrides", "expected"),
    [
        (["--board.max_staleness=1"], "board.max_staleness is 1: set 0"),
        (["--board.oversample=2.0"], "board.oversample is 2.0: set 1.0"),
        (["--rollout.engine=sglang_external"], 'rollout.engine is "sglang_external"'),
        (["--weights.transport=nccl"], 'weights.transport is "nccl", which cannot connect two processes on one GPU'),
        (["--rollout.engine=sglang", "--rollout.tensor_parallel=2"], "trainer.ranks is 1: it must be a multiple"),
        (["--trainer.ranks=2", "--trainer.hosts=2"], "trainer.hosts is 2: set 1, since the trainer takes turns on its"),
    ],
)
def test_what_does_not_fit_turns_is_named(overrides: list[str], expected: str) -> None:
    assert expected in refusal(COLOCATE, "--run.colocate=true", *overrides)


def test_cuda_ipc_is_for_colocated_runs() -> None:
    assert "run.colocate = true" in refusal(GOOD, "--weights.transport=cuda_ipc")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--rollout.engine=sglang"], "but rollout.return_routed_experts is false: set true"),
        ([], 'but rollout.engine is "transformers", which doesn\'t return the experts: use "sglang" with'),
        (
            ["--rollout.engine=sglang_external"],
            'but rollout.engine is "sglang_external", which doesn\'t return the exper',
        ),
    ],
)
def test_routing_that_no_engine_returns_cant_be_replayed(overrides: list[str], expected: str) -> None:
    message = refusal(GOOD, "--trainer.routing_replay=rollout", *overrides)
    assert f'trainer.routing_replay is "rollout", {expected}' in message


def test_routing_of_the_trainer_is_replayed_in_further_updates() -> None:
    assert "but a step has one update" in refusal(GOOD, "--trainer.routing_replay=trainer")
    assert load(GOOD, ["--trainer.routing_replay=trainer", "--trainer.epochs=2"]).trainer.routing_replay == "trainer"
