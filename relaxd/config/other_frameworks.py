"""Settings of TRL, verl, prime-rl and Relax (whose flags come from slime), and their equivalents in relaxd.

docs/coming-from.md is written from this table, and errors for unknown settings look names up in it
(`relaxd.config.load_toml`).
"""

from typing import NamedTuple

from relaxd.text import table_rows

FRAMEWORKS = ("TRL", "verl", "prime-rl", "Relax")
_TABLE = """
run.steps: TRL max_steps | verl trainer.total_training_steps | prime-rl max_steps | Relax --num-rollout
run.steps: TRL num_train_epochs | verl trainer.total_epochs | Relax --num-epoch; steps, not epochs
run.seed: TRL seed | verl data.seed | Relax --seed --rollout-seed
run.folder: TRL output_dir | verl trainer.default_local_dir | prime-rl output_dir | Relax --save
run.colocate: TRL vllm_mode | verl @hybrid_engine | Relax --colocate; engines and trainer take turns
model.path: TRL model | verl @model.path | prime-rl model.name | Relax --hf-checkpoint
model.chat_template: prime-rl tokenizer.chat_template
model.chat_template_arguments: TRL chat_template_kwargs | verl data.apply_chat_template_kwargs | Relax
  --apply-chat-template-kwargs
data.prompt_key: verl data.prompt_key | Relax --input-key
data.answer_key: Relax --label-key; verl's is "reward_model.ground_truth"
data.metadata_key: Relax --metadata-key
data.system_prompt: Relax --system-prompt
data.path: TRL train_dataset | verl data.train_files | Relax --prompt-data; several: data.sources
data.eval_path: TRL eval_dataset | Relax --eval-prompt-data
data.source: prime-rl orchestrator.train.env; answers are scored by reward.name
data.max_prompt_tokens: TRL max_prompt_length | verl data.max_prompt_length | Relax --rollout-max-prompt-len
data.overlong: verl data.filter_overlong_prompts data.truncation; prompts are never cut
data.tools_key: Relax --tool-key
data.tools_file: verl @rollout.multi_turn.tool_config_path data.tool_config_path; with multi_turn.enable the
  environment verl_tools, else the reward verl_tools, which feeds nothing back
data.source: verl data.custom_cls.path data.custom_cls.name | Relax --data-source-path; a class of your own
  (docs/data.md)
data.curriculum.sampler: verl data.sampler.class_path data.sampler.class_name; a class of your own has choose(visit,
  record) (docs/curriculum.md)
data.curriculum.max_pass_rate: prime-rl orchestrator.buffer.easy_threshold; the mean reward of a prompt
data.curriculum.min_pass_rate: prime-rl orchestrator.buffer.hard_threshold; the mean reward of a prompt
data.shuffle: TRL shuffle_dataset | verl data.shuffle | Relax --rollout-shuffle
reward.name: TRL reward_funcs | verl reward.custom_reward_function.path reward.custom_reward_function.name
  reward.reward_manager.name custom_reward_function.path custom_reward_function.name reward_model.reward_manager |
  Relax --custom-rm-path --rm-type; a bundled reward, or a function, class or verl file of your own (docs/rewards.md)
reward.settings: verl reward.custom_reward_function.reward_kwargs custom_reward_function.reward_kwargs | Relax
  --custom-config-path
reward.workers: verl reward.num_workers reward_model.num_workers; for each reward replica
reward.key: Relax --reward-key; verl's "score" is found without it
reward.choose_by: verl data.reward_fn_key; verl's names of data sources are known
reward.terms: TRL reward_weights; each term has a name and a weight
rollout.samples_per_prompt: TRL num_generations | verl @rollout.n | prime-rl orchestrator.group_size
  orchestrator.rollouts_per_example | Relax --n-samples-per-prompt
rollout.max_new_tokens: TRL max_completion_length | verl data.max_response_length @rollout.response_length | prime-rl
  orchestrator.train.sampling.max_completion_tokens orchestrator.train.sampling.max_tokens | Relax
  --rollout-max-response-len
rollout.temperature: TRL temperature | verl @rollout.temperature | prime-rl orchestrator.train.sampling.temperature |
  Relax --rollout-temperature
rollout.top_p: TRL top_p | verl @rollout.top_p | Relax --rollout-top-p
rollout.top_k: TRL top_k | verl @rollout.top_k | Relax --rollout-top-k; 0 turns it off, not -1
rollout.engine: TRL use_vllm | verl @rollout.name | Relax --rollout-external; there is no vLLM
rollout.dtype: verl @rollout.dtype | prime-rl inference.model.dtype | Relax --sglang-dtype
rollout.max_running_samples: verl @rollout.max_num_seqs | Relax --sglang-max-running-requests
rollout.tensor_parallel: TRL vllm_tensor_parallel_size | verl @rollout.tensor_model_parallel_size | prime-rl
  inference.parallel.tp | Relax --rollout-num-gpus-per-engine
rollout.memory_fraction: TRL vllm_gpu_memory_utilization | verl @rollout.gpu_memory_utilization | prime-rl
  inference.gpu_memory_utilization | Relax --sglang-mem-fraction-static
rollout.return_routed_experts: verl @rollout.enable_rollout_routing_replay | prime-rl
  inference.enable_return_routed_experts
rollout.partial.enabled: Relax --partial-rollout; synchronisations don't end answers, so only engines that go do
rollout.partial.mask_off_policy: Relax --mask-offpolicy-in-partial-rollout
rollout.sglang: verl @rollout.engine_kwargs.sglang; a table of SGLang's options
algorithm.name: verl algorithm.adv_estimator | prime-rl orchestrator.algorithms | Relax --advantage-estimator
algorithm.name: TRL importance_sampling_level; "gspo" is its "sequence"
algorithm.normalize_std: TRL scale_rewards | verl algorithm.norm_adv_by_std_in_grpo | Relax
  --disable-grpo-std-normalization
algorithm.drop_zero_variance: verl algorithm.filter_groups.enable | prime-rl orchestrator.pre_batch_filters
  orchestrator.post_batch_filters | Relax --dynamic-sampling-filter-path
algorithm.clip_low: TRL epsilon | verl @actor.clip_ratio_low @actor.clip_ratio | Relax --eps-clip; algorithm.clip_high
  is set apart from it
algorithm.clip_high: TRL epsilon_high | verl @actor.clip_ratio_high | Relax --eps-clip-high
algorithm.old_logprobs: Relax --use-rollout-logprobs; "rollout" is the default
algorithm.correction: TRL vllm_importance_sampling_correction vllm_importance_sampling_mode | verl
  algorithm.rollout_correction.rollout_is | Relax --use-tis
algorithm.tis_clip: TRL vllm_importance_sampling_cap | verl algorithm.rollout_correction.rollout_is_threshold | Relax
  --tis-clip
algorithm.kl_coef: TRL beta | verl @actor.kl_loss_coef @actor.use_kl_loss | Relax --kl-loss-coef --use-kl-loss; more
  than 0 turns the reference on
algorithm.kl_estimator: verl @actor.kl_loss_type | Relax --kl-loss-type
algorithm.kl_unbiased: TRL use_bias_correction_kl | Relax --use-unbiased-kl
algorithm.kl_reward_coef: verl algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward | Relax --kl-coef
roles.reference.model: Relax --ref-load; empty: the initial model
roles.reference.refresh_every: TRL ref_model_sync_steps | Relax --ref-update-interval
algorithm.distill_coef: Relax --opd-kl-coef --use-opd; in the advantages; needs a teacher
algorithm.reward_coef: Relax --opd-only-reward; of "opd"; 0 is distillation alone
roles.teacher.model: Relax --opd-teacher-load
roles.teacher.engine: Relax --opd-type; for megatron also roles.teacher.placement
algorithm.distill_top_k: verl distillation.distillation_loss.topk | Relax --opd-log-prob-top-k; in the loss
roles.judge.model: verl reward.reward_model.model_path reward_model.model.path | Relax --genrm-model-path; a model
  that writes; the role judge: --judge N starts replicas
roles.judge.tensor_parallel: verl reward.reward_model.rollout.tensor_model_parallel_size | Relax
  --genrm-num-gpus-per-engine
algorithm.dual_clip: TRL delta | verl @actor.clip_ratio_c | Relax --eps-clip-c; 0 turns it off
algorithm.gamma: verl algorithm.gamma | Relax --gamma
algorithm.gae_lambda: verl algorithm.lam | Relax --lambd
algorithm.value_clip: verl critic.cliprange_value | Relax --value-clip
algorithm.whiten_advantages: Relax --normalize-advantages; verl always does
roles.critic.model: verl critic.model.path | Relax --critic-load
roles.critic.optimizer.lr: verl critic.optim.lr | Relax --critic-lr
algorithm.tau_positive: TRL sapo_temperature_pos | verl @actor.tau_pos | Relax --sapo-tau-pos
algorithm.tau_negative: TRL sapo_temperature_neg | verl @actor.tau_neg | Relax --sapo-tau-neg
algorithm.opsm_delta: TRL off_policy_mask_threshold | Relax --opsm-delta --use-opsm
algorithm.tis_clip_low: Relax --tis-clip-low
algorithm.veto_high: prime-rl trainer.loss.token_mask_high
algorithm.veto_low: verl algorithm.rollout_correction.rollout_token_veto_threshold | prime-rl
  trainer.loss.token_mask_low; with algorithm.veto_sequences the whole sequence, as in verl
algorithm.mask_truncated: TRL mask_truncated_completions
algorithm.overlong_buffer: verl reward.reward_kwargs.overlong_buffer_cfg.len
  reward.reward_kwargs.overlong_buffer_cfg.enable reward_model.reward_kwargs.overlong_buffer_cfg.len
  reward_model.overlong_buffer.len reward_model.overlong_buffer.enable; algorithm.overlong_limit is the length at
  which the whole penalty counts
algorithm.overlong_penalty: verl reward.reward_kwargs.overlong_buffer_cfg.penalty_factor
  reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward_model.overlong_buffer.penalty_factor
algorithm.entropy_coef: verl @actor.entropy_coeff | Relax --entropy-coef
algorithm.loss_aggregation: TRL loss_type | verl @actor.loss_agg_mode | Relax --calculate-per-token-loss; TRL's "dapo"
  and verl's "token-mean" are "token_mean"
trainer.groups_per_step: TRL per_device_train_batch_size | verl data.train_batch_size | prime-rl
  orchestrator.batch_size | Relax --rollout-batch-size; it counts prompts, each with rollout.samples_per_prompt
  samples
trainer.mini_batches: TRL steps_per_generation | verl @actor.ppo_mini_batch_size | Relax --num-steps-per-rollout
  --global-batch-size; updates in a pass over a step's groups: their number, not the size of a mini-batch
trainer.epochs: TRL num_iterations | verl @actor.ppo_epochs; passes over a step's groups
trainer.micro_batch_tokens: verl @actor.ppo_max_token_len_per_gpu | prime-rl seq_len | Relax --max-tokens-per-gpu
trainer.dtype: TRL bf16 | prime-rl trainer.model.optimization_dtype | Relax --bf16; "bfloat16" or "float32"
trainer.fp32_lm_head: TRL cast_lm_head_to_fp32
trainer.ranks: verl trainer.n_gpus_per_node | prime-rl deployment.num_train_gpus | Relax --actor-num-gpus-per-node
  --resource; GPUs of the trainer alone; placement.gpus has the engines'
trainer.hosts: verl trainer.nnodes | Relax --actor-num-nodes; not with run.colocate
placement.gpus: prime-rl deployment.num_infer_gpus | Relax --rollout-num-gpus --genrm-num-gpus; a table: { rollout =
  4, judge = 1 }
trainer.tensor_parallel: verl @actor.megatron.tensor_model_parallel_size | Relax --tensor-model-parallel-size
trainer.pipeline_parallel: verl @actor.megatron.pipeline_model_parallel_size | Relax --pipeline-model-parallel-size
trainer.pipeline_chunks: verl @actor.megatron.virtual_pipeline_model_parallel_size | Relax
  --num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage; chunks of a stage, not layers of a
  chunk
trainer.context_parallel: verl @actor.megatron.context_parallel_size @actor.ulysses_sequence_parallel_size | prime-rl
  trainer.model.cp | Relax --context-parallel-size
trainer.expert_parallel: verl @actor.megatron.expert_model_parallel_size | prime-rl trainer.model.ep | Relax
  --expert-model-parallel-size
trainer.recompute: TRL gradient_checkpointing | verl @model.enable_gradient_checkpointing | prime-rl
  trainer.model.ac.mode | Relax --recompute-granularity
trainer.recompute_layers: Relax --recompute-num-layers
trainer.overlap_grad_reduce: verl @actor.megatron.override_ddp_config.overlap_grad_reduce | Relax
  --overlap-grad-reduce
trainer.shard_gradients: Relax --data-parallel-sharding-strategy; true is Megatron's optim_grads; FSDP always shards
  gradients. Weights aren't sharded over data-parallel ranks
trainer.attention: prime-rl trainer.model.attn | Relax --attention-backend
trainer.collective_timeout_seconds: prime-rl trainer.dist_timeout_seconds | Relax --distributed-timeout-minutes
trainer.moe.aux_loss_coef: Relax --moe-aux-loss-coeff
trainer.moe.z_loss_coef: Relax --moe-z-loss-coeff
trainer.moe.freeze_router: prime-rl trainer.model.freeze_moe_router
trainer.routing_replay: verl @actor.router_replay.mode | prime-rl trainer.enable_router_replay | Relax
  --use-rollout-routing-replay --use-routing-replay; "rollout" is R3, "trainer" is R2
trainer.optimizer.lr: TRL learning_rate | verl @actor.optim.lr | prime-rl trainer.optim.lr | Relax --lr
trainer.optimizer.min_lr: prime-rl trainer.scheduler.min_lr | Relax --min-lr
trainer.optimizer.schedule: TRL lr_scheduler_type | verl @actor.optim.warmup_style @actor.optim.lr_scheduler_type |
  prime-rl trainer.scheduler.type | Relax --lr-decay-style
trainer.optimizer.warmup_steps: TRL warmup_steps warmup_ratio | verl @actor.optim.lr_warmup_steps
  @actor.optim.lr_warmup_steps_ratio | prime-rl trainer.scheduler.warmup_steps | Relax --lr-warmup-iters; in steps,
  not as a share
trainer.optimizer.weight_decay: TRL weight_decay | verl @actor.optim.weight_decay | prime-rl
  trainer.optim.weight_decay | Relax --weight-decay
trainer.optimizer.beta1: TRL adam_beta1 | prime-rl trainer.optim.betas1 | Relax --adam-beta1
trainer.optimizer.beta2: TRL adam_beta2 | prime-rl trainer.optim.betas2 | Relax --adam-beta2
trainer.optimizer.epsilon: TRL adam_epsilon | Relax --adam-eps
trainer.optimizer.clip_grad: TRL max_grad_norm | verl @actor.grad_clip | prime-rl trainer.optim.max_norm | Relax
  --clip-grad
trainer.optimizer.moments: Relax --exp-avg-dtype --exp-avg-sq-dtype; "bfloat16" or "float32" for both, or "float8" for
  the first; it needs no Transformer Engine
trainer.optimizer.cpu_offload: verl @actor.fsdp_config.optimizer_offload | prime-rl trainer.model.optim_cpu_offload |
  Relax --optimizer-cpu-offload
trainer.checkpoint.every: TRL save_steps | verl trainer.save_freq | prime-rl ckpt.interval | Relax --save-interval
trainer.checkpoint.keep: TRL save_total_limit | verl trainer.max_actor_ckpt_to_keep | prime-rl ckpt.keep_last | Relax
  --max-actor-ckpt-to-keep
board.max_staleness: prime-rl orchestrator.max_off_policy_steps | Relax --max-staleness
board.oversample: prime-rl orchestrator.oversampling_factor | Relax --over-sampling-batch-size; a factor of the groups
  that a step needs
weights.interval: Relax --update-weights-interval
weights.transport: prime-rl weight_broadcast.type | Relax --checkpoint-engine-backend
weights.bucket_bytes: verl @rollout.checkpoint_engine.update_weights_bucket_megabytes
  @rollout.update_weights_bucket_megabytes | Relax --update-weight-buffer-size; in bytes
weights.timeout_seconds: prime-rl weight_broadcast.timeout
eval.interval: TRL eval_steps | verl trainer.test_freq | prime-rl orchestrator.eval.interval | Relax --eval-interval
eval.prompts: verl data.val_max_samples | prime-rl orchestrator.eval.num_examples
eval.max_new_tokens: prime-rl orchestrator.eval.sampling.max_completion_tokens | Relax --eval-max-response-len
eval.before: TRL eval_on_start | verl trainer.val_before_train | Relax --skip-eval-before-train
eval.sets: verl data.val_files @rollout.val_kwargs.n @rollout.val_kwargs.temperature @rollout.val_kwargs.top_p
  @rollout.val_kwargs.top_k | prime-rl orchestrator.eval.env | Relax --eval-config; each set has a name,
  samples_per_prompt, temperature, top_p, top_k and more
rollout.stop: Relax --rollout-stop
rollout.stop_token_ids: Relax --rollout-stop-token-ids
none: Relax --n-samples-per-eval-prompt --eval-temperature --eval-top-p; samples_per_prompt, temperature and top_p of
  each of eval.sets
none: TRL min_p; there is no min-p sampling: use rollout.top_p or rollout.top_k
none: TRL repetition_penalty; there is no penalty on repetition: it would change the policy
none: verl algorithm.kl_penalty | prime-rl trainer.loss.kl_tau; in a reward the estimate is always k1
none: Relax --group-rm; a function whose parameter is called samples gets a group
none: verl @actor.ppo_micro_batch_size_per_gpu @actor.use_dynamic_bsz | Relax --micro-batch-size
  --use-dynamic-batch-size; micro-batches are always packed, up to trainer.micro_batch_tokens
none: TRL report_to run_name | verl trainer.logger trainer.project_name trainer.experiment_name | prime-rl
  wandb.project wandb.name | Relax --use-wandb --wandb-project --use-tensorboard; metrics are in the run's folder;
  tracking.trackers sends them to TensorBoard, W&B, MLflow, ClearML or Trackio
none: TRL resume_from_checkpoint | verl trainer.resume_mode | prime-rl ckpt.resume_step | Relax --load; `relaxd resume
  RUN` continues a run, with --from-step N from the checkpoint of an earlier step
agent.environment: verl @rollout.multi_turn.enable; conversations of several turns (docs/agents.md)
agent.function: Relax --custom-generate-function-path; a function that asks the model and returns the reward; relaxd
  keeps tokens and masks (docs/agents.md)
agent.max_turns: verl @rollout.multi_turn.max_assistant_turns
none: TRL peft_config | verl @model.lora_rank | prime-rl trainer.model.lora; there is no LoRA
"""
"""Rows "SETTING: names in each framework; note", in the order of relaxd's sections. "none" stands for names without an
equivalent. The note is the difference, or the setting to use instead. TRL's names are arguments of GRPOConfig or
GRPOTrainer, verl's keys of ppo_trainer.yaml (@ stands for "actor_rollout_ref."), prime-rl's keys of rl.toml, Relax's
also flags of slime and Megatron."""


class Equivalent(NamedTuple):
    """A setting of relaxd with its names in other frameworks, or other frameworks' names that have no setting in
    relaxd."""

    setting: str
    """Dotted name of the setting in relaxd; empty if relaxd has no such setting."""
    names: dict[str, list[str]]
    """Names of the setting in other frameworks, by framework."""
    note: str
    """Difference of the other frameworks' setting, or the relaxd setting to use instead: a clause in plain text. May be
    empty."""


def _equivalent(row: str) -> Equivalent:
    setting, _, rest = row.partition(": ")
    found, _, note = rest.partition("; ")
    names: dict[str, list[str]] = {framework: [] for framework in FRAMEWORKS}
    for part in found.replace("@", "actor_rollout_ref.").split(" | "):
        framework, *names[framework] = part.split()
    return Equivalent("" if setting == "none" else setting, names, note)


EQUIVALENTS = tuple(map(_equivalent, table_rows(_TABLE)))
"""Settings of other frameworks and their equivalents in relaxd: the parsed rows of the table."""
