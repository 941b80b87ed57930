"""SGLang's options from a run's configuration, checked before the model is loaded."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

from relaxd.config import RolloutConfig
from relaxd.rpc.errors import InvalidArgument
from services.rollout.engines.sglang.gpu_share import fraction_of_share

SET_BY_RELAXD = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "dtype": "rollout.dtype",
    "tp_size": "rollout.tensor_parallel",
    "mem_fraction_static": "rollout.memory_fraction",
    "max_running_requests": "rollout.max_running_samples",
    "enable_return_routed_experts": "rollout.return_routed_experts",
    "enable_memory_saver": "run.colocate",
    "enable_weights_cpu_backup": "run.colocate",
}
"""SGLang options that relaxd sets, each with the relaxd setting that determines its value."""

UNSUPPORTED = {
    "skip_tokenizer_init": "relaxd always exchanges tokens, not text",
    "host": "the engine has no server",
    "port": "the engine has no server",
    "pp_size": "weights are received by tensor-parallel ranks only",
    "dp_size": "add rollout replicas instead",
    "nnodes": "an engine is on one machine",
    "node_rank": "an engine is on one machine",
    "dist_init_addr": "an engine is on one machine",
    "tokenizer_worker_num": "there is no tokenizer process",
    "detokenizer_worker_num": "there is no detokenizer process",
    "speculative_algorithm": "relaxd counts one token a step to know which weights produced it",
    "disaggregation_mode": "relaxd pauses and updates whole engines",
    "enable_lora": "relaxd updates whole models",
    "lora_paths": "relaxd updates whole models",
    "is_embedding": "relaxd needs a model that generates",
}
"""SGLang options that users may not set, each with the reason."""


class OptionError(InvalidArgument):
    """Raised if an option of [rollout.sglang] is invalid; the message names the option and its valid values."""


def server_args(
    folder: str, config: RolloutConfig, *, colocate: bool, frozen: bool = False, share: float = 1.0
) -> ServerArgs:
    """Return SGLang's ServerArgs for a model.

    Args:
        folder: the model's folder.
        config: a run's [rollout] table.
        colocate: True if the engine must be able to sleep.
        frozen: True if a sleep must preserve the weights, as a copy in the host's memory.
        share: the engine's share of each GPU, 0 to 1; its scheduler processes need it too (`show_share`).

    Raises OptionError, or SGLang's own exceptions for options that contradict each other.
    """
    options = dict(config.sglang)
    check_options(options)
    values: dict[str, Any] = {
        # relaxd needs no grammars, and at "info" SGLang logs a line every few steps.
        "grammar_backend": "none",
        "log_level": "warning",
        # An idle engine must not spin; a request wakes it at once.
        "sleep_on_idle": True,
        **options,
        "model_path": folder,
        "dtype": config.dtype,
        "tp_size": config.tensor_parallel,
        "max_running_requests": config.max_running_samples,
        "skip_tokenizer_init": True,
    }
    if config.memory_fraction:
        values["mem_fraction_static"] = config.memory_fraction
    if colocate and torch.cuda.is_available():
        values["enable_memory_saver"] = True
        values["enable_weights_cpu_backup"] = frozen
    if config.return_routed_experts:
        values["enable_return_routed_experts"] = True
    args = ServerArgs(**values)
    if share < 1 and not config.memory_fraction:
        args.mem_fraction_static = fraction_of_share(args.mem_fraction_static, share)
    return args


def check_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError unless every option exists, may be set and has the right type."""
    known = {field.name for field in dataclasses.fields(ServerArgs) if field.init}
    hints = get_type_hints(ServerArgs, include_extras=True)
    for name, value in options.items():
        setting = f"rollout.sglang.{name}"
        if name in SET_BY_RELAXD:
            raise OptionError(f"{setting} is set by relaxd itself: use {SET_BY_RELAXD[name]}")
        if name in UNSUPPORTED:
            raise OptionError(f"{setting} cannot be set: {UNSUPPORTED[name]}")
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise OptionError(f"{setting} is not an option of SGLang {__version__}{hint}")
        _check_value(setting, value, hints[name])


def _check_value(setting: str, value: Any, hint: Any) -> None:
    kind, notes = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    try:
        TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except ValidationError as error:
        right = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
        raise OptionError(f"{setting} is {value!r}, a {type(value).__name__}: it must be {right}") from error
    for note in notes:
        choices = getattr(note, "choices", None)
        if choices and value not in choices:
            close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.5)
            hint_text = f"; did you mean {close[0]}?" if close else ""
            raise OptionError(f"{setting} is {value!r}: it must be one of {', '.join(map(str, choices))}{hint_text}")
