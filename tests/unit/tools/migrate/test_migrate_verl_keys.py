"""`relaxd migrate verl`: no key disappears. Each is written, noted, lost with a reason, or idle, and is named."""

import itertools
from typing import Any

import pytest

from relaxd.config.load_toml import load
from relaxd.tools.migrate.key_fates import KeyFate
from relaxd.tools.migrate.verl import migrate
from tests.kit.cases import each

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
WRITTEN: dict[str, Any] = {
    "data.tool_config_path": "tools.yaml",
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": False,
    "algorithm.filter_groups.enable": True,
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 3.0,
    "data.train_files": ["~/train.parquet"],
    "data.train_max_samples": 5000,
    "data.val_files": ["data/aime/test.parquet", "data/math500/test.parquet"],
    "data.val_max_samples": 100,
    "data.prompt_key": "prompt",
    "data.train_batch_size": 512,
    "data.max_prompt_length": 2048,
    "data.max_response_length": 8192,
    "data.filter_overlong_prompts": True,
    "data.shuffle": True,
    "data.apply_chat_template_kwargs.enable_thinking": False,
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.hybrid_engine": True,
    f"{A}ppo_mini_batch_size": 32,
    f"{A}ppo_max_token_len_per_gpu": 10240,
    f"{A}clip_ratio_high": 0.28,
    f"{A}use_kl_loss": True,
    f"{A}kl_loss_coef": 0.001,
    f"{A}kl_loss_type": "low_var_kl",
    f"{A}loss_agg_mode": "token-mean",
    f"{A}optim.lr": 1e-6,
    f"{A}optim.betas": [0.9, 0.95],
    f"{A}optim.min_lr_ratio": 0.1,
    f"{A}optim.lr_scheduler_type": "cosine",
    f"{A}optim.lr_warmup_steps": 10,
    f"{A}optim.clip_grad": 1.0,
    f"{R}name": "sglang",
    f"{R}n": 16,
    f"{R}gpu_memory_utilization": 0.6,
    f"{R}tensor_model_parallel_size": 2,
    f"{R}checkpoint_engine.update_weights_bucket_megabytes": 512,
    f"{R}engine_kwargs.sglang.attention_backend": "fa3",
    f"{R}val_kwargs.n": 32,
    f"{R}val_kwargs.temperature": 1.0,
    f"{R}val_kwargs.top_p": 0.7,
    f"{R}val_kwargs.top_k": -1,
    f"{R}val_kwargs.do_sample": True,
    "reward.custom_reward_function.path": "r.py",
    "reward.custom_reward_function.name": "score",
    "reward.custom_reward_function.reward_kwargs.strict": True,
    "reward.custom_reward_function.reward_kwargs.limits.seconds": 5,
    "reward.num_workers": 4,
    "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
    "reward.reward_kwargs.overlong_buffer_cfg.len": 4096,
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 0.5,
    "reward.reward_kwargs.max_resp_len": 8192,
    "reward.reward_model.model_path": "judges/one",
    "reward.reward_model.rollout.tensor_model_parallel_size": 4,
    "reward.reward_model.rollout.gpu_memory_utilization": 0.4,
    "reward.reward_model.rollout.response_length": 512,
    "reward.reward_model.rollout.name": "vllm",
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 2,
    "trainer.save_freq": 20,
    "trainer.test_freq": 5,
    "trainer.val_before_train": False,
    "trainer.default_local_dir": "checkpoints/aime",
}
NOTED: dict[str, Any] = {"reward.reward_model.enable": True, "trainer.total_epochs": 3}
LOST: dict[str, tuple[Any, str]] = {
    "data.truncation": ("left", "never cuts"),
    "data.custom_cls.path": ("sets.py", "docs/data.md"),
    "data.custom_cls.name": ("Set", "docs/data.md"),
    "data.sampler.class_path": ("samplers.py", "docs/curriculum.md"),
    "data.sampler.class_name": ("Sampler", "docs/curriculum.md"),
    "data.function_tool_path": ("tools.py", "agent.environment"),
    "data.image_key": ("images", "media_keys"),
    f"{A}strategy": ("fsdp2", "trainer.tensor_parallel"),
    f"{A}fsdp_config.param_offload": (True, "trainer.tensor_parallel"),
    f"{R}agent.num_workers": (8, "scale agent"),
    f"{R}engine_kwargs.vllm.swap_space": (1, "no vLLM"),
    f"{R}enforce_eager": (True, "rollout.sglang"),
    "actor_rollout_ref.ref.fsdp_config.param_offload": (True, "roles.reference"),
    "reward.reward_kwargs.own_argument": (1, "reward.settings"),
    "reward.reward_model.enable_resource_pool": (True, "--judge N"),
    "reward.sandbox_fusion.url": ("http://sandbox", "own sandbox"),
    "algorithm.filter_groups.metric": ("acc", "by their reward"),
    "trainer.logger": (["console", "wandb"], "tracking.trackers"),
    "trainer.val_only": (True, "relaxd eval"),
    "trainer.not_a_key_of_verl": (1, "no such setting"),
    "--config-name": ("grpo.yaml", "files that hydra adds"),
    "~data.x": ("", "nothing is deleted"),
    "model_engine": ("megatron", "files that hydra adds"),
}
IDLE: dict[str, Any] = {
    "algorithm._target_": "verl.trainer.config.AlgoConfig",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "critic.optim.lr": 1e-5,
    "critic.model.path": "critics/one",
    "custom_reward_function.path": None,
    "reward_model.enable": None,
    "reward_model.model.path": "models/one",
    "reward_model.reward_manager": None,
    "reward.reward_manager.name": "dapo",
    "reward.reward_manager.module.name": "custom_reward_manager",
    "reward.reward_kwargs.overlong_buffer_cfg.log": False,
    "data.tokenizer": None,
    f"{A}optim.warmup_style": None,
    f"{A}router_replay.mode": "disabled",
    f"{R}mode": "async",
    f"{R}trace.token2text": False,
    f"{R}multi_turn.enable": False,
    f"{R}multi_turn.max_assistant_turns": 5,
    "distillation.distillation_loss.topk": 32,
    "global_profiler.save_path": "outputs",
    "transfer_queue.enable": False,
    "trainer.v1.separate_async.parameter_sync_step": 4,
}
ALL = WRITTEN | NOTED | {name: value for name, (value, _) in LOST.items()} | IDLE


def test_every_key_is_written_or_named():
    migrated = migrate(ALL)
    assert set(migrated.fates) == set(ALL)
    assert {name for name, fate in migrated.fates.items() if fate is KeyFate.LOST} == set(LOST)
    # What only repeats a setting, or turns another on, counts as written: all arguments of a reward manager do.
    idle = {name for name, fate in migrated.fates.items() if fate is KeyFate.IDLE}
    assert idle | {"reward.reward_kwargs.overlong_buffer_cfg.log"} == set(IDLE)
    assert {name for name, fate in migrated.fates.items() if fate is KeyFate.NOTED} == set(NOTED)
    assert {name: (value, why) for name, value, why in migrated.lost}.keys() == LOST.keys()
    for name, value, why in migrated.lost:
        assert value == LOST[name][0]
        assert LOST[name][1] in why, (name, why)
    text = migrated.to_toml()
    named = [*LOST, *idle]
    assert [name for name in named if name not in text] == []
    assert migrated.problems == []


def test_what_was_written_is_what_verl_does():
    config = load(migrate(ALL).to_toml())
    assert [(one.name, str(one.path), one.prompts) for one in config.eval.sets] == [
        ("aime-test", "data/aime/test.parquet", 100),
        ("math500-test", "data/math500/test.parquet", 100),
    ]
    first = config.eval.sets[0]
    assert (first.samples_per_prompt, first.temperature, first.top_p, first.top_k) == (32, 1.0, 0.7, 0)
    assert str(config.data.path) == "~/train.parquet@[0:5000]"
    own, tools = config.reward.terms
    assert (own.name, config.reward.choose_by, config.reward.workers) == ("r.py:score", "", 4)
    assert own.settings == {"strict": True, "limits": {"seconds": 5}}
    assert (tools.name, tools.settings) == ("verl_tools", {"config": "tools.yaml", "max_calls": 1})
    assert (config.algorithm.overlong_buffer, config.algorithm.overlong_limit) == (4096, 8192)
    assert (config.algorithm.overlong_penalty, config.algorithm.tis_clip) == (0.5, 3.0)
    judge = config.roles.judge
    assert (judge.model, judge.engine, judge.tensor_parallel) == ("judges/one", "sglang", 4)
    assert (judge.memory_fraction, judge.max_new_tokens) == (0.4, 512)
    assert config.weights.bucket_bytes == 512 << 20
    assert config.rollout.sglang == {"attention_backend": "fa3"}
    assert config.model.chat_template_arguments == {"enable_thinking": False}
    optimizer = config.trainer.optimizer
    assert (optimizer.beta2, optimizer.min_lr, optimizer.warmup_steps) == (0.95, pytest.approx(1e-7), 10)
    notes = "\n".join(migrate(ALL).notes)
    for said in ("begins with ~", "takes 5000 at random", "verl counts all files together", "await judge.ask"):
        assert said in notes


@each("section", ["reward", "reward_model"])
@each("buffer", ["reward_kwargs.overlong_buffer_cfg", "overlong_buffer_cfg", "overlong_buffer"])
def test_long_answers_are_punished_by_whatever_name(section, buffer):
    given = {f"{section}.{buffer}.{key}": value for key, value in (("enable", True), ("len", 9), ("penalty_factor", 2))}
    values = migrate(given | {"data.max_response_length": 100}).values
    names = ("algorithm.overlong_buffer", "algorithm.overlong_penalty", "algorithm.overlong_limit")
    assert [values.get(name) for name in names] == [9, 2.0, 100]
    off = migrate(given | {f"{section}.{buffer}.enable": False})
    assert "algorithm.overlong_buffer" not in off.values
    assert set(off.fates.values()) == {KeyFate.IDLE}
    other = migrate(given | {"reward_model.reward_manager": "naive"})  # which ignores it
    assert "algorithm.overlong_buffer" not in other.values


def test_arguments_of_a_manager_may_be_a_table():
    table = {"overlong_buffer_cfg": {"enable": True, "len": 9, "penalty_factor": 1, "log": False}, "max_resp_len": 50}
    values = migrate({"reward.reward_kwargs": table, "reward.reward_manager.name": "dapo"}).values
    assert (values["algorithm.overlong_buffer"], values["algorithm.overlong_limit"]) == (9, 50)


def test_two_keys_for_one_setting_are_noted():
    migrated = migrate({"data.max_response_length": 100, f"{R}response_length": 200})
    assert migrated.values["rollout.max_new_tokens"] == 200
    assert f"rollout.max_new_tokens: 200 of {R}response_length, and not 100 of data.max_response_length" in (
        migrated.notes
    )


def test_without_an_engine_sglang_is_written():
    for given in ({}, {f"{R}name": "???"}):
        migrated = migrate(given)
        assert (migrated.values["rollout.engine"], migrated.values["weights.transport"]) == ("sglang", "cuda_ipc")
        assert any("the configuration names none" in note for note in migrated.notes)


def test_verls_defaults_are_written_where_relaxd_has_others():
    migrated = migrate({"data.max_prompt_length": 700})
    assert migrated.values["trainer.groups_per_step"] == 1024
    assert (migrated.values["trainer.mini_batches"], migrated.values["rollout.max_new_tokens"]) == (4, 512)
    assert migrated.values["data.max_prompt_tokens"] == 700
    assert any("trainer.groups_per_step, " in note and "verl's defaults" in note for note in migrated.notes)


@pytest.mark.parametrize(
    ("own", "expected", "said"),
    [
        ({}, {}, ""),
        ({"temperature": 0.6}, {"temperature": 0.6, "top_p": 1.0, "top_k": 0}, "do_sample is off"),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_p": 1.0, "top_k": 20}, ""),
        ({"n": 4}, {}, "all the same"),
    ],
)
def test_sampling_of_evaluations(own, expected, said):
    given = {"data.val_files": "aime24.parquet"} | {f"{R}val_kwargs.{name}": value for name, value in own.items()}
    migrated = migrate(given)
    assert migrated.values["eval.sets"] == [{"name": "aime24", "path": "aime24.parquet"} | expected]
    assert KeyFate.LOST not in migrated.fates.values()
    assert said in "\n".join(migrated.notes)


def test_names_of_sets_differ():
    files = ["a/test.parquet", "b/test.parquet", "b/test.jsonl", "/x/Ünï code.parquet", "held_out.parquet"]
    names = [one["name"] for one in migrate({"data.val_files": files}).values["eval.sets"]]
    assert names == ["a-test", "b-test", "b-test-2", "n-code", "held_out-2"]
    load(migrate({"data.train_files": "a", "data.val_files": files, "actor_rollout_ref.model.path": "m"}).to_toml())


def test_a_model_that_gives_a_number_is_no_judge():
    for section in ("reward.reward_model", "reward_model"):
        given = {f"{section}.enable": True, f"{section}.model_path": "m", f"{section}.rollout.name": "sglang"}
        migrated = migrate(given)
        assert set(migrated.fates.values()) == {KeyFate.LOST}
        assert "a judge writes" in migrated.lost[0][2]
        assert "roles.judge.model" not in migrated.values


def test_sampling_of_evaluations_needs_a_file():
    assert "data.val_files is missing" in migrate({f"{R}val_kwargs.n": 4}).lost[0][2]


def test_a_trainer_beside_engines():
    given = {"trainer.v1.trainer_mode": "separate_async", "actor_rollout_ref.hybrid_engine": True}
    for order in itertools.permutations(given.items()):
        assert migrate(dict(order)).values["run.colocate"] is False
