"""Prompts of the teacher, and the teachers of sources: how they are made, and what is refused."""

import json
from pathlib import Path

import pytest

from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.data.dataset import Cursor, load_data
from relaxd.data.examples import Example
from relaxd.data.prompt_checks import PrivilegedPrompts
from relaxd.models import DataError
from tests.kit.tokenizer import write_tokenizer

TEMPLATE = "{prompt} ({privileged})"
PRIVILEGED = f'roles.teacher.privileged_key = "solution"\nroles.teacher.privileged_template = "{TEMPLATE}"'
DISTILLED = "algorithm.distill_coef = 0\nalgorithm.distill_loss_coef = 1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def config(model: Path, rows: Path | None = None, more: str = "", teacher: str | None = None) -> RunConfig:
    rows_line = f'data.path = "{rows}"\ndata.source = "files"' if rows else 'data.source = "addition"'
    chosen = f'roles.teacher.model = "{model if teacher is None else teacher}"'
    return load(
        f'run.steps = 1\nmodel.path = "{model}"\n{rows_line}\nreward.name = "addition"\nalgorithm.name = "opd"\n'
        f"{chosen}\n{more}"
    )


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_only_the_teacher_s_last_message_changes_and_nothing_is_filled_in_twice(model: Path, tmp_path: Path) -> None:
    prompts = PrivilegedPrompts("deep.solution", TEMPLATE, 1000)
    metadata = {"deep": {"solution": "x {prompt}"}}
    assert prompts.example(Example("1 {privileged}?", metadata=metadata)).prompt == "1 {privileged}? (x {prompt})"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    made = prompts.example(Example(messages, metadata=metadata)).prompt
    assert made == [messages[0], {"role": "user", "content": "u (x {prompt})"}]
    begun = {"role": "assistant", "content": "<think>"}
    assert prompts.example(Example([*messages, begun], metadata=metadata)).prompt == [*made, begun]
    assert PrivilegedPrompts("answer", TEMPLATE, 9).example(Example("p", answer="42")).prompt == "p (42)"

    rows = write(tmp_path / "rows.jsonl", {"prompt": "1 + 1?", "answer": "2", "solution": "it is 2"})
    data = load_data(config(model, rows, PRIVILEGED))
    prompt = data.train.prompt(data.train.index_at(Cursor()))
    assert prompt.teacher_tokens is not None
    assert "1 + 1? (it is 2)" in data.tokenizer.decode(prompt.teacher_tokens.tolist())
    assert data.tokenizer.decode(prompt.tokens.tolist()) != data.tokenizer.decode(prompt.teacher_tokens.tolist())
    assert load_data(config(model, rows)).train.prompt(0).teacher_tokens is None


def test_a_row_without_what_the_teacher_needs_is_named(model: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a", "solution": "b"}, {"prompt": "c", "solution": " "})
    with pytest.raises(DataError, match=r'= "solution", but .*line 2 has no text .*found: answer, solution') as refused:
        load_data(config(model, rows, PRIVILEGED))
    assert refused.value.field == "roles.teacher.privileged_key"


def test_a_prompt_that_is_too_long_for_the_teacher_is_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a", "solution": "b"}, {"prompt": "c", "solution": "d" * 300})
    limit = f"{PRIVILEGED}\nroles.teacher.max_prompt_tokens = 200"
    with pytest.raises(DataError, match=r"max_prompt_tokens.*= 200, but .*line 2 has 3\d\d tokens with what only"):
        load_data(config(model, rows, limit))
    data = load_data(config(model, rows, f'{limit}\ndata.overlong = "skip"'))
    assert (len(data.train), data.skipped) == (1, 1)


def test_a_source_without_a_teacher_is_named(model: Path, tmp_path: Path) -> None:
    several = f'[[roles.teacher.models]]\nmodel = "{model}"\nsources = ["math", "code"]'
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a", "data_source": "math"}, {"prompt": "b", "data_source": "law"})
    with pytest.raises(DataError, match=r'list math, code, but .*line 2 is of the source "law"') as refused:
        load_data(config(model, rows, several, teacher=""))
    assert refused.value.field == "roles.teacher.models"
    both = config(model, rows, several)
    assert len(load_data(both).train) == 2
    assert both.roles.teacher.settings == {
        "roles.teacher.model": str(model),
        "roles.teacher.models.0.model": str(model),
    }
    with pytest.raises(DataError, match="is of no source"):
        load_data(config(model, write(tmp_path / "other.jsonl", {"prompt": "a"}), several, teacher=""))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            f'{DISTILLED}\nalgorithm.distill_top_k = 4\nalgorithm.distill_candidates = "union"'
            '\nrollout.engine = "sglang_external"',
            'rollout.engine is "sglang_external", which doesn\'t say what it finds likeliest: use "transformers" or "s',
        ),
        (
            f'{DISTILLED}\nalgorithm.distill_top_k = 4\nalgorithm.distill_candidates = "student"'
            '\nroles.teacher.engine = "sglang"',
            'roles.teacher.engine is "sglang", which takes one list of tokens for all places of an answer, .*; or use '
            'distill_candidates = "teacher"',
        ),
        (
            f'{DISTILLED}\nalgorithm.distill_top_k = 4\nalgorithm.distill_candidates = "union"\n{PRIVILEGED}'
            '\nroles.teacher.placement = "trainer"',
            'rows with other prompts than the student\'s: set roles.teacher.placement = "service"',
        ),
        ("roles.teacher.refresh_every = 5", 'roles.teacher.refresh_every is 5, but .*placement is "service"'),
        (
            'algorithm.kl_coef = 0.1\nroles.reference.refresh_every = 5\nroles.reference.model = "other"',
            'refresh_every is 5, but roles.reference.model is "other"',
        ),
        ('roles.teacher.privileged_key = "a"\nroles.teacher.privileged_template = "{prompt}"', "has no {privileged}"),
        ("roles.reference.refresh_every = 5", "roles.reference.refresh_every is 5, but the run has no reference"),
        ("roles.teacher.max_prompt_tokens = 5", "without privileged_key the teacher sees the student's prompts"),
        (
            'roles.teacher.models = [{model = "a", sources = ["x"]}, {model = "b", sources = ["x"]}]',
            'list the source "x" twice',
        ),
        (
            f'{DISTILLED}\nroles.teacher.placement = "trainer"\nroles.teacher.refresh_every = 5\n'
            'roles.teacher.models = [{model = "a", sources = ["x"]}]',
            "refresh_every is 5, but roles.teacher.models are several teachers",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(model: Path, more: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(model, more=more)
