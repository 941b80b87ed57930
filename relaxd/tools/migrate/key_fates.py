"""The result of migrating a configuration: the fate of each of verl's keys, and reasons why some have no equivalent."""

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from relaxd.config.write_toml import toml

ACTOR = "actor_rollout_ref."
WIDTH = 116


class KeyFate(Enum):
    """Outcome of the migration for a key of verl's configuration."""

    WRITTEN = auto()
    """The key was converted to settings of relaxd."""
    NOTED = auto()
    """The key wasn't converted, but a note is about it."""
    LOST = auto()
    """The key has no equivalent in relaxd."""
    IDLE = auto()
    """The key needs no conversion: its feature is off, or relaxd does what it says anyway."""


@dataclass
class Migrated:
    """Result of migrating a verl configuration: relaxd's settings, and what became of each of verl's keys."""

    values: dict[str, Any] = field(default_factory=dict)
    """The migrated configuration: relaxd's settings by dotted name."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user: what to check or change in the migrated configuration."""
    lost: list[tuple[str, Any, str]] = field(default_factory=list)
    """verl's keys without an equivalent, as (name, value, reason)."""
    idle: list[tuple[str, Any]] = field(default_factory=list)
    """verl's keys that need no conversion, as (name, value); see KeyFate.IDLE."""
    fates: dict[str, KeyFate] = field(default_factory=dict)
    """Outcome for each of verl's keys, by the key's name."""
    problems: list[str] = field(default_factory=list)
    """Reasons why relaxd would refuse the migrated configuration."""

    def to_toml(self) -> str:
        """Return the migrated configuration as TOML, followed by comments: notes, problems, and keys without an
        equivalent or without effect."""
        sections: dict[str, list[str]] = {}
        for name, value in self.values.items():
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {toml(value)}")
        parts = ["\n".join([f"[{section}]", *lines]) for section, lines in sorted(sections.items())]
        reasons = dict.fromkeys(why for _, _, why in self.lost)
        lost = [
            "\n".join([f"{one}:", *(f"  {name} = {value!r}" for name, value, why in self.lost if why == one)])
            for one in reasons
        ]
        names = ", ".join(name for name, _ in self.idle)
        idle = textwrap.wrap(names, WIDTH, break_long_words=False, break_on_hyphens=False)
        for title, lines in (
            ("Look at this:", self.notes),
            ("relaxd refuses this until you change it:", self.problems),
            ("These keys have no equivalent:", lost),
            ("These keys are off, or say what relaxd does anyway:", idle),
        ):
            if lines:
                parts.append(
                    "\n".join(["# " + title, *(f"#   {line}" for text in lines for line in text.splitlines())])
                )
        return "\n\n".join(parts) + "\n"


class Lost(Exception):
    """A key of verl's, or its value, has no equivalent in relaxd; the message says why."""


class Reader:
    """Gives conversions access to verl's settings, and collects the migrated configuration, key by key."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.out = Migrated()
        self.key = ""
        """Name of verl's key that is being converted; "" before the first."""
        self._fate = KeyFate.IDLE
        self._writers: dict[str, str] = {}
        """For each written setting of relaxd: verl's key from which it was converted."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key of verl's; the name may omit the prefix "actor_rollout_ref."."""
        value = self.given.get(ACTOR + name, self.given.get(name))
        return default if value is None else value

    def first(self, *names: str) -> Any:
        """Return the value of the first of these keys that has one. For keys that verl's versions name differently."""
        return next((value for name in names if (value := self.get(name)) not in (None, "", "???")), None)

    def begin(self, key: str) -> None:
        """Start the conversion of a key of verl's."""
        self.key, self._fate = key, KeyFate.IDLE

    def end(self) -> None:
        """Finish the conversion of the current key: record whether it led to settings, to notes, or to neither."""
        self.out.fates[self.key] = self._fate
        if self._fate is KeyFate.IDLE:
            self.out.idle.append((self.key, self.given[self.key]))

    def lose(self, why: str) -> None:
        """Record that the current key has no equivalent, with the reason."""
        self.out.fates[self.key] = KeyFate.LOST
        self.out.lost.append((self.key, self.given[self.key], why))

    def set(self, name: str, value: Any) -> None:
        """Write a setting of relaxd into the migrated configuration. If another key gave the setting another value, add
        a note."""
        before = self.out.values.get(name)
        if before is not None and before != value and (writer := self._writers.get(name)) not in (None, self.key):
            self.out.notes.append(f"{name}: {toml(value)} of {self.key}, and not {toml(before)} of {writer}")
        self.out.values[name] = value
        if self.key:
            self._writers[name] = self.key
        self._fate = KeyFate.WRITTEN

    def note(self, text: str) -> None:
        """Add a note for the user to the migrated configuration, unless it has the same note."""
        if text not in self.out.notes:
            self.out.notes.append(text)
        if self._fate is KeyFate.IDLE:
            self._fate = KeyFate.NOTED


def listed(value: Any) -> list[str]:
    """Convert a configuration value to a list of texts; a text becomes a list of one, None an empty list."""
    return [value] if isinstance(value, str) else [str(one) for one in value or ()]


_TURNS = "conversations of several turns without a file of tools are [agent], which is written by hand (docs/agents.md)"
_PARALLEL = "how the trainer holds its model is trainer.tensor_parallel, context_parallel and so on (relaxd fit)"
_ENGINE = "options of the engine are SGLang's own, in rollout.sglang"
_REASONS: Mapping[str, str] = {
    r"rollout\.multi_turn\.max_user_turns": "what follows the model's message is a turn of its own: agent.max_turns",
    r"rollout\.multi_turn\.(max_tool_response_length|tool_response_truncate_side)": (
        "tools' answers are shortened by the tools (docs/environments.md)"
    ),
    r"rollout\.multi_turn\.(format|tokenization_sanity_check_mode|use_inference_chat_template)": (
        "tool calls are found in the form of the chat template, and tokens are never encoded again "
        "(docs/conversations.md)"
    ),
    r"rollout\.multi_turn\.interaction_config_path|rollout\.agent\..*agent_loop.*|data\.function_tool_path": (
        "interactions, agent loops and functions are environments: agent.environment (docs/environments.md)"
    ),
    r"rollout\.agent\.num_workers": "relaxd scale agent=N",
    r"rollout\.(multi_turn|agent)\..*": _TURNS,
    r"rollout\.engine_kwargs\..*": "there is no vLLM or TensorRT-LLM: options of SGLang are rollout.sglang",
    r"rollout\.checkpoint_engine\..*": "weights.transport says how weights get to the engines",
    r"rollout\.(trace|prometheus)\..*|.*profiler\..*": "traces, metrics, profiles: docs/metrics.md, docs/profiling.md",
    r"rollout\.(log_prob|micro).*|ref\.log_prob.*": "micro-batches are always packed, up to trainer.micro_batch_tokens",
    r"rollout\.(ignore_eos|do_sample)": "training samples answers up to an end token",
    r"rollout\..*": _ENGINE,
    r"actor\.(fsdp_config|megatron|veomni|torchtitan|engine)\..*|actor\.strategy": _PARALLEL,
    r"actor\.checkpoint\..*|trainer\.(default_hdfs_dir|max_critic_ckpt_to_keep|del_local_ckpt_after_load)": (
        "checkpoints hold all that a run needs: trainer.checkpoint"
    ),
    r"actor\.policy_loss\..*": "a setting of a loss that relaxd doesn't have",
    r"actor\.(use_torch_compile|use_fused_kernels|use_remove_padding|entropy_from_logits_with_chunking|"
    r"entropy_checkpointing)|model\.(use_remove_padding|use_fused_kernels|use_liger|fused_kernel_options\..*|"
    r"tiled_mlp\..*)": "rows are always packed without padding; the trainer has kernels of its own (trainer.attention)",
    r"ref\..*": "the reference model has the trainer's settings, or those of roles.reference",
    r"model\.(lora.*|target_modules|exclude_modules)": "there is no LoRA",
    r"critic\..*": "the critic has the trainer's settings, or those of roles.critic (docs/critic.md)",
    r"reward\.reward_model\..*|reward_model\..*": "a judge is a role of its own: docs/judge.md",
    r"(reward\.|reward_model\.)?sandbox_fusion\..*": "the reward `code` has its own sandbox (docs/rewards.md)",
    r"algorithm\.rollout_correction\..*": "there is algorithm.correction, with tis_clip and veto_low",
    r"algorithm\.kl_ctrl\..*": "the coefficient is fixed",
    r"algorithm\.filter_groups\..*": "groups are compared by their reward, and each dropped one is replaced",
    r"distillation\..*": "a teacher is roles.teacher.model with algorithm.distill_* (docs/distillation.md)",
    r"data\.(image|video|audio|mm_|return_multi_modal).*": (
        "data.media_keys names the columns with images, video and sound (docs/media.md)"
    ),
    r"data\.(gen_batch_size|val_batch_size)": "engines are kept busy without batches (board.oversample)",
    r"data\.(dataloader_num_workers|filter_overlong_prompts_workers)": "prompts are read when their turn comes",
    r"data\.datagen\..*": "a source of your own makes rows (docs/data.md)",
    r"trainer\.v1\..*": "board.max_staleness says how far engines may be ahead",
    r"trainer\.(rollout_data_dir|validation_data_dir|log_val_generations)": (
        "samples are on the board, evaluations' answers in the run's folder (eval.kept_prompts)"
    ),
    r"trainer\.val_only": "`relaxd eval` evaluates a model without a run",
    r"trainer\.balance.*": "a step's rows are always balanced over ranks",
    r"ray_kwargs\..*|ray_init\..*|trainer\.ray.*": "there is no Ray",
    r"transfer_queue\..*": "samples are on the board, in Redis",
    r"--config-.*|defaults": "files that hydra adds aren't read: migrate that file, with the overrides after it",
    r"model_engine|.*@.*": "files that hydra adds aren't read",
    r"~.*": "nothing is deleted: leave the key out of what is migrated",
}
"""Reasons why keys of verl's have no equivalent, by pattern of the key's name without "actor_rollout_ref."; the first
matching pattern counts."""


def reason(name: str) -> str:
    """Return why a key of verl's has no equivalent in relaxd; `name` is without "actor_rollout_ref."."""
    return next((why for pattern, why in _REASONS.items() if re.fullmatch(pattern, name)), "there is no such setting")


_OFF_WITHOUT: Mapping[str, str] = {
    r"reward\.reward_model\..*": "reward.reward_model.enable",
    r"reward_model\.(enable|enable_resource_pool|n_gpus_per_node|nnodes|strategy|model_path|model\..*|rollout\..*|"
    r"micro_batch_size.*|max_length|use_dynamic_bsz|forward_max_token_len_per_gpu|ulysses.*)": "reward_model.enable",
    r"reward\.reward_manager\.module\..*": "reward.reward_manager.module.path",
    r"reward_manager\.module\..*": "reward_manager.module.path",
    r"reward_model\.sandbox_fusion\..*": "reward_model.sandbox_fusion.url",
    r"distillation\..*": "distillation.enabled",
    r"rollout\.multi_turn\..*": "rollout.multi_turn.enable",
    r"rollout\.trace\..*": "rollout.trace.backend",
    r"rollout\.prometheus\..*": "rollout.prometheus.enable",
    r"rollout\.skip\..*": "rollout.skip.enable",
    r"rollout\.disaggregation\..*": "rollout.disaggregation.enabled",
    r"actor\.profiler\..*": "actor.profiler.enable",
    r"global_profiler\..*": "global_profiler.tool",
    r"(model|rollout)\.mtp\..*": "model.mtp.enable",
    r"model\.tiled_mlp\..*": "model.tiled_mlp.enabled",
    r"model\.(lora_alpha|target_modules|exclude_modules)": "model.lora_rank",
    r"model\.fused_kernel_options\..*": "model.use_fused_kernels",
    r"algorithm\.kl_(ctrl\..*|penalty)": "algorithm.use_kl_in_reward",
    r"algorithm\.pf_ppo\..*": "algorithm.use_pf_ppo",
    r"algorithm\.filter_groups\.(?!enable).*": "algorithm.filter_groups.enable",
    r"transfer_queue\..*": "transfer_queue.enable",
    r"skip\..*": "skip.rollout.enable",
}
"""For patterns of verl's keys (without "actor_rollout_ref."): the key that switches on the feature of the matching
keys."""
_OFF: Mapping[str, Callable[[Reader], bool]] = {
    r"(.*\.)?_target_": lambda reader: True,
    r"critic\..*": lambda reader: reader.out.values["algorithm.name"] != "ppo" and not reader.get("critic.enable"),
    r"ref\..*": lambda reader: not (reader.get("actor.use_kl_loss") or reader.get("algorithm.use_kl_in_reward")),
    r"(reward\.)?sandbox_fusion\..*": lambda reader: (
        not reader.first("reward.sandbox_fusion.url", "sandbox_fusion.url")
    ),
    r"rollout\.profiler\..*": lambda reader: reader.get("rollout.profiler.enable") is not True,
    r"actor\.router_replay\..*": lambda reader: reader.get("actor.router_replay.mode", "disabled") == "disabled",
    r"algorithm\.rollout_correction\.rollout_(is|rs)_.*": lambda reader: (
        not reader.first("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs")
    ),
    r"actor\.policy_loss\.(clip_cov|kl_cov|ppo_kl).*": lambda reader: (
        reader.get("actor.policy_loss.loss_mode", "vanilla") not in ("clip_cov", "kl_cov")
    ),
    r"trainer\.resume_from_path": lambda reader: reader.get("trainer.resume_mode", "auto") != "resume_path",
    r"trainer\.v1\.(?!trainer_mode).*": lambda reader: reader.get("trainer.v1.trainer_mode", "sync") == "sync",
}
"""For patterns of verl's keys (without "actor_rollout_ref."): a function that returns True if the matching keys have no
effect in the configuration."""


def is_off(reader: Reader, name: str) -> bool:
    """Return True if verl ignores a key because its feature is off; `name` is without "actor_rollout_ref."."""
    without = any(re.fullmatch(pattern, name) and not reader.get(key) for pattern, key in _OFF_WITHOUT.items())
    return without or any(re.fullmatch(pattern, name) and off(reader) for pattern, off in _OFF.items())
