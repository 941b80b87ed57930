"""Converts verl's settings of rewards, of reward models, and of tools, which become an environment or a reward."""

from collections.abc import Callable
from typing import Any

from relaxd.tools.migrate.key_fates import KeyFate, Lost, Reader, reason
from relaxd.tools.migrate.verl_training import Conversion, off

MANAGERS = ("naive", "batch", "dapo")
"""Names of verl's reward managers that need no equivalent in relaxd."""
TOOLS_FILE = ("rollout.multi_turn.tool_config_path", "data.tool_config_path")
"""verl's keys for the path of the tools' configuration file, in different versions."""
CALLS = "rollout.multi_turn.max_parallel_calls"
FUNCTION = ("reward.custom_reward_function", "custom_reward_function")
"""Name of verl's section for a custom reward function, in newer and older versions."""

CONFINED = (
    "A reward function has no network and writes only temporary files: if yours calls an API or writes others, set "
    'reward.network = true or reward.writable = ["/path"]'
)
"""Note for configurations with a custom reward function: relaxd confines it, which verl doesn't."""


def complete_rewards(reader: Reader) -> None:
    """Add reward and judge settings that verl implies without naming them."""
    values = reader.out.values
    if "reward.name" not in values:
        values.setdefault("reward.choose_by", "data_source")
    if "roles.judge.model" in values:
        values.setdefault("roles.judge.engine", "sglang")
        values.setdefault("roles.judge.dtype", "bfloat16")


def _path(reader: Reader) -> Any:
    return reader.first(*(f"{one}.path" for one in FUNCTION))


def _reward(reader: Reader, value: Any) -> None:
    if value and (path := _path(reader)):
        name = reader.first(*(f"{one}.name" for one in FUNCTION)) or "compute_score"
        reader.set("reward.name", f"{path}:{name}")
        reader.note(CONFINED)


def _settings(reader: Reader, value: Any, key: str) -> None:
    """Convert a keyword argument of verl's reward function, or a table of them, to reward.settings."""
    found = {key.removeprefix("."): value} if key else dict(value or {})
    if not found:
        return
    if not _path(reader):
        raise Lost("there is no custom_reward_function.path")
    table = dict(reader.out.values.get("reward.settings", {}))
    for name, one in found.items():
        inside = table
        *outer, last = name.split(".")
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[last] = one
    reader.out.values["reward.settings"] = table
    reader.set("reward.settings", table)


def _manager(reader: Reader, value: Any) -> None:
    if value not in (None, *MANAGERS):
        raise Lost("a reward is a function, a class or a service (docs/rewards.md)")


def _reward_key(reader: Reader, value: Any) -> None:
    if value and not _path(reader):
        reader.set("reward.choose_by", value)


def _workers(reader: Reader, value: Any) -> None:
    if value is not None:
        reader.set("reward.workers", int(value))


def _manager_arguments(reader: Reader, value: Any, key: str) -> None:
    """Convert the reward manager's arguments for DAPO's penalty of long answers; raise Lost for others."""
    flat = dict(_flat(value, key))
    if unknown := [name for name in flat if name not in _OVERLONG]:
        raise Lost(f"{', '.join(unknown)}: arguments of verl's reward manager; here a reward has reward.settings")
    manager = reader.first("reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager")
    if manager not in (None, "dapo") or not _overlong(reader, "overlong_buffer_cfg.enable"):
        return  # verl ignores it
    reader.set("algorithm.overlong_buffer", int(_overlong(reader, "overlong_buffer_cfg.len") or 0))
    reader.set("algorithm.overlong_penalty", float(_overlong(reader, "overlong_buffer_cfg.penalty_factor") or 1.0))
    longest = _overlong(reader, "max_resp_len") or reader.get("data.max_response_length", 512)
    reader.set("algorithm.overlong_limit", int(longest))


_OVERLONG = {
    "overlong_buffer_cfg.enable",
    "overlong_buffer_cfg.len",
    "overlong_buffer_cfg.penalty_factor",
    "overlong_buffer_cfg.log",
    "max_resp_len",
}


def _overlong(reader: Reader, name: str) -> Any:
    """Return an argument of verl's reward manager, from the place where any of verl's versions has it."""
    older = name.replace("overlong_buffer_cfg", "overlong_buffer")
    for section in ("reward", "reward_model"):
        table = dict(_flat(reader.get(f"{section}.reward_kwargs", {}), ""))
        dotted = (f"{section}.reward_kwargs.{name}", f"{section}.{name}", f"{section}.{older}")
        if (found := table.get(name, reader.first(*dotted))) is not None:
            return found
    return None


def _flat(value: Any, prefix: str) -> list[tuple[str, Any]]:
    """Flatten a nested table of arguments to (dotted name, value) pairs; `prefix` begins the names."""
    if not isinstance(value, dict):
        return [(prefix.removeprefix(".").replace("overlong_buffer.", "overlong_buffer_cfg."), value)]
    return [pair for name, one in value.items() for pair in _flat(one, f"{prefix}.{name}")]


# --- reward models ----------------------------------------------------------------------------------------------------

_JUDGE: dict[str, str] = {
    "model_path": "model",
    "model.path": "model",
    "rollout.tensor_model_parallel_size": "tensor_parallel",
    "rollout.gpu_memory_utilization": "memory_fraction",
    "rollout.max_num_seqs": "max_running_samples",
    "rollout.response_length": "max_new_tokens",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "rollout.top_k": "top_k",
    "rollout.dtype": "dtype",
}


def _reward_model(reader: Reader, value: Any, key: str) -> None:
    """Convert a key of an enabled reward model, which becomes relaxd's judge.

    Raises Lost if there is no reward function to ask it, or the key has no equivalent.
    """
    if not _path(reader):
        raise Lost(
            "a model that gives a number can't be a reward here: a judge writes, and a reward function asks it "
            "(docs/judge.md)"
        )
    if key == "enable":
        reader.note(
            f"roles.judge: {_path(reader)} must ask it with `await judge.ask(messages)` (docs/judge.md): there are no "
            "arguments reward_router_address and reward_model_tokenizer"
        )
    elif key in ("enable_resource_pool", "n_gpus_per_node", "nnodes"):
        raise Lost(
            "replicas are no setting of a run: `relaxd up --judge N`; with roles.judge.gpu_share they share GPUs"
        )
    elif key == "rollout.name":
        reader.set("roles.judge.engine", "sglang")
    elif key in _JUDGE:
        if value is not None:
            reader.set(f"roles.judge.{_JUDGE[key]}", max(0, int(value)) if key == "rollout.top_k" else value)
    elif value not in (None, "", {}, []):
        raise Lost("options of the judge's engine are SGLang's own, in roles.judge.sglang")


def _has_conversations(reader: Reader) -> bool:
    """Return True if verl's configuration has conversations with a tools file, which become the environment
    verl_tools."""
    return bool(reader.get("rollout.multi_turn.enable") and reader.first(*TOOLS_FILE))


def _conversation(reader: Reader, value: Any) -> None:
    if _has_conversations(reader):
        reader.set("agent.environment", "verl_tools")
    elif value:
        raise Lost(reason("rollout.multi_turn.enable"))


def _turns(reader: Reader, value: Any) -> None:
    if value is not None and not _has_conversations(reader):
        raise Lost(reason("rollout.multi_turn.max_assistant_turns"))
    if value is not None:
        reader.set("agent.max_turns", int(value))


REWARDS: dict[str, Conversion] = {
    **{f"{one}.path": _reward for one in FUNCTION},
    **{f"{one}.name": _reward for one in FUNCTION},
    "reward.reward_manager.name": _manager,
    "reward_manager.name": _manager,
    "reward_model.reward_manager": _manager,
    "reward.reward_manager.source": off("a reward is a function, a class or a service", implied=("register",)),
    "reward_manager.source": off("a reward is a function, a class or a service", implied=("register",)),
    "reward.num_workers": _workers,
    "reward_model.num_workers": _workers,
    "reward_model.launch_reward_fn_async": off(implied=(True,)),
    "reward_model.use_reward_loop": off(implied=(True,)),
    "data.reward_fn_key": _reward_key,
    "rollout.multi_turn.enable": _conversation,
    "rollout.multi_turn.max_assistant_turns": _turns,
}
"""verl's keys of rewards whose values must be converted, not only renamed, with the conversions."""
REWARDS_BY_PATTERN: tuple[tuple[str, Callable[[Reader, Any, str], None]], ...] = (
    (r"(?:reward\.)?custom_reward_function\.reward_kwargs(\..*|)", _settings),
    (r"(?:reward|reward_model)\.reward_kwargs(\..*|)", _manager_arguments),
    (r"(?:reward|reward_model)\.(overlong_buffer(?:_cfg)?\..*|max_resp_len)", _manager_arguments),
    (
        r"(?:reward\.reward_model|reward_model)\.((?:enable|enable_resource_pool|n_gpus_per_node|nnodes|model_path)|"
        r"(?:model|rollout)\..*)",
        _reward_model,
    ),
)
"""Patterns of verl's keys of rewards, and the conversion of matching keys, which gets the text of the pattern's
group."""


NOTE = "answers end after one turn; observations are not fed back"


CONVERSATIONS = (
    "agent.environment: the reward scores the last message, as in verl; what the tools paid is added by "
    '[[reward.terms]] with name = "environment"',
    "data.max_prompt_tokens: the tools' schemas count in it, too",
)
"""Notes for configurations whose conversations use verl's tools."""


def add_tools(reader: Reader) -> None:
    """Configure what executes verl's tools: the environment verl_tools or, without conversations, the reward
    verl_tools.

    If the configuration names another reward, verl_tools is added to it.
    """
    out, values, notes = reader.out, reader.out.values, reader.out.notes
    if "data.tools_file" not in values:
        return
    for name in [name for name in out.fates if name.endswith(CALLS)]:
        out.fates[name] = KeyFate.WRITTEN
        out.lost[:] = [one for one in out.lost if one[0] != name]
        out.idle[:] = [one for one in out.idle if one[0] != name]
    settings = {"config": values["data.tools_file"], "max_calls": int(reader.get(CALLS, 1) or 0)}
    if "agent.environment" in values:
        del values["data.tools_file"]
        values["agent.settings"] = settings
        notes += CONVERSATIONS
        return
    notes.append(f"data.tools_file and the reward verl_tools: {NOTE}")
    if "reward.name" in values:
        own: dict[str, Any] = {"name": values.pop("reward.name")}
        for key in ("settings", "key"):
            if (found := values.pop(f"reward.{key}", None)) is not None:
                own[key] = found
        values["reward.terms"] = [own, {"name": "verl_tools", "settings": settings}]
        notes.append("reward.terms: what the tools say is added; weight = 0.0 makes it a metric, as it is in verl")
        return
    values["reward.name"], values["reward.settings"] = "verl_tools", settings
    if values.pop("reward.choose_by", None):
        notes.append("reward.name: verl scores by data_source; replace or complete verl_tools by [[reward.terms]]")
