"""verl's settings as relaxd's: what differs in more than its name. relaxd.config.names.equivalents has the names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relaxd.config.load import ConfigError, load
from relaxd.config.names.equivalents import EQUIVALENTS, Equivalent
from relaxd.config.names.settings import settings
from relaxd.config.write import toml
from relaxd.migrate.verl_tools import add_tools

ACTOR = "actor_rollout_ref."
ALGORITHMS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "k3"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum": "sample_sum",
    "seq-mean-token-sum-norm": "constant_length",
}
ROUTING_REPLAYS = {"disabled": "none", "R2": "trainer", "R3": "rollout"}
EVAL_PROMPTS = 512
"""Where verl evaluates a whole file."""
_NAMES: dict[str, Equivalent] = {name: one for one in reversed(EQUIVALENTS) for name in one.names["verl"]}


@dataclass
class Migrated:
    """What became of a configuration."""

    values: dict[str, Any] = field(default_factory=dict)
    """relaxd's settings by dotted name."""
    notes: list[str] = field(default_factory=list)
    """What a person must look at."""
    lost: list[tuple[str, Any, str]] = field(default_factory=list)
    """Every key without an equivalent: its name, its value, and why."""
    problems: list[str] = field(default_factory=list)
    """Why relaxd would refuse the settings."""

    def to_toml(self) -> str:
        """Return everything as TOML: settings, then notes and lost keys as comments."""
        sections: dict[str, list[str]] = {}
        for name, value in self.values.items():
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {toml(value)}")
        parts = ["\n".join([f"[{section}]", *lines]) for section, lines in sorted(sections.items())]
        lost = [f"{name} = {value!r}" + (f": {why}" if why else "") for name, value, why in self.lost]
        for title, lines in (
            ("Look at this:", self.notes),
            ("relaxd refuses this until you change it:", self.problems),
            ("These keys have no equivalent:", lost),
        ):
            if lines:
                parts.append(
                    "\n".join(["# " + title, *(f"#   {line}" for text in lines for line in text.splitlines())])
                )
        return "\n\n".join(parts) + "\n"


class _Lost(Exception):
    """A key whose value has no equivalent; the message says why."""


class _Reader:
    """verl's settings, and what is made of them."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.out = Migrated()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, whose name may leave out actor_rollout_ref."""
        value = self.given.get(ACTOR + name, self.given.get(name))
        return default if value is None else value

    def set(self, name: str, value: Any) -> None:
        self.out.values[name] = value


def migrate(given: Mapping[str, Any]) -> Migrated:
    """Convert verl's settings, by dotted name. Every key is a setting, in a note, or lost."""
    reader = _Reader(given)
    reader.set("algorithm.name", _algorithm(reader))
    reader.set("data.source", "files")
    reader.set("data.answer_key", "reward_model.ground_truth")
    for name, value in given.items():
        try:
            _convert(reader, name, value)
        except _Lost as why:
            reader.out.lost.append((name, value, str(why)))
        except (TypeError, ValueError, ZeroDivisionError):
            reader.out.lost.append((name, value, "it isn't the number that is needed: variables are not resolved"))
    _complete(reader)
    try:
        load(reader.out.to_toml())
    except ConfigError as error:
        reader.out.problems = [str(problem) for problem in error.problems]
    return reader.out


def _convert(reader: _Reader, name: str, value: Any) -> None:
    short = name.removeprefix(ACTOR)
    if short in _CONVERSIONS:
        _CONVERSIONS[short](reader, value)
        return
    equivalent = _NAMES.get(name)
    if equivalent is None or not equivalent.setting:
        raise _Lost(equivalent.note if equivalent else "")
    if value is None:
        return  # verl's default, which is off
    place = tuple(equivalent.setting.split("."))
    if place not in settings(reader.out.values["algorithm.name"]):
        raise _Lost(
            f"{equivalent.setting} is not a setting of algorithm.name = {reader.out.values['algorithm.name']!r}"
        )
    if isinstance(value, str) and "$" in value:
        reader.out.notes.append(f"{equivalent.setting}: {value} has variables, which are not resolved")
    reader.set(equivalent.setting, value)


def _algorithm(reader: _Reader) -> str:
    """Return algorithm.name; a loss of GSPO's wins over the advantage."""
    estimator, loss = reader.get("algorithm.adv_estimator", "gae"), reader.get("actor.policy_loss.loss_mode", "vanilla")
    if loss in ("gspo", "sapo", "cispo"):
        return str(loss)
    return ALGORITHMS.get(str(estimator), "grpo")


# --- conversions, by verl's names without actor_rollout_ref ---------------------------------------------------------


def _adv_estimator(reader: _Reader, value: Any) -> None:
    if value not in ALGORITHMS:
        raise _Lost(f"there is no such estimator, so that grpo is written; there are {', '.join(ALGORITHMS)}")


def _loss_mode(reader: _Reader, value: Any) -> None:
    if value not in ("vanilla", "gspo", "sapo", "cispo"):
        raise _Lost("the clipped loss of the algorithm is used")


def _clip_ratio(reader: _Reader, value: Any) -> None:
    if reader.out.values["algorithm.name"] in ("sapo",):
        raise _Lost("sapo has no clip")
    reader.set("algorithm.clip_low", reader.get("actor.clip_ratio_low", value))
    reader.set("algorithm.clip_high", reader.get("actor.clip_ratio_high", value))


def _kl_loss(reader: _Reader, value: Any) -> None:
    coefficient = reader.get("actor.kl_loss_coef", 0.001)
    if reader.get("actor.use_kl_loss", False):
        reader.set("algorithm.kl_coef", coefficient)


def _kl_reward(reader: _Reader, value: Any) -> None:
    if reader.get("algorithm.use_kl_in_reward", False):
        reader.set("algorithm.kl_reward_coef", reader.get("algorithm.kl_ctrl.kl_coef", 0.001))


def _kl_loss_type(reader: _Reader, value: Any) -> None:
    if value not in KL_ESTIMATORS:
        raise _Lost(f"there are {', '.join(KL_ESTIMATORS)}")
    if reader.get("actor.use_kl_loss", False):
        reader.set("algorithm.kl_estimator", KL_ESTIMATORS[value])


def _aggregation(reader: _Reader, value: Any) -> None:
    if value not in AGGREGATIONS:
        raise _Lost(f"there are {', '.join(AGGREGATIONS)}")
    reader.set("algorithm.loss_aggregation", AGGREGATIONS[value])


def _engine(reader: _Reader, value: Any) -> None:
    reader.set("rollout.engine", "sglang")
    if value != "sglang":
        reader.out.notes.append(f'rollout.engine: verl used {value}; relaxd has no vLLM, so this is "sglang"')


def _colocate(reader: _Reader, value: Any) -> None:
    reader.set("run.colocate", bool(value))


def _files(reader: _Reader, value: Any) -> None:
    files = [value] if isinstance(value, str) else list(value or [])
    if len(files) == 1:
        reader.set("data.path", files[0])
    else:
        reader.set("data.sources", [{"name": f"files{n}", "path": path} for n, path in enumerate(files, 1)])
    if any("$" in path for path in files):
        reader.out.notes.append("data.path has variables, which are not resolved")


def _eval_files(reader: _Reader, value: Any) -> None:
    files = [value] if isinstance(value, str) else list(value or [])
    if len(files) > 1:
        reader.out.notes.append(
            f"data.eval_path: only the first of {len(files)} files; {', '.join(files[1:])} are left out"
        )
    if files:
        reader.set("data.eval_path", files[0])


def _filter_overlong(reader: _Reader, value: Any) -> None:
    reader.set("data.overlong", "skip" if value else "error")


def _truncation(reader: _Reader, value: Any) -> None:
    if value != "error":
        raise _Lost("relaxd never cuts a prompt: data.overlong says what becomes of long ones")


def _mini_batch(reader: _Reader, value: Any) -> None:
    batch = reader.get("data.train_batch_size", value)
    if batch % value:
        raise _Lost(f"data.train_batch_size = {batch} is not a multiple of it; trainer.mini_batches is their ratio")
    reader.set("trainer.mini_batches", batch // value)


def _gpus(reader: _Reader, value: Any) -> None:
    nodes = reader.get("trainer.nnodes", 1)
    reader.set("trainer.ranks", int(reader.get("trainer.n_gpus_per_node", 1)) * int(nodes))


def _epochs(reader: _Reader, value: Any) -> None:
    if reader.get("trainer.total_training_steps") is None:
        reader.out.notes.append(
            f"run.steps: verl trains {value} epochs; write {value} * rows of the data / trainer.groups_per_step"
        )


def _interval(setting: str) -> Callable[[_Reader, Any], None]:
    return lambda reader, value: reader.set(setting, max(0, int(value or 0)))


def _eval_prompts(reader: _Reader, value: Any) -> None:
    if value is not None and value > 0:  # else all, which `_complete` notes
        reader.set("eval.prompts", int(value))


def _routing_replay(reader: _Reader, value: Any) -> None:
    if value not in ROUTING_REPLAYS:
        raise _Lost(f"there are {', '.join(ROUTING_REPLAYS)}")
    reader.set("trainer.routing_replay", ROUTING_REPLAYS[value])


def _correction(reader: _Reader, value: Any) -> None:
    if value in (None, "null"):
        return
    if value != "token":
        raise _Lost('weights are per token: algorithm.correction = "tis"')
    reader.set("algorithm.correction", "tis")


def _recompute(reader: _Reader, value: Any) -> None:
    reader.set("trainer.recompute", "full" if value else "none")


def _schedule(reader: _Reader, value: Any) -> None:
    if value not in ("constant", "cosine", "linear"):
        raise _Lost("there are constant, linear and cosine")
    reader.set("trainer.optimizer.schedule", value)


def _warmup(reader: _Reader, value: Any) -> None:
    steps, ratio = reader.get("actor.optim.lr_warmup_steps", -1), reader.get("actor.optim.lr_warmup_steps_ratio", 0.0)
    total = reader.get("trainer.total_training_steps")
    if steps is not None and steps > 0:
        reader.set("trainer.optimizer.warmup_steps", int(steps))
    elif ratio and total:
        reader.set("trainer.optimizer.warmup_steps", int(ratio * total))
    elif ratio:
        raise _Lost(f"trainer.optimizer.warmup_steps is {ratio} * run.steps")


def _top_k(reader: _Reader, value: Any) -> None:
    reader.set("rollout.top_k", max(0, int(value)))


def _bucket(reader: _Reader, value: Any) -> None:
    reader.set("weights.bucket_bytes", int(value) << 20)


def _reward(reader: _Reader, value: Any) -> None:
    if path := reader.get("custom_reward_function.path"):
        reader.set("reward.name", f"{path}:{reader.get('custom_reward_function.name', 'compute_score')}")


def _reward_settings(reader: _Reader, value: Any) -> None:
    if value:
        reader.set("reward.settings", dict(value))


def _reward_manager(reader: _Reader, value: Any) -> None:
    if value not in ("naive", "batch", "dapo"):
        raise _Lost("a reward is a function, a class or a service (docs/rewards.md)")


def _reward_key(reader: _Reader, value: Any) -> None:
    if not reader.get("custom_reward_function.path"):
        reader.set("reward.choose_by", value)


def _overlong(reader: _Reader, value: Any) -> None:
    if reader.get("reward_model.overlong_buffer.enable", False):
        reader.set("algorithm.overlong_buffer", reader.get("reward_model.overlong_buffer.len", 0))
        reader.set("algorithm.overlong_limit", reader.get("data.max_response_length", 0))


def _off_or_lost(reader: _Reader, value: Any) -> None:
    if value not in (None, False, 0, "", "null"):
        raise _Lost("")


def _complete(reader: _Reader) -> None:
    """Add what verl takes for granted."""
    values = reader.out.values
    if "reward.name" not in values:
        values.setdefault("reward.choose_by", "data_source")
    if "run.steps" not in values:
        values["run.steps"] = 1000
        reader.out.notes.append("run.steps = 1000 is made up: relaxd counts steps, not epochs")
    if "data.eval_path" in values and "eval.prompts" not in values:
        values["eval.prompts"] = EVAL_PROMPTS
        reader.out.notes.append(f"eval.prompts = {EVAL_PROMPTS} is made up: verl answers the whole file")
    if values.setdefault("run.colocate", True):
        values["board.max_staleness"] = 0
        reader.out.notes.append("run.colocate: as in verl, engines and trainer take turns; without it they overlap")
    add_tools(values, reader.out.notes, reader.out.lost, reader.get)
    values.setdefault("rollout.dtype", "bfloat16")
    values.setdefault("trainer.dtype", "bfloat16")
    if values.get("rollout.engine") == "sglang":
        values.setdefault("weights.transport", "cuda_ipc" if values["run.colocate"] else "nccl")
    if "trainer.ranks" in values and not values.get("run.colocate"):
        reader.out.notes.append("trainer.ranks: these GPUs train; engines need others (relaxd up --rollout N)")


_CONVERSIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "algorithm.adv_estimator": _adv_estimator,
    "actor.policy_loss.loss_mode": _loss_mode,
    "actor.clip_ratio": _clip_ratio,
    "actor.use_kl_loss": _kl_loss,
    "actor.kl_loss_coef": _kl_loss,
    "actor.kl_loss_type": _kl_loss_type,
    "algorithm.use_kl_in_reward": _kl_reward,
    "algorithm.kl_ctrl.kl_coef": _kl_reward,
    "actor.loss_agg_mode": _aggregation,
    "rollout.name": _engine,
    "hybrid_engine": _colocate,
    "data.train_files": _files,
    "data.val_files": _eval_files,
    "data.filter_overlong_prompts": _filter_overlong,
    "data.truncation": _truncation,
    "actor.ppo_mini_batch_size": _mini_batch,
    "trainer.n_gpus_per_node": _gpus,
    "trainer.nnodes": _gpus,
    "trainer.total_epochs": _epochs,
    "trainer.save_freq": _interval("trainer.checkpoint.every"),
    "trainer.test_freq": _interval("eval.interval"),
    "data.val_max_samples": _eval_prompts,
    "algorithm.rollout_correction.rollout_is": _correction,
    "actor.router_replay.mode": _routing_replay,
    "model.enable_gradient_checkpointing": _recompute,
    "actor.optim.warmup_style": _schedule,
    "actor.optim.lr_scheduler_type": _schedule,
    "actor.optim.lr_warmup_steps": _warmup,
    "actor.optim.lr_warmup_steps_ratio": _warmup,
    "rollout.top_k": _top_k,
    "rollout.update_weights_bucket_megabytes": _bucket,
    "custom_reward_function.path": _reward,
    "custom_reward_function.name": _reward,
    "custom_reward_function.reward_kwargs": _reward_settings,
    "reward_model.reward_manager": _reward_manager,
    "data.reward_fn_key": _reward_key,
    "reward_model.overlong_buffer.enable": _overlong,
    "reward_model.overlong_buffer.len": _overlong,
    "rollout.multi_turn.enable": _off_or_lost,
    "model.lora_rank": _off_or_lost,
}
"""What needs more than another name."""
