"""Names of settings in TRL, verl, prime-rl and Relax (or slime, from which it took its flags), and what they are here.

docs/coming-from.md is written from this table, and errors for unknown settings look names up in it
(`relaxd.config.suggestions`).
"""

from typing import NamedTuple

FRAMEWORKS = ("TRL", "verl", "prime-rl", "Relax")


class Equivalent(NamedTuple):
    """One setting of relaxd, or none, and its names elsewhere; several names are separated by spaces."""

    setting: str
    """Dotted name; empty if relaxd has no such setting."""
    trl: str = ""
    """Arguments of TRL's GRPOConfig or GRPOTrainer."""
    verl: str = ""
    """Keys of verl's ppo_trainer.yaml; @ stands for "actor_rollout_ref."."""
    prime_rl: str = ""
    """Keys of prime-rl's rl.toml."""
    relax: str = ""
    """Flags of Relax and slime, Megatron's included."""
    note: str = ""
    """The difference, or the setting to use instead; a clause in plain text."""

    @property
    def names(self) -> dict[str, list[str]]:
        """Names by framework."""
        texts = (self.trl, self.verl.replace("@", "actor_rollout_ref."), self.prime_rl, self.relax)
        return {framework: text.split() for framework, text in zip(FRAMEWORKS, texts, strict=True)}


EQUIVALENTS = (
    Equivalent("run.steps", "max_steps", "trainer.total_training_steps", "max_steps", "--num-rollout"),
    Equivalent("run.steps", "num_train_epochs", "trainer.total_epochs", "", "--num-epoch", "steps, not epochs"),
    Equivalent("run.seed", "seed", "data.seed", "", "--seed --rollout-seed"),
    Equivalent("run.folder", "output_dir", "trainer.default_local_dir", "output_dir", "--save"),
    Equivalent("run.colocate", "vllm_mode", "@hybrid_engine", "", "--colocate", "engines and trainer take turns"),
    Equivalent("model.path", "model", "@model.path", "model.name", "--hf-checkpoint"),
    Equivalent("model.chat_template", "", "", "tokenizer.chat_template", ""),
    Equivalent(
        "model.chat_template_arguments",
        "chat_template_kwargs",
        "data.apply_chat_template_kwargs",
        "",
        "--apply-chat-template-kwargs",
    ),
    Equivalent("data.prompt_key", "", "data.prompt_key", "", "--input-key"),
    Equivalent("data.answer_key", "", "", "", "--label-key", 'verl\'s is "reward_model.ground_truth"'),
    Equivalent("data.metadata_key", "", "", "", "--metadata-key"),
    Equivalent("data.system_prompt", "", "", "", "--system-prompt"),
    Equivalent("data.path", "train_dataset", "data.train_files", "", "--prompt-data", "several: data.sources"),
    Equivalent("data.eval_path", "eval_dataset", "", "", "--eval-prompt-data"),
    Equivalent("data.source", "", "", "orchestrator.train.env", "", "answers are scored by reward.name"),
    Equivalent("data.max_prompt_tokens", "max_prompt_length", "data.max_prompt_length", "", "--rollout-max-prompt-len"),
    Equivalent("data.overlong", "", "data.filter_overlong_prompts data.truncation", "", "", "prompts are never cut"),
    Equivalent("data.tools_key", "", "", "", "--tool-key"),
    Equivalent(
        "data.tools_file",
        "",
        "@rollout.multi_turn.tool_config_path data.tool_config_path",
        "",
        "",
        "with multi_turn.enable the environment verl_tools, else the reward verl_tools, which feeds nothing back",
    ),
    Equivalent(
        "data.source",
        "",
        "data.custom_cls.path data.custom_cls.name",
        "",
        "--data-source-path",
        "a class of your own (docs/data.md)",
    ),
    Equivalent(
        "data.curriculum.sampler",
        "",
        "data.sampler.class_path data.sampler.class_name",
        "",
        "",
        "a class of your own has choose(visit, record) (docs/curriculum.md)",
    ),
    Equivalent(
        "data.curriculum.max_pass_rate", "", "", "orchestrator.buffer.easy_threshold", "", "the mean reward of a prompt"
    ),
    Equivalent(
        "data.curriculum.min_pass_rate", "", "", "orchestrator.buffer.hard_threshold", "", "the mean reward of a prompt"
    ),
    Equivalent("data.shuffle", "shuffle_dataset", "data.shuffle", "", "--rollout-shuffle"),
    Equivalent(
        "reward.name",
        "reward_funcs",
        "reward.custom_reward_function.path reward.custom_reward_function.name reward.reward_manager.name "
        "custom_reward_function.path custom_reward_function.name reward_model.reward_manager",
        "",
        "--custom-rm-path --rm-type",
        "a bundled reward, or a function, class or verl file of your own (docs/rewards.md)",
    ),
    Equivalent(
        "reward.settings",
        "",
        "reward.custom_reward_function.reward_kwargs custom_reward_function.reward_kwargs",
        "",
        "--custom-config-path",
    ),
    Equivalent("reward.workers", "", "reward.num_workers reward_model.num_workers", "", "", "for each reward replica"),
    Equivalent("reward.key", "", "", "", "--reward-key", 'verl\'s "score" is found without it'),
    Equivalent("reward.choose_by", "", "data.reward_fn_key", "", "", "verl's names of data sources are known"),
    Equivalent("reward.terms", "reward_weights", "", "", "", "each term has a name and a weight"),
    Equivalent(
        "rollout.samples_per_prompt",
        "num_generations",
        "@rollout.n",
        "orchestrator.group_size orchestrator.rollouts_per_example",
        "--n-samples-per-prompt",
    ),
    Equivalent(
        "rollout.max_new_tokens",
        "max_completion_length",
        "data.max_response_length @rollout.response_length",
        "orchestrator.train.sampling.max_completion_tokens orchestrator.train.sampling.max_tokens",
        "--rollout-max-response-len",
    ),
    Equivalent(
        "rollout.temperature",
        "temperature",
        "@rollout.temperature",
        "orchestrator.train.sampling.temperature",
        "--rollout-temperature",
    ),
    Equivalent("rollout.top_p", "top_p", "@rollout.top_p", "", "--rollout-top-p"),
    Equivalent("rollout.top_k", "top_k", "@rollout.top_k", "", "--rollout-top-k", "0 turns it off, not -1"),
    Equivalent("rollout.engine", "use_vllm", "@rollout.name", "", "--rollout-external", "there is no vLLM"),
    Equivalent("rollout.dtype", "", "@rollout.dtype", "inference.model.dtype", "--sglang-dtype"),
    Equivalent("rollout.max_running_samples", "", "@rollout.max_num_seqs", "", "--sglang-max-running-requests"),
    Equivalent(
        "rollout.tensor_parallel",
        "vllm_tensor_parallel_size",
        "@rollout.tensor_model_parallel_size",
        "inference.parallel.tp",
        "--rollout-num-gpus-per-engine",
    ),
    Equivalent(
        "rollout.memory_fraction",
        "vllm_gpu_memory_utilization",
        "@rollout.gpu_memory_utilization",
        "inference.gpu_memory_utilization",
        "--sglang-mem-fraction-static",
    ),
    Equivalent(
        "rollout.return_routed_experts",
        "",
        "@rollout.enable_rollout_routing_replay",
        "inference.enable_return_routed_experts",
        "",
    ),
    Equivalent(
        "rollout.partial.enabled",
        "",
        "",
        "",
        "--partial-rollout",
        "synchronisations don't end answers, so only engines that go do",
    ),
    Equivalent("rollout.partial.mask_off_policy", "", "", "", "--mask-offpolicy-in-partial-rollout"),
    Equivalent("rollout.sglang", "", "@rollout.engine_kwargs.sglang", "", "", "a table of SGLang's options"),
    Equivalent("algorithm.name", "", "algorithm.adv_estimator", "orchestrator.algorithms", "--advantage-estimator"),
    Equivalent("algorithm.name", "importance_sampling_level", "", "", "", '"gspo" is its "sequence"'),
    Equivalent(
        "algorithm.normalize_std",
        "scale_rewards",
        "algorithm.norm_adv_by_std_in_grpo",
        "",
        "--disable-grpo-std-normalization",
    ),
    Equivalent(
        "algorithm.drop_zero_variance",
        "",
        "algorithm.filter_groups.enable",
        "orchestrator.pre_batch_filters orchestrator.post_batch_filters",
        "--dynamic-sampling-filter-path",
    ),
    Equivalent(
        "algorithm.clip_low",
        "epsilon",
        "@actor.clip_ratio_low @actor.clip_ratio",
        "",
        "--eps-clip",
        "algorithm.clip_high is set apart from it",
    ),
    Equivalent("algorithm.clip_high", "epsilon_high", "@actor.clip_ratio_high", "", "--eps-clip-high"),
    Equivalent("algorithm.old_logprobs", "", "", "", "--use-rollout-logprobs", '"rollout" is the default'),
    Equivalent(
        "algorithm.correction",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
        "algorithm.rollout_correction.rollout_is",
        "",
        "--use-tis",
    ),
    Equivalent(
        "algorithm.tis_clip",
        "vllm_importance_sampling_cap",
        "algorithm.rollout_correction.rollout_is_threshold",
        "",
        "--tis-clip",
    ),
    Equivalent(
        "algorithm.kl_coef",
        "beta",
        "@actor.kl_loss_coef @actor.use_kl_loss",
        "",
        "--kl-loss-coef --use-kl-loss",
        "more than 0 turns the reference on",
    ),
    Equivalent("algorithm.kl_estimator", "", "@actor.kl_loss_type", "", "--kl-loss-type"),
    Equivalent("algorithm.kl_unbiased", "use_bias_correction_kl", "", "", "--use-unbiased-kl"),
    Equivalent("algorithm.kl_reward_coef", "", "algorithm.kl_ctrl.kl_coef algorithm.use_kl_in_reward", "", "--kl-coef"),
    Equivalent("roles.reference.model", "", "", "", "--ref-load", "empty: the initial model"),
    Equivalent("roles.reference.refresh_every", "ref_model_sync_steps", "", "", "--ref-update-interval"),
    Equivalent("algorithm.distill_coef", "", "", "", "--opd-kl-coef --use-opd", "in the advantages; needs a teacher"),
    Equivalent("algorithm.reward_coef", "", "", "", "--opd-only-reward", 'of "opd"; 0 is distillation alone'),
    Equivalent("roles.teacher.model", "", "", "", "--opd-teacher-load"),
    Equivalent("roles.teacher.engine", "", "", "", "--opd-type", "for megatron also roles.teacher.placement"),
    Equivalent(
        "algorithm.distill_top_k", "", "distillation.distillation_loss.topk", "", "--opd-log-prob-top-k", "in the loss"
    ),
    Equivalent(
        "roles.judge.model",
        "",
        "reward.reward_model.model_path reward_model.model.path",
        "",
        "--genrm-model-path",
        "a model that writes; the role judge: --judge N starts replicas",
    ),
    Equivalent(
        "roles.judge.tensor_parallel",
        "",
        "reward.reward_model.rollout.tensor_model_parallel_size",
        "",
        "--genrm-num-gpus-per-engine",
    ),
    Equivalent("algorithm.dual_clip", "delta", "@actor.clip_ratio_c", "", "--eps-clip-c", "0 turns it off"),
    Equivalent("algorithm.gamma", "", "algorithm.gamma", "", "--gamma"),
    Equivalent("algorithm.gae_lambda", "", "algorithm.lam", "", "--lambd"),
    Equivalent("algorithm.value_clip", "", "critic.cliprange_value", "", "--value-clip"),
    Equivalent("algorithm.whiten_advantages", "", "", "", "--normalize-advantages", "verl always does"),
    Equivalent("roles.critic.model", "", "critic.model.path", "", "--critic-load"),
    Equivalent("roles.critic.optimizer.lr", "", "critic.optim.lr", "", "--critic-lr"),
    Equivalent("algorithm.tau_positive", "sapo_temperature_pos", "@actor.tau_pos", "", "--sapo-tau-pos"),
    Equivalent("algorithm.tau_negative", "sapo_temperature_neg", "@actor.tau_neg", "", "--sapo-tau-neg"),
    Equivalent("algorithm.opsm_delta", "off_policy_mask_threshold", "", "", "--opsm-delta --use-opsm"),
    Equivalent("algorithm.tis_clip_low", "", "", "", "--tis-clip-low"),
    Equivalent("algorithm.veto_high", "", "", "trainer.loss.token_mask_high", ""),
    Equivalent(
        "algorithm.veto_low",
        "",
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "trainer.loss.token_mask_low",
        "",
        "with algorithm.veto_sequences the whole sequence, as in verl",
    ),
    Equivalent("algorithm.mask_truncated", "mask_truncated_completions", "", "", ""),
    Equivalent(
        "algorithm.overlong_buffer",
        "",
        "reward.reward_kwargs.overlong_buffer_cfg.len reward.reward_kwargs.overlong_buffer_cfg.enable "
        "reward_model.reward_kwargs.overlong_buffer_cfg.len reward_model.overlong_buffer.len "
        "reward_model.overlong_buffer.enable",
        "",
        "",
        "algorithm.overlong_limit is the length at which the whole penalty counts",
    ),
    Equivalent(
        "algorithm.overlong_penalty",
        "",
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor "
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward_model.overlong_buffer.penalty_factor",
        "",
        "",
    ),
    Equivalent("algorithm.entropy_coef", "", "@actor.entropy_coeff", "", "--entropy-coef"),
    Equivalent(
        "algorithm.loss_aggregation",
        "loss_type",
        "@actor.loss_agg_mode",
        "",
        "--calculate-per-token-loss",
        'TRL\'s "dapo" and verl\'s "token-mean" are "token_mean"',
    ),
    Equivalent(
        "trainer.groups_per_step",
        "per_device_train_batch_size",
        "data.train_batch_size",
        "orchestrator.batch_size",
        "--rollout-batch-size",
        "it counts prompts, each with rollout.samples_per_prompt samples",
    ),
    Equivalent(
        "trainer.mini_batches",
        "steps_per_generation",
        "@actor.ppo_mini_batch_size",
        "",
        "--num-steps-per-rollout --global-batch-size",
        "updates in a pass over a step's groups: their number, not the size of a mini-batch",
    ),
    Equivalent("trainer.epochs", "num_iterations", "@actor.ppo_epochs", "", "", "passes over a step's groups"),
    Equivalent("trainer.micro_batch_tokens", "", "@actor.ppo_max_token_len_per_gpu", "seq_len", "--max-tokens-per-gpu"),
    Equivalent("trainer.dtype", "bf16", "", "trainer.model.optimization_dtype", "--bf16", '"bfloat16" or "float32"'),
    Equivalent("trainer.fp32_lm_head", "cast_lm_head_to_fp32", "", "", ""),
    Equivalent(
        "trainer.ranks",
        "",
        "trainer.n_gpus_per_node",
        "deployment.num_train_gpus",
        "--actor-num-gpus-per-node --resource",
        "GPUs of the trainer alone; placement.gpus has the engines'",
    ),
    Equivalent("trainer.hosts", "", "trainer.nnodes", "", "--actor-num-nodes", "not with run.colocate"),
    Equivalent(
        "placement.gpus",
        "",
        "",
        "deployment.num_infer_gpus",
        "--rollout-num-gpus --genrm-num-gpus",
        "a table: { rollout = 4, judge = 1 }",
    ),
    Equivalent(
        "trainer.tensor_parallel", "", "@actor.megatron.tensor_model_parallel_size", "", "--tensor-model-parallel-size"
    ),
    Equivalent(
        "trainer.pipeline_parallel",
        "",
        "@actor.megatron.pipeline_model_parallel_size",
        "",
        "--pipeline-model-parallel-size",
    ),
    Equivalent(
        "trainer.pipeline_chunks",
        "",
        "@actor.megatron.virtual_pipeline_model_parallel_size",
        "",
        "--num-virtual-stages-per-pipeline-rank --num-layers-per-virtual-pipeline-stage",
        "chunks of a stage, not layers of a chunk",
    ),
    Equivalent(
        "trainer.context_parallel",
        "",
        "@actor.megatron.context_parallel_size @actor.ulysses_sequence_parallel_size",
        "trainer.model.cp",
        "--context-parallel-size",
    ),
    Equivalent(
        "trainer.expert_parallel",
        "",
        "@actor.megatron.expert_model_parallel_size",
        "trainer.model.ep",
        "--expert-model-parallel-size",
    ),
    Equivalent(
        "trainer.recompute",
        "gradient_checkpointing",
        "@model.enable_gradient_checkpointing",
        "trainer.model.ac.mode",
        "--recompute-granularity",
    ),
    Equivalent("trainer.recompute_layers", "", "", "", "--recompute-num-layers"),
    Equivalent(
        "trainer.overlap_grad_reduce",
        "",
        "@actor.megatron.override_ddp_config.overlap_grad_reduce",
        "",
        "--overlap-grad-reduce",
    ),
    Equivalent(
        "trainer.shard_gradients",
        "",
        "",
        "",
        "--data-parallel-sharding-strategy",
        "true is Megatron's optim_grads; FSDP always shards gradients. Weights aren't sharded over data-parallel ranks",
    ),
    Equivalent("trainer.attention", "", "", "trainer.model.attn", "--attention-backend"),
    Equivalent(
        "trainer.collective_timeout_seconds", "", "", "trainer.dist_timeout_seconds", "--distributed-timeout-minutes"
    ),
    Equivalent("trainer.moe.aux_loss_coef", "", "", "", "--moe-aux-loss-coeff"),
    Equivalent("trainer.moe.z_loss_coef", "", "", "", "--moe-z-loss-coeff"),
    Equivalent("trainer.moe.freeze_router", "", "", "trainer.model.freeze_moe_router", ""),
    Equivalent(
        "trainer.routing_replay",
        "",
        "@actor.router_replay.mode",
        "trainer.enable_router_replay",
        "--use-rollout-routing-replay --use-routing-replay",
        '"rollout" is R3, "trainer" is R2',
    ),
    Equivalent("trainer.optimizer.lr", "learning_rate", "@actor.optim.lr", "trainer.optim.lr", "--lr"),
    Equivalent("trainer.optimizer.min_lr", "", "", "trainer.scheduler.min_lr", "--min-lr"),
    Equivalent(
        "trainer.optimizer.schedule",
        "lr_scheduler_type",
        "@actor.optim.warmup_style @actor.optim.lr_scheduler_type",
        "trainer.scheduler.type",
        "--lr-decay-style",
    ),
    Equivalent(
        "trainer.optimizer.warmup_steps",
        "warmup_steps warmup_ratio",
        "@actor.optim.lr_warmup_steps @actor.optim.lr_warmup_steps_ratio",
        "trainer.scheduler.warmup_steps",
        "--lr-warmup-iters",
        "in steps, not as a share",
    ),
    Equivalent(
        "trainer.optimizer.weight_decay",
        "weight_decay",
        "@actor.optim.weight_decay",
        "trainer.optim.weight_decay",
        "--weight-decay",
    ),
    Equivalent("trainer.optimizer.beta1", "adam_beta1", "", "trainer.optim.betas1", "--adam-beta1"),
    Equivalent("trainer.optimizer.beta2", "adam_beta2", "", "trainer.optim.betas2", "--adam-beta2"),
    Equivalent("trainer.optimizer.epsilon", "adam_epsilon", "", "", "--adam-eps"),
    Equivalent(
        "trainer.optimizer.clip_grad", "max_grad_norm", "@actor.grad_clip", "trainer.optim.max_norm", "--clip-grad"
    ),
    Equivalent(
        "trainer.optimizer.moments",
        "",
        "",
        "",
        "--exp-avg-dtype --exp-avg-sq-dtype",
        '"bfloat16" or "float32" for both, or "float8" for the first; it needs no Transformer Engine',
    ),
    Equivalent(
        "trainer.optimizer.cpu_offload",
        "",
        "@actor.fsdp_config.optimizer_offload",
        "trainer.model.optim_cpu_offload",
        "--optimizer-cpu-offload",
    ),
    Equivalent("trainer.checkpoint.every", "save_steps", "trainer.save_freq", "ckpt.interval", "--save-interval"),
    Equivalent(
        "trainer.checkpoint.keep",
        "save_total_limit",
        "trainer.max_actor_ckpt_to_keep",
        "ckpt.keep_last",
        "--max-actor-ckpt-to-keep",
    ),
    Equivalent("board.max_staleness", "", "", "orchestrator.max_off_policy_steps", "--max-staleness"),
    Equivalent(
        "board.oversample",
        "",
        "",
        "orchestrator.oversampling_factor",
        "--over-sampling-batch-size",
        "a factor of the groups that a step needs",
    ),
    Equivalent("weights.interval", "", "", "", "--update-weights-interval"),
    Equivalent("weights.transport", "", "", "weight_broadcast.type", "--checkpoint-engine-backend"),
    Equivalent(
        "weights.bucket_bytes",
        "",
        "@rollout.checkpoint_engine.update_weights_bucket_megabytes @rollout.update_weights_bucket_megabytes",
        "",
        "--update-weight-buffer-size",
        "in bytes",
    ),
    Equivalent("weights.timeout_seconds", "", "", "weight_broadcast.timeout", ""),
    Equivalent("eval.interval", "eval_steps", "trainer.test_freq", "orchestrator.eval.interval", "--eval-interval"),
    Equivalent("eval.prompts", "", "data.val_max_samples", "orchestrator.eval.num_examples", ""),
    Equivalent(
        "eval.max_new_tokens", "", "", "orchestrator.eval.sampling.max_completion_tokens", "--eval-max-response-len"
    ),
    Equivalent("eval.before", "eval_on_start", "trainer.val_before_train", "", "--skip-eval-before-train"),
    Equivalent(
        "eval.sets",
        "",
        "data.val_files @rollout.val_kwargs.n @rollout.val_kwargs.temperature @rollout.val_kwargs.top_p "
        "@rollout.val_kwargs.top_k",
        "orchestrator.eval.env",
        "--eval-config",
        "each set has a name, samples_per_prompt, temperature, top_p, top_k and more",
    ),
    Equivalent("rollout.stop", "", "", "", "--rollout-stop"),
    Equivalent("rollout.stop_token_ids", "", "", "", "--rollout-stop-token-ids"),
    # Without an equivalent.
    Equivalent(
        "",
        "",
        "",
        "",
        "--n-samples-per-eval-prompt --eval-temperature --eval-top-p",
        "samples_per_prompt, temperature and top_p of each of eval.sets",
    ),
    Equivalent("", "min_p", "", "", "", "there is no min-p sampling: use rollout.top_p or rollout.top_k"),
    Equivalent("", "repetition_penalty", "", "", "", "there is no penalty on repetition: it would change the policy"),
    Equivalent("", "", "algorithm.kl_penalty", "trainer.loss.kl_tau", "", "in a reward the estimate is always k1"),
    Equivalent("", "", "", "", "--group-rm", "a function whose parameter is called samples gets a group"),
    Equivalent(
        "",
        "",
        "@actor.ppo_micro_batch_size_per_gpu @actor.use_dynamic_bsz",
        "",
        "--micro-batch-size --use-dynamic-batch-size",
        "micro-batches are always packed, up to trainer.micro_batch_tokens",
    ),
    Equivalent(
        "",
        "report_to run_name",
        "trainer.logger trainer.project_name trainer.experiment_name",
        "wandb.project wandb.name",
        "--use-wandb --wandb-project --use-tensorboard",
        "metrics are in the run's folder; tracking.trackers sends them to TensorBoard, W&B, MLflow, ClearML or Trackio",
    ),
    Equivalent(
        "",
        "resume_from_checkpoint",
        "trainer.resume_mode",
        "ckpt.resume_step",
        "--load",
        "`relaxd resume RUN` continues a run, with --from-step N from the checkpoint of an earlier step",
    ),
    Equivalent(
        "agent.environment",
        "",
        "@rollout.multi_turn.enable",
        "",
        "",
        "conversations of several turns (docs/agents.md)",
    ),
    Equivalent(
        "agent.function",
        "",
        "",
        "",
        "--custom-generate-function-path",
        "a function that asks the model and returns the reward; relaxd keeps tokens and masks (docs/agents.md)",
    ),
    Equivalent("agent.max_turns", "", "@rollout.multi_turn.max_assistant_turns"),
    Equivalent("", "peft_config", "@model.lora_rank", "trainer.model.lora", "", "there is no LoRA"),
)
"""Every setting that several frameworks have, in the order of relaxd's sections."""
