"""A run has the text of its chat templates, not the paths of their files, which mean other files elsewhere."""

from pathlib import Path

import pytest

from relaxd.cli.execute import with_absolute_paths
from relaxd.cli.preparing.config_command import check
from relaxd.config import RunConfig
from relaxd.config.load_toml import load
from relaxd.config.write_toml import dump
from relaxd.data.templating import with_template_texts
from relaxd.models import DataError
from relaxd.rpc.errors import InvalidArgument
from services.coordinator.runs.starting import prepare
from tests.kit.models import make_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
SETTINGS = ("model.chat_template", "roles.judge.chat_template")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model and a template."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "tiny")
    (tmp_path / "my.jinja").write_text(TEMPLATE)
    return tmp_path


def config(folder: Path, setting: str, template: str) -> RunConfig:
    return load(
        f"""
run = {{ steps = 1, folder = "{folder / "runs"}" }}
model.path = "{folder / "tiny"}"
data.source = "addition"
reward.name = "judge"
roles.judge.model = "{folder / "tiny"}"
roles.judge.max_new_tokens = 8
""",
        [f"--{setting}", template],
    )


def templates(run: RunConfig) -> dict[str, str | None]:
    found = (run.model.chat_template, run.roles.judge.chat_template)
    return dict(zip(SETTINGS, found, strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_commands_read_paths_from_the_current_folder_and_send_the_text(folder: Path, setting: str) -> None:
    for path in ("my.jinja", "./my.jinja", str(folder / "my.jinja"), TEMPLATE):
        assert templates(with_absolute_paths(config(folder, setting, path)))[setting] == TEMPLATE
        assert templates(with_template_texts(config(folder, setting, path), absolute=False))[setting] == TEMPLATE
    there = config(folder, setting, "/on/the/coordinators/machine.jinja")
    assert with_template_texts(there, absolute=False) == there
    with pytest.raises(DataError, match=rf"{setting}: '\./no\.jinja' has no .* which can't be read: No such file"):
        with_template_texts(config(folder, setting, "./no.jinja"), absolute=False)
    refused = [one for one in check(config(folder, setting, "./no.jinja"), call_reward=False) if one.setting == setting]
    assert len(refused) == 1
    assert "which can't be read: No such file" in refused[0].message


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_coordinator_reads_absolute_paths_and_refuses_relative_ones(
    folder: Path, redis_url: str, setting: str
) -> None:
    with pytest.raises(InvalidArgument, match="the coordinator doesn't know the folder that this relative path starts"):
        prepare("run", dump(config(folder, setting, "my.jinja")), "", redis_url, "")
    record = prepare("run", dump(config(folder, setting, str(folder / "my.jinja"))), "", redis_url, "").record
    assert templates(RunConfig.model_validate_json(record.config_json))[setting] == TEMPLATE
