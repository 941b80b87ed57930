"""Finds model folders by path, by the name of a fetched model, or by hub name."""

import difflib
import os
from pathlib import Path

from relaxd.config import RunConfig
from relaxd.models import DataError
from relaxd.models.shape import expert_dtype
from relaxd.text import parse_json

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Possible names of the config.json field with the number of experts per layer. At most one of them is set."""

FETCHABLE = (
    "smollm2-135m",
    "tool-beginner",
    "game-beginner",
    "digits-beginner",
    "dots-beginner",
    "pitches-beginner",
    "zoom-beginner",
)
"""Names of the models that `relaxd model fetch` can fetch, as in `relaxd.tools.model_fetch.MODELS`."""


def models_folder() -> Path:
    """Return the folder of fetched models: RELAXD_MODELS, else a folder in the user's cache folder."""
    if chosen := os.environ.get("RELAXD_MODELS"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "relaxd" / "models"


def resolve_model(path_or_name: str, *, weights: bool = True, setting: str = "model.path") -> Path:
    """Return the folder of a model: a local folder, a fetched model's name, or a hub name ("owner/model").

    A hub model is downloaded into the hub's cache, without weights if `weights` is False. Errors name `setting`.

    Raises DataError if there is no such model or the download fails.
    """
    local = Path(path_or_name).expanduser()
    if local.is_dir():
        return local.resolve()
    fetched = models_folder() / path_or_name
    if fetched.is_dir():
        return fetched.resolve()
    if path_or_name.count("/") == 1 and not path_or_name.startswith((".", "/", "~")):
        return _download(path_or_name, weights, setting)
    if path_or_name in FETCHABLE:
        raise DataError(setting, f"{path_or_name!r} is not fetched yet: `relaxd model fetch {path_or_name}` gets it")
    names = _fetched_names()
    near = difflib.get_close_matches(path_or_name, [*names, *FETCHABLE], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"`relaxd model fetch` knows {', '.join(FETCHABLE)}"
    raise DataError(
        setting,
        f"{path_or_name!r} is neither a folder, nor a fetched model ({models_folder()} has "
        f'{", ".join(names) or "none"}), nor a hub name such as "owner/model"; {hint}',
    )


def frozen_models(config: RunConfig, role: str, *, weights: bool = True) -> dict[str, Path]:
    """Return the folders of a role's frozen models, by model name; "" is the initial model.

    Raises DataError, see `resolve_model`.
    """
    return {
        model: resolve_model(model or config.model.path, weights=weights, setting=setting if model else "model.path")
        for setting, model in config.roles.frozen[role].settings.items()
    }


def models_in_trainer(config: RunConfig) -> dict[str, dict[str, Path]]:
    """Return, for each role whose frozen models the trainer's ranks hold, the models' folders by model name."""
    return {role: frozen_models(config, role) for role in config.frozen_roles("trainer")}


def routed_expert_bytes(folder: Path) -> int:
    """Return the size in bytes of one token's expert ids ([layers, top k]); 0 for a model without experts."""
    try:
        model = parse_json((folder / "config.json").read_text())
        experts = max(int(model.get(name) or 0) for name in EXPERT_COUNTS)
        return expert_dtype(experts).itemsize * int(model["num_hidden_layers"]) * int(model["num_experts_per_tok"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _fetched_names() -> list[str]:
    folder = models_folder()
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []


def _download(name: str, weights: bool, setting: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DataError(
            setting,
            f"{name!r} is not a local folder, and huggingface_hub, which could download it, is not installed",
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=None if weights else ["*.json", "*.jinja"]))
    except (OSError, ValueError) as error:  # covers or wraps the hub's and httpx's errors
        raise DataError(
            setting, f"{name!r} is not a local folder, and downloading it from the hub failed: {error}"
        ) from error
