"""`relaxd push`: the model of a run, with a model card, to the Hugging Face hub."""

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from relaxd.cli.options import FolderOption, RunNameArgument
from relaxd.cli.output import show
from relaxd.cli.run_checkpoints import best_step, export_model, run_folder
from relaxd.client import CliError
from relaxd.report.report_files import write_report
from relaxd.report.run_result import RunResult, read_result, table_of
from relaxd.run_folder import model_path

CARD = "README.md"


def push(
    run_id: RunNameArgument,
    name: Annotated[str, typer.Argument(metavar="HUB_NAME", help="The model's name on the hub, such as me/my-model.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of a checkpoint or of an exported model.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint (trainer.checkpoint.keep_best).")] = False,
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a repository that is created.")] = False,
    folder: FolderOption = None,
) -> None:
    """Upload a run's model to the Hugging Face hub, with a model card.

    By default it is the trained model, which the run's end has exported. The token is that of HF_TOKEN or of
    `hf auth login`. HF_ENDPOINT names another hub.
    """
    found = run_folder(run_id, folder)
    if best and step is not None:
        raise CliError(f"--best and --step {step} name two checkpoints: give one of them")
    with tempfile.TemporaryDirectory(prefix="relaxd-push-") as temporary:
        result = read_result(found)
        model, of_step = _model(found, result, best_step(found) if best else step, Path(temporary) / "model")
        write_report(found)  # for the curve
        files = {path.name: path for path in sorted(model.iterdir()) if path.is_file()}
        if (found / CURVE).is_file():
            files[CURVE] = found / CURVE
        show(f"uploading the model of step {of_step} to {name}: {', '.join([CARD, *files])}")
        url = upload(name, model_card(result, name, of_step), files, f"Step {of_step} of run {result.run_id}", public)
    show(url)


def _model(folder: Path, result: RunResult, step: int | None, target: Path) -> tuple[Path, int]:
    """Return the folder of a step's model, and the step. Exports the model to `target` if the run hasn't."""
    summary = result.summary
    if step in (None, summary.get("steps")) and (folder / "model" / "config.json").is_file() and summary.get("model"):
        return folder / "model", int(summary["steps"])
    if step is not None and (model_path(folder, step) / "config.json").is_file():
        return model_path(folder, step), step
    exported = export_model(folder, step, target)
    return Path(exported["path"]), int(exported["step"])


def upload(name: str, card: str, files: dict[str, Path], message: str, public: bool) -> str:
    """Upload files and a model card in one commit; the repository is created, private unless `public`.

    Returns the repository's address. Raises CliError: the hub refuses, or doesn't answer.
    """
    try:
        import httpx
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise CliError("huggingface_hub is not installed", "pip install huggingface_hub") from error
    api = HfApi(library_name="relaxd")
    try:
        repository = api.create_repo(name, private=not public, exist_ok=True)
        operations = [CommitOperationAdd(CARD, card.encode())]
        operations += [CommitOperationAdd(path_in_repo, str(path)) for path_in_repo, path in files.items()]
        api.create_commit(repository.repo_id, operations, commit_message=message)
    except HFValidationError as error:
        raise CliError(f"HUB_NAME is {name!r}: {error}", "such as me/my-model") from error
    except (OSError, httpx.TransportError, ValueError) as error:  # covers the hub's answers and missing tokens
        what = str(error).strip().partition("\n")[0]
        raise CliError(
            f"{api.endpoint} did not take the model: {what}",
            "HF_TOKEN, or `hf auth login`, must have a token that may write there",
        ) from error
    return str(repository)


CURVE = "curve.png"
"""Name of the image file with the reward curve, in the run's folder and on the hub."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(result: RunResult, name: str, step: int) -> str:
    """Return README.md for a model, with the hub's metadata at its beginning.

    Absolute paths are shortened to their last part; settings that may contain secrets are left out.

    Args:
        result: the run.
        name: the model's name on the hub.
        step: the step after which the run had this model.
    """
    config = result.config
    facts = {label: _shown(value) for label, value in result.facts().items() if label != "started"}
    tags = ["relaxd", "reinforcement-learning"]
    metadata: list[str] = ["library_name: transformers", "pipeline_tag: text-generation"]
    training: dict[str, Any] = {"step of this model": step, "steps of the run": len(result.steps)}
    if config is not None:
        tags.append(config.algorithm.name)
        if _HUB_NAME.fullmatch(config.model.path) and not Path(config.model.path).exists():
            metadata.append(f"base_model: {config.model.path}")
        training |= {
            "groups in a step": config.trainer.groups_per_step,
            "answers to a prompt": config.rollout.samples_per_prompt,
            "temperature": config.rollout.temperature,
            "maximum tokens of an answer": config.rollout.max_new_tokens,
            "learning rate": config.trainer.optimizer.lr,
            "seed": config.run.seed,
        }
    parts = [
        "\n".join(["---", *metadata, "tags:", *(f"- {tag}" for tag in tags), "---"]),
        f"# {name.rpartition('/')[2]}",
        f"This model was trained by reinforcement learning with relaxd, in the run `{result.run_id}`.",
        _table(["", ""], [[label, str(value)] for label, value in (facts | training).items()]),
    ]
    if result.steps:
        rewards = [line["reward_mean"] for line in result.steps]
        parts += [
            "## Training",
            f"The mean reward of a step went from {rewards[0]:.3f} to {rewards[-1]:.3f}.",
            f"![Reward over the steps]({CURVE})",
        ]
    if rows := result.set_rows:
        titles, cells = table_of(rows)
        parts += ["## Evaluation", _table(titles, cells), "Step 0 is the model before training."]
    return "\n\n".join(parts) + "\n"


def _shown(value: str) -> str:
    """Shorten each absolute path in a text to its last part."""
    return " ".join(os.path.basename(word.rstrip("/")) if word.startswith("/") else word for word in value.split(" "))


def _table(titles: list[str], rows: list[list[str]]) -> str:
    cells = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
