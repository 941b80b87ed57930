"""Converts verl's settings of the algorithm, the trainer and the engines."""

from collections.abc import Callable, Mapping
from typing import Any

from relaxd.tools.migrate.key_fates import Lost, Reader

ALGORITHMS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
LOSSES = ("gspo", "sapo", "cispo")
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "k3"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum": "sample_sum",
    "seq-mean-token-sum-norm": "constant_length",
}
ROUTING_REPLAYS = {"disabled": "none", "R2": "trainer", "R3": "rollout"}
Conversion = Callable[[Reader, Any], None]


def algorithm_of(reader: Reader) -> str:
    """Return relaxd's algorithm.name for verl's settings: the loss mode if relaxd has an algorithm of that name, else
    the algorithm with verl's advantage estimator, or "grpo"."""
    estimator, loss = reader.get("algorithm.adv_estimator", "gae"), reader.get("actor.policy_loss.loss_mode", "vanilla")
    return str(loss) if loss in LOSSES else ALGORITHMS.get(str(estimator), "grpo")


def complete_training(reader: Reader) -> None:
    """Add settings that the configuration doesn't name but verl implies, such as defaults that differ from relaxd's."""
    values = reader.out.values
    if "run.steps" not in values:
        values["run.steps"] = 1000
        reader.note("run.steps = 1000 is made up: relaxd counts steps, not epochs")
    added = {name: value for name, value in _DEFAULTS.items() if name not in values}
    batch = values.get("trainer.groups_per_step", added.get("trainer.groups_per_step"))
    if "trainer.mini_batches" not in values and isinstance(batch, int) and batch % _MINI_BATCH == 0:
        added["trainer.mini_batches"] = batch // _MINI_BATCH
    if added:
        values.update(added)
        reader.note(f"{', '.join(added)}: verl's defaults, because the configuration doesn't say")
    if values.setdefault("run.colocate", True):
        values["board.max_staleness"] = 0
        reader.note("run.colocate: as in verl, engines and trainer take turns; without it they overlap")
    if "rollout.engine" not in values:
        values["rollout.engine"] = "sglang"
        reader.note('rollout.engine: the configuration names none, so this is "sglang"')
    values.setdefault("rollout.dtype", "bfloat16")
    values.setdefault("trainer.dtype", "bfloat16")
    values.setdefault("weights.transport", "cuda_ipc" if values["run.colocate"] else "nccl")
    nodes = int(reader.get("trainer.nnodes", 1))
    if nodes > 1 and values["run.colocate"]:
        reader.note(
            f"trainer.nnodes = {nodes}: with run.colocate all ranks are on one host; for more, set run.colocate = "
            f"false and trainer.hosts = {nodes}"
        )
    if "trainer.ranks" in values and not values["run.colocate"]:
        reader.note("trainer.ranks: these GPUs train; engines need others (relaxd up --rollout N)")
        if nodes > 1:
            values["trainer.hosts"] = nodes


_DEFAULTS: Mapping[str, Any] = {
    "trainer.groups_per_step": 1024,
    "rollout.samples_per_prompt": 1,
    "data.max_prompt_tokens": 512,
    "rollout.max_new_tokens": 512,
    "trainer.optimizer.lr": 1e-6,
}
"""verl's defaults that affect training and differ from relaxd's, by relaxd's setting."""
_MINI_BATCH = 256
"""verl's default of ppo_mini_batch_size, in prompts."""


def off(why: str = "", *, implied: tuple[Any, ...] = ()) -> Conversion:
    """Return a conversion for a feature that relaxd lacks: it raises Lost unless verl's value turns the feature off.

    `why` is the reason to report; `implied` are further values that need no conversion.
    """

    def convert(reader: Reader, value: Any) -> None:
        if value not in (None, False, 0, "", "null", -1, *implied):
            raise Lost(why)

    return convert


def converted(setting: str, convert: Callable[[Any], Any]) -> Conversion:
    """Return a conversion that passes verl's value through `convert`, and writes the result to relaxd's `setting`."""
    return lambda reader, value: reader.set(setting, convert(value))


def renamed(setting: str, names: Mapping[str, str]) -> Conversion:
    """Return a conversion that replaces verl's value by relaxd's name for it, and writes it to relaxd's `setting`.

    `names` has relaxd's names by verl's. Other values raise Lost.
    """

    def convert(reader: Reader, value: Any) -> None:
        if value not in names:
            raise Lost(f"there are {', '.join(names)}")
        reader.set(setting, names[value])

    return convert


def _interval(value: Any) -> int:
    return max(0, int(value or 0))


def _bucket_bytes(value: Any) -> int:
    return int(value) << 20


# --- algorithm --------------------------------------------------------------------------------------------------------


def _adv_estimator(reader: Reader, value: Any) -> None:
    if value not in ALGORITHMS:
        raise Lost(f"there is no such estimator, so that grpo is written; there are {', '.join(ALGORITHMS)}")
    reader.set("algorithm.name", algorithm_of(reader))


def _loss_mode(reader: Reader, value: Any) -> None:
    if value in LOSSES:
        reader.set("algorithm.name", algorithm_of(reader))
    elif value not in (None, "vanilla"):
        raise Lost("the clipped loss of the algorithm is used")


def _clip_ratio(reader: Reader, value: Any) -> None:
    if reader.out.values["algorithm.name"] == "sapo":
        raise Lost("sapo has no clip")
    reader.set("algorithm.clip_low", reader.get("actor.clip_ratio_low", value))
    reader.set("algorithm.clip_high", reader.get("actor.clip_ratio_high", value))


def _kl_loss(reader: Reader, value: Any) -> None:
    coefficient = reader.get("actor.kl_loss_coef", 0.001)
    if reader.get("actor.use_kl_loss", False):
        reader.set("algorithm.kl_coef", coefficient)


def _kl_reward(reader: Reader, value: Any) -> None:
    if reader.get("algorithm.use_kl_in_reward", False):
        reader.set("algorithm.kl_reward_coef", reader.get("algorithm.kl_ctrl.kl_coef", 0.001))


def _kl_loss_type(reader: Reader, value: Any) -> None:
    if value not in KL_ESTIMATORS:
        raise Lost(f"there are {', '.join(KL_ESTIMATORS)}")
    if reader.get("actor.use_kl_loss", False):
        reader.set("algorithm.kl_estimator", KL_ESTIMATORS[value])


def _correction(reader: Reader, value: Any) -> None:
    if value in (None, "null"):
        return
    if value != "token":
        raise Lost('weights are per token: algorithm.correction = "tis"')
    _tis(reader)


def _tis_cap(reader: Reader, value: Any) -> None:
    if value is not None and float(value) > 0:
        _tis(reader)
        reader.set("algorithm.tis_clip", float(value))


def _tis(reader: Reader) -> None:
    reader.set("algorithm.correction", "tis")
    reader.set("algorithm.old_logprobs", "current")  # as in verl, and as the correction needs


# --- trainer ----------------------------------------------------------------------------------------------------------


def _mini_batch(reader: Reader, value: Any) -> None:
    batch = reader.get("data.train_batch_size", value)
    if batch % value:
        raise Lost(f"data.train_batch_size = {batch} is not a multiple of it; trainer.mini_batches is their ratio")
    reader.set("trainer.mini_batches", batch // value)


def _gpus(reader: Reader, value: Any) -> None:
    nodes = reader.get("trainer.nnodes", 1)
    reader.set("trainer.ranks", int(reader.get("trainer.n_gpus_per_node", 1)) * int(nodes))


def _epochs(reader: Reader, value: Any) -> None:
    if reader.get("trainer.total_training_steps") is None:
        reader.note(
            f"run.steps: verl trains {value} epochs; write {value} * rows of the data / trainer.groups_per_step"
        )


def _mode(reader: Reader, value: Any) -> None:
    if value == "separate_async":
        reader.set("run.colocate", False)
        reader.note("board.max_staleness: verl's trainer.v1.sampler.max_off_policy_threshold is nearest to it")
    elif value not in (None, "sync"):
        raise Lost("there are run.colocate, or engines beside the trainer with board.max_staleness")


def _colocate(reader: Reader, value: Any) -> None:
    if reader.get("trainer.v1.trainer_mode") != "separate_async":
        reader.set("run.colocate", bool(value))


def _context_parallel(reader: Reader, value: Any) -> None:
    if int(value) > 1:
        reader.set("trainer.context_parallel", int(value))


def _betas(reader: Reader, value: Any) -> None:
    first, second = value
    reader.set("trainer.optimizer.beta1", float(first))
    reader.set("trainer.optimizer.beta2", float(second))


def _min_lr(reader: Reader, value: Any) -> None:
    schedule = reader.get("actor.optim.lr_scheduler_type") or reader.get("actor.optim.warmup_style")
    if value and schedule not in (None, "constant"):  # which verl doesn't lower either
        reader.set("trainer.optimizer.min_lr", float(value) * float(reader.get("actor.optim.lr", 1e-6)))


def _clip_grad(reader: Reader, value: Any) -> None:
    if reader.get("actor.grad_clip") is None and value is not None:
        reader.set("trainer.optimizer.clip_grad", value)


def _schedule(reader: Reader, value: Any) -> None:
    if value is None:
        return
    if value not in ("constant", "cosine", "linear"):
        raise Lost("there are constant, linear and cosine")
    reader.set("trainer.optimizer.schedule", value)


def _warmup(reader: Reader, value: Any) -> None:
    steps, ratio = reader.get("actor.optim.lr_warmup_steps", -1), reader.get("actor.optim.lr_warmup_steps_ratio", 0.0)
    total = reader.get("trainer.total_training_steps")
    if steps is not None and steps > 0:
        reader.set("trainer.optimizer.warmup_steps", int(steps))
    elif ratio and total:
        reader.set("trainer.optimizer.warmup_steps", int(ratio * total))
    elif ratio:
        raise Lost(f"trainer.optimizer.warmup_steps is {ratio} * run.steps")


# --- engines ----------------------------------------------------------------------------------------------------------


def _engine(reader: Reader, value: Any) -> None:
    if value in (None, "", "???"):
        return  # `complete_training` notes it
    reader.set("rollout.engine", "sglang")
    if value != "sglang":
        reader.note(f'rollout.engine: verl used {value}; relaxd has no vLLM, so this is "sglang"')


def _prompt_length(reader: Reader, value: Any) -> None:
    if value != reader.get("data.max_prompt_length", 512):
        raise Lost("data.max_prompt_length is the length of prompts")


TRAINING: dict[str, Conversion] = {
    "algorithm.adv_estimator": _adv_estimator,
    "actor.policy_loss.loss_mode": _loss_mode,
    "actor.clip_ratio": _clip_ratio,
    "actor.use_kl_loss": _kl_loss,
    "actor.kl_loss_coef": _kl_loss,
    "actor.kl_loss_type": _kl_loss_type,
    "algorithm.use_kl_in_reward": _kl_reward,
    "algorithm.kl_ctrl.kl_coef": _kl_reward,
    "algorithm.kl_ctrl.type": off("the coefficient is fixed", implied=("fixed",)),
    "algorithm.use_pf_ppo": off("there is no preference feedback"),
    "actor.loss_agg_mode": renamed("algorithm.loss_aggregation", AGGREGATIONS),
    "actor.shuffle": off("mini-batches are groups in the order of the board"),
    "actor.tis_imp_ratio_cap": _tis_cap,
    "algorithm.rollout_correction.rollout_is": _correction,
    "algorithm.rollout_correction.bypass_mode": off('algorithm.old_logprobs = "rollout" is the default'),
    "actor.router_replay.mode": renamed("trainer.routing_replay", ROUTING_REPLAYS),
    "actor.ppo_mini_batch_size": _mini_batch,
    "trainer.n_gpus_per_node": _gpus,
    "trainer.nnodes": _gpus,
    "trainer.total_epochs": _epochs,
    "trainer.save_freq": converted("trainer.checkpoint.every", _interval),
    "trainer.test_freq": converted("eval.interval", _interval),
    "trainer.critic_warmup": off("policy and critic are trained from the first step on"),
    "trainer.v1.trainer_mode": _mode,
    "trainer.use_v1": off(implied=(True,)),
    "trainer.device": off("NVIDIA's GPUs, or CPUs", implied=("cuda",)),
    "hybrid_engine": _colocate,
    "model.enable_gradient_checkpointing": converted("trainer.recompute", lambda on: "full" if on else "none"),
    "actor.fsdp_config.ulysses_sequence_parallel_size": _context_parallel,
    "actor.optim.optimizer": off("there is AdamW", implied=("AdamW",)),
    "actor.optim.total_training_steps": off("a schedule ends at run.steps"),
    "actor.optim.betas": _betas,
    "actor.optim.min_lr_ratio": _min_lr,
    "actor.optim.clip_grad": _clip_grad,
    "actor.optim.warmup_style": _schedule,
    "actor.optim.lr_scheduler_type": _schedule,
    "actor.optim.lr_warmup_steps": _warmup,
    "actor.optim.lr_warmup_steps_ratio": _warmup,
    "rollout.name": _engine,
    "rollout.mode": off("engines are always services", implied=("async", "sync")),
    "rollout.calculate_log_probs": off(implied=(True,)),
    "rollout.ignore_eos": off("training samples answers up to an end token"),
    "rollout.do_sample": off("training samples answers", implied=(True,)),
    "rollout.prompt_length": _prompt_length,
    "rollout.top_k": converted("rollout.top_k", lambda value: max(0, int(value))),
    "rollout.update_weights_bucket_megabytes": converted("weights.bucket_bytes", _bucket_bytes),
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": converted("weights.bucket_bytes", _bucket_bytes),
    "model.lora_rank": off("there is no LoRA"),
}
"""verl's keys of training and engines whose values must be converted, not only renamed, with the conversions."""
