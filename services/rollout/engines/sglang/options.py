"""From a run's configuration to SGLang's options, checked before anything is loaded."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

SET_BY_RELAXD = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "dtype": "rollout.dtype",
    "tp_size": "rollout.tensor_parallel",
    "mem_fraction_static": "rollout.memory_fraction",
    "max_running_requests": "rollout.max_running_samples",
    "enable_return_routed_experts": "rollout.return_routed_experts",
    "enable_memory_saver": "run.colocate",
}
"""Options that follow from relaxd's own settings, and from which."""

NOT_POSSIBLE = {
    "skip_tokenizer_init": "relaxd sends tokens and reads tokens",
    "host": "the engine listens nowhere",
    "port": "the engine listens nowhere",
    "pp_size": "weights are received by tensor-parallel ranks only",
    "dp_size": "add rollout replicas instead",
    "nnodes": "an engine is on one machine",
    "node_rank": "an engine is on one machine",
    "dist_init_addr": "an engine is on one machine",
    "tokenizer_worker_num": "there is no tokenizer process",
    "detokenizer_worker_num": "there is no detokenizer process",
    "speculative_algorithm": "relaxd counts one token a step to tell under which weights it was made",
    "disaggregation_mode": "relaxd pauses and updates whole engines",
    "enable_lora": "relaxd updates whole models",
    "lora_paths": "relaxd updates whole models",
    "is_embedding": "relaxd generates",
}
"""Options that cannot be given, and why."""


class OptionError(ValueError):
    """An option of [rollout.sglang] that cannot be used; the message names it and says what would be right."""


def server_args(folder: str, params: Mapping[str, Any]) -> ServerArgs:
    """SGLang's ServerArgs for a model.

    `params` has relaxd's own settings (dtype, max_running_samples, tensor_parallel, memory_fraction,
    return_routed_experts, colocate) and, as `options`, what [rollout.sglang] says. Raises OptionError, or what SGLang
    raises when it finds that options do not fit together.
    """
    options = dict(params["options"])
    check_options(options)
    values: dict[str, Any] = {
        # We need no grammars and no prompt texts, and what SGLang logs at "info" is a line every few steps.
        "grammar_backend": "none",
        "log_level": "warning",
        # An idle engine leaves its core to others; a request wakes it at once.
        "sleep_on_idle": True,
        **options,
        "model_path": folder,
        "dtype": params["dtype"],
        "tp_size": params["tensor_parallel"],
        "max_running_requests": params["max_running_samples"],
        "skip_tokenizer_init": True,
    }
    if params["memory_fraction"]:
        values["mem_fraction_static"] = params["memory_fraction"]
    if params["colocate"] and torch.cuda.is_available():
        values["enable_memory_saver"] = True
    if params["return_routed_experts"]:
        values["enable_return_routed_experts"] = True
    return ServerArgs(**values)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError unless every option exists, may be given and has the right type."""
    known = {field.name for field in dataclasses.fields(ServerArgs) if field.init}
    hints = get_type_hints(ServerArgs, include_extras=True)
    for name, value in options.items():
        setting = f"rollout.sglang.{name}"
        if name in SET_BY_RELAXD:
            raise OptionError(f"{setting} is set by relaxd itself: use {SET_BY_RELAXD[name]}")
        if name in NOT_POSSIBLE:
            raise OptionError(f"{setting} cannot be given: {NOT_POSSIBLE[name]}")
        if name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise OptionError(f"{setting} is no option of SGLang {__version__}{hint}")
        _check_value(setting, value, hints[name])


def _check_value(setting: str, value: Any, hint: Any) -> None:
    kind, notes = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    try:
        TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
    except ValidationError as error:
        right = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
        raise OptionError(f"{setting} is {value!r}, a {type(value).__name__}: SGLang wants {right}") from error
    for note in notes:
        choices = getattr(note, "choices", None)
        if choices and value not in choices:
            close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.5)
            hint_text = f"; did you mean {close[0]}?" if close else ""
            raise OptionError(f"{setting} is {value!r}: one of {', '.join(map(str, choices))}{hint_text}")
