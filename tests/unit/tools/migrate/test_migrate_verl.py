"""`relaxd migrate verl`: every key is a setting, in a note, or listed as lost."""

from pathlib import Path

import pytest

from relaxd.config.load_toml import load
from relaxd.tools.migrate.verl import VerlConfigError, migrate, read_verl
from relaxd.tools.migrate.verl_rewards import CONFINED
from tests.kit.cases import each

RECIPE = r"""
set -x
MODEL=Qwen/Qwen3-8B
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=data/gsm8k/train.parquet data.val_files="['data/gsm8k/test.parquet']" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 data.max_response_length=1024 \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.n=5 \
    +actor_rollout_ref.rollout.top_k=-1 \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 \
    trainer.logger='["console","wandb"]' \
    trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15 $@
"""


def test_a_recipe_becomes_a_configuration_that_relaxd_takes(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(RECIPE)
    migrated = migrate(read_verl(path))
    assert migrated.problems == []
    config = load(migrated.to_toml())
    assert (config.trainer.groups_per_step, config.trainer.mini_batches, config.trainer.ranks) == (1024, 4, 16)
    assert (config.rollout.samples_per_prompt, config.rollout.tensor_parallel, config.rollout.top_k) == (5, 2, 0)
    assert (config.algorithm.kl_coef, config.algorithm.kl_estimator) == (0.002, "k2")
    assert (config.trainer.optimizer.lr, config.trainer.checkpoint.every, config.eval.interval) == (1e-6, 0, 5)
    assert str(config.data.path) == "data/gsm8k/train.parquet"
    assert [(one.name, str(one.path)) for one in config.eval.sets] == [("gsm8k-test", "data/gsm8k/test.parquet")]
    assert (config.data.answer_key, config.reward.choose_by) == ("reward_model.ground_truth", "data_source")
    assert (config.rollout.engine, config.run.colocate) == ("sglang", True)
    assert [name for name, _, _ in migrated.lost] == [
        "actor_rollout_ref.model.use_remove_padding",
        "trainer.logger",
    ]
    notes = "\n".join(migrated.notes)
    for said in ("verl used vllm", "15 * rows", "run.steps = 1000 is made up", "trainer.nnodes = 2: with run.colocate"):
        assert said in notes


CLIP, CLIP_HIGH = "actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio_high"
BUFFER = {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 9}
WARMUP = {"trainer.total_training_steps": 9, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.34}


@each(
    ("given", "setting", "value"),
    [
        ({CLIP: 0.3}, "algorithm.clip_high", 0.3),
        ({CLIP: 0.3, CLIP_HIGH: 0.4}, "algorithm.clip_high", 0.4),
        ({"actor_rollout_ref.actor.kl_loss_coef": 0.1}, "algorithm.kl_coef", None),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1}, "algorithm.kl_reward_coef", 0.1),
        ({"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}, "algorithm.loss_aggregation", "sample_mean"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, "algorithm.name", "gspo"),
        ({"algorithm.adv_estimator": "rloo"}, "algorithm.name", "rloo"),
        ({"custom_reward_function.path": "r.py"}, "reward.name", "r.py:compute_score"),
        ({"custom_reward_function.path": "r.py", "custom_reward_function.name": "f"}, "reward.name", "r.py:f"),
        ({"custom_reward_function.path": "r.py"}, "reward.choose_by", None),
        ({"data.train_files": ["a.parquet", "b.parquet"]}, "data.path", None),
        (BUFFER, "algorithm.overlong_buffer", 9),
        ({"actor_rollout_ref.hybrid_engine": False}, "run.colocate", False),
        ({"actor_rollout_ref.rollout.update_weights_bucket_megabytes": 2}, "weights.bucket_bytes", 2 << 20),
        (WARMUP, "trainer.optimizer.warmup_steps", 3),
        ({"actor_rollout_ref.actor.router_replay.mode": "R3"}, "trainer.routing_replay", "rollout"),
        ({"actor_rollout_ref.rollout.enable_rollout_routing_replay": True}, "rollout.return_routed_experts", True),
    ],
)
def test_what_means_something_else(given, setting, value):
    assert migrate(given).values.get(setting) == value


def test_what_a_reward_function_may_do_is_noted():
    assert CONFINED in migrate({"custom_reward_function.path": "r.py"}).notes
    assert CONFINED not in migrate({"data.train_batch_size": 4}).notes


@each(
    ("given", "why"),
    [
        ({"algorithm.adv_estimator": "optimal_token_baseline"}, "so that grpo is written"),
        ({"data.train_batch_size": "$bsz", "actor_rollout_ref.actor.ppo_mini_batch_size": "$mini"}, "not resolved"),
        ({"data.truncation": "left"}, "never cuts a prompt"),
        ({"data.train_batch_size": 10, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}, "not a multiple"),
        ({"actor_rollout_ref.rollout.multi_turn.enable": True}, ""),
        ({"reward_model.reward_manager": "prime"}, "docs/rewards.md"),
        ({"algorithm.adv_estimator": "rloo", "actor_rollout_ref.actor.tau_pos": 1.0}, "not a setting of"),
        ({"trainer.balance_batch": True}, ""),
    ],
)
def test_what_has_no_equivalent_is_listed_with_its_value(given, why):
    *_, (name, value) = given.items()
    migrated = migrate(given)
    assert [(one, found) for one, found, _ in migrated.lost] == [(name, value)]
    assert why in migrated.lost[0][2] != ""
    assert f"{name} = {value!r}" in migrated.to_toml()


def test_yaml_with_interpolations_and_overrides(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("""
defaults: [_self_]
data: {train_batch_size: 64, max_response_length: 100}
actor_rollout_ref:
  actor: {optim: {lr: 1e-6}, ppo_mini_batch_size: "${data.train_batch_size}"}
  rollout: {n: 4, response_length: "${data.max_response_length}"}
custom_reward_function: {path: r.py, reward_kwargs: {strict: true, deep: {x: 1}}}
trainer: {project_name: p, default_local_dir: "out/${trainer.project_name}/${oc.select:trainer.name, none}"}
""")
    values = migrate(read_verl(path, ["actor_rollout_ref.rollout.n=8"])).values
    assert values["trainer.optimizer.lr"] == 1e-6
    assert (values["trainer.mini_batches"], values["rollout.max_new_tokens"]) == (1, 100)
    assert values["rollout.samples_per_prompt"] == 8
    assert values["reward.settings"] == {"strict": True, "deep": {"x": 1}}
    assert values["run.folder"] == "out/p/none"
    path.write_text("defaults: [own_trainer, _self_]\ndata: {train_files: a}\n")
    assert [name for name, _, _ in migrate(read_verl(path)).lost] == ["defaults"]


def test_whatever_hydra_takes_in_a_script_is_named(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("""
export VLLM_USE_V1=1
DATA=(
    data.train_files=a.parquet
)
python3 -m verl.trainer.main_ppo --config-path=configs --config-name grpo.yaml "${DATA[@]}" \\
    model_engine=megatron +actor@actor_rollout_ref.actor=own ~critic ~trainer.logger \\
    reward.custom_reward_function.path=r.py +sandbox_fusion.url=http://s/?a=b teacher.path=x
""")
    migrated = migrate(read_verl(path))
    assert {name: value for name, value, _ in migrated.lost} == {
        "--config-path": "configs",
        "--config-name": "grpo.yaml",
        "model_engine": "megatron",
        "actor@actor_rollout_ref.actor": "own",
        "~critic": "",
        "~trainer.logger": "",
        "sandbox_fusion.url": "http://s/?a=b",
        "teacher.path": "x",
    }
    assert (migrated.values["data.path"], migrated.values["reward.name"]) == ("a.parquet", "r.py:compute_score")


@pytest.mark.parametrize(
    ("name", "text", "overrides", "reason"),
    [
        ("a.yaml", "- 1", [], "holds a list"),
        ("a.yaml", "a: [", [], "a.yaml"),
        ("a.sh", "echo hello", [], "has no override"),
        ("a.sh", "echo 'open", [], "a.sh"),
        ("a.yaml", "data: {}", ["n=8"], "'n=8' is no override"),
    ],
)
def test_what_cannot_be_read(tmp_path, name, text, overrides, reason):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(VerlConfigError, match=reason):
        read_verl(path, overrides)
    with pytest.raises(VerlConfigError, match="cannot read"):
        read_verl(Path("nowhere.yaml"))


TOOLS = {
    "actor_rollout_ref.model.path": "m",
    "data.train_files": "d.parquet",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": 2,
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "tools.yaml",
}


ONE_TURN = {
    **{key: value for key, value in TOOLS.items() if "multi_turn" not in key},
    "data.tool_config_path": "tools.yaml",
}


def test_tools_become_a_conversation():
    rollout = "actor_rollout_ref.rollout."
    more = {f"{rollout}multi_turn.max_assistant_turns": 5, "data.tool_config_path": None}
    lost = {
        f"{rollout}multi_turn.max_user_turns": (3, "agent.max_turns"),
        f"{rollout}multi_turn.format": ("hermes", "docs/conversations.md"),
        f"{rollout}multi_turn.interaction_config_path": ("talk.yaml", "docs/environments.md"),
        f"{rollout}multi_turn.max_tool_response_length": (256, "shortened by the tools"),
        f"{rollout}agent.num_workers": (2, "relaxd scale agent=N"),
    }
    migrated = migrate(TOOLS | more | {name: value for name, (value, _) in lost.items()})
    config = load(migrated.to_toml())
    assert migrated.problems == []
    assert (config.agent.environment, config.agent.max_turns) == ("verl_tools", 5)
    assert (config.run.colocate, config.weights.transport) == (True, "cuda_ipc")  # as in verl
    assert config.agent.settings == {"config": "tools.yaml", "max_calls": 2}
    assert (config.data.tools_file, config.reward.choose_by) == (None, "data_source")
    assert "what the tools paid is added by [[reward.terms]]" in "\n".join(migrated.notes)
    assert [name for name, _, _ in migrated.lost] == list(lost)
    assert all(lost[name][1] in why for name, _, why in migrated.lost)


def test_tools_without_conversations_become_a_reward_of_one_turn():
    migrated = migrate(ONE_TURN)
    assert migrated.problems == []
    config = load(migrated.to_toml())
    assert (str(config.data.tools_file), config.reward.name, config.reward.choose_by) == (
        "tools.yaml",
        "verl_tools",
        "",
    )
    assert config.reward.settings == {"config": "tools.yaml", "max_calls": 1}
    notes = "\n".join(migrated.notes)
    assert "answers end after one turn; observations are not fed back" in notes
    assert "verl scores by data_source" in notes
    assert migrated.lost == []


def test_tools_are_added_to_a_reward_of_ones_own():
    own = {"custom_reward_function.path": "r.py", "custom_reward_function.reward_kwargs": {"a": 1}}
    migrated = migrate(ONE_TURN | own)
    assert migrated.problems == []
    first, second = load(migrated.to_toml()).reward.terms
    assert (first.name, first.settings) == ("r.py:compute_score", {"a": 1})
    assert (second.name, second.settings["config"], second.weight) == ("verl_tools", "tools.yaml", 1.0)
    assert migrate(ONE_TURN | {"data.tool_config_path": None}).values["reward.choose_by"]
