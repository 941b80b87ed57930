"""Export a checkpoint as a Hugging Face folder; `relaxd export` starts this program.

A single process loads the model, without the optimizer, whatever layout the checkpoint has.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from relaxd.models.folders import resolve_model
from relaxd.run_folder import checkpoint_path, checkpoint_steps
from services.trainer.offline.program_parts import OfflineError, newest_intact, print_error, print_result, read_config

SIZES = ("ranks", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
SINGLE_RANK: dict[str, Any] = {**dict.fromkeys(SIZES, 1), "pipeline_layers": (), "pipeline_chunks": 1}


def find_checkpoint(run_folder: Path, step: int | None, out: Path) -> int:
    """Return the step of the checkpoint to export, by default the newest.

    Raises OfflineError: there is no such checkpoint, or `out` exists and isn't a model.
    """
    found = newest_intact(run_folder, sys.maxsize if step is None else step)
    if found is None or (step is not None and found != step):
        available = ", ".join(str(step) for step in reversed(checkpoint_steps(run_folder))) or "none"
        wanted = "no intact checkpoint" if step is None else f"no intact checkpoint of step {step}"
        raise OfflineError(f"{run_folder} has {wanted}; available steps: {available}")
    if out.exists() and not (out / "config.json").is_file():
        raise OfflineError(f"{out} exists and isn't a model: it will not be replaced")
    return found


def export_checkpoint(run_folder: Path, step: int, out: Path) -> dict[str, Any]:
    """Export the model in a step's checkpoint. Return the model's path and the step.

    Raises:
        CheckpointError: the checkpoint doesn't fit the model.
        DiskRefused: `out` can't be written, such as on a full disk.
    """
    # Imported here, so that bad arguments are refused at once: loading Megatron takes seconds.
    from services.trainer.learner.snapshot import load_model
    from services.trainer.megatron.world import initialize
    from services.trainer.model.architectures import read_architecture
    from services.trainer.model.hf_weights import save_hf
    from services.trainer.model.policy_model import build_model, transformer_config

    config = read_config(run_folder)
    trainer = config.trainer.model_copy(update=SINGLE_RANK)
    original = resolve_model(config.model.path)
    shape = read_architecture(original)
    megatron_config = transformer_config(shape, trainer)
    world = initialize(trainer, config.run.seed)
    model = build_model(shape, megatron_config, world)
    load_model(model, checkpoint_path(run_folder, step), world)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_hf(model, out, original, shape, world, config.model.chat_template)
    return {"path": str(out), "step": step}


def main() -> int:
    """Run the export with the command line's arguments. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        read_config(given.run_folder)
        step = find_checkpoint(given.run_folder, given.step, given.out)
    except OfflineError as error:
        return print_error(error)
    return print_result(lambda: export_checkpoint(given.run_folder, step, given.out))


if __name__ == "__main__":
    sys.exit(main())
