"""The command as a person uses it: what it says when something is wrong, without services."""

import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from tests.integration.cli.command_kit import EXAMPLE, relaxd


def test_help_teaches() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())
    for expected in ("relaxd demo", "relaxd run my.toml", "relaxd up --rollout 2", "relaxd config show my.toml"):
        assert expected in words
    for command in ("demo", "run", "up", "down", "status", "watch", "samples", "config", "model"):
        assert re.search(rf"│ {command} ", result.output)
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_config_show_is_a_configuration() -> None:
    result = CliRunner().invoke(app, ["config", "show", str(EXAMPLE), "--rollout.top_p", "0.5", "--run.steps=3"])
    assert result.exit_code == 0
    assert "top_p = 0.5" in result.output
    assert "steps = 3" in result.output
    assert "max_consecutive_drops" in result.output


def test_a_wrong_setting_is_one_clear_sentence(tmp_path: Path) -> None:
    done = relaxd("run", str(EXAMPLE), "--run.stps", "3", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: --run.stps: run.stps is not a known setting; did you mean run.steps?\n"
    assert done.stdout == ""


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = relaxd("run", "missing.toml", cwd=tmp_path, RELAXD_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["status"], "no coordinator answers at 127.0.0.1:"),
        (["watch"], "no coordinator answers at"),
        (["samples"], "relaxd up starts the services here"),
        (["run", "missing.toml"], "missing.toml: cannot read the configuration"),
        (["run", "a.toml", "b.toml"], "expected one configuration file, found a.toml and b.toml"),
        (["model", "fetch", "gpt-5"], "no model 'gpt-5' to fetch: there are smollm2-135m"),
    ],
)
def test_what_cannot_be_done_is_said(words: list[str], expected: str, tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound, not listening: nobody answers there
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        done = relaxd(*words, cwd=tmp_path, RELAXD_COORDINATOR=address)
    assert done.returncode == 1
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_down_without_up_says_so(tmp_path: Path) -> None:
    done = relaxd("down", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"nothing is up (in {tmp_path.resolve() / '.relaxd'})\n")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = relaxd("up", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr


def test_a_given_redis_that_does_not_answer_is_named(tmp_path: Path) -> None:
    done = relaxd("up", "--port", "0", cwd=tmp_path, REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert done.returncode == 1
    assert "Redis at 127.0.0.1:1 does not answer" in done.stderr
    assert "secret" not in done.stderr


def test_config_check_finds_what_does_not_fit(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        EXAMPLE.read_text().replace('"smollm2-135m"', f'"{tiny_model}"').replace("_tokens = 64", "_tokens = 256")
    )

    def problems(*words: str) -> str:
        return str(CliRunner().invoke(app, ["config", "check", str(path), *words]).exception)

    overrides = "--rollout.max_new_tokens 5000 --trainer.ranks 3 --trainer.tensor_parallel 3 --eval.prompts 99999"
    done = relaxd("config", "check", str(path), *overrides.split(), cwd=tmp_path)
    assert done.returncode == 1
    for expected in (
        "the model's context has only 512 tokens",
        "trainer.tensor_parallel is 3: it must divide the model's 4 query heads; sizes that do: 1, 2",
        "trainer.micro_batch_tokens = 2048 is too small for one sample",
        "eval.prompts = 99999, but only",
    ):
        assert expected in done.stderr
    monkeypatch.chdir(tmp_path)
    valid, folder, machine, *_ = CliRunner().invoke(app, ["config", "check", str(path)]).stdout.splitlines()
    assert not (tmp_path / "runs").exists()
    assert valid == f"{path} is valid, with its model, data and reward"
    assert folder.startswith("the run's folder will take about ")
    assert machine.startswith("this machine is ready for it")
    unwritable = CliRunner().invoke(app, ["config", "check", str(path), "--run.folder", "/proc/runs"])
    assert unwritable.exit_code == 1
    assert "this machine isn't ready for it:\nproblem run folder" in unwritable.stdout
    assert "2 checkpoints, and one being written: " in folder
    seeing = problems("--data.media_keys.image", "pictures", "--data.max_prompt_tokens", "400000")
    assert "data.max_prompt_tokens = 400000, but the media of a prompt take up to 1280000000 bytes" in seeing
    assert "a message has at most 1073741824 bytes. Lower data.max_prompt_tokens to at most 335544" in seeing
    assert "trainer.checkpoint.max_bytes = 1000 is less than two checkpoints take" in problems(
        "--trainer.checkpoint.max_bytes=1000"
    )
    found = problems(
        "--trainer.routing_replay=rollout", "--rollout.engine=sglang", "--rollout.return_routed_experts=true"
    )
    assert 'trainer.routing_replay = "rollout", but the model (llama) has no experts' in found
    assert "rollout.return_routed_experts = true, but the model (llama) has no experts" in found
    assert "model.path" in problems("--model.path", "nothing/here/at-all")
    assert "no.jsonl" in problems("--data.source", "jsonl", "--data.path", "no.jsonl")
