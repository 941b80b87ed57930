"""The table of columns, and what follows from it."""

import importlib.util
from pathlib import Path

from relaxd.board import COLUMNS, STAGES, trained_columns

ROOT = Path(__file__).parents[3]


def test_docs_columns_is_written_from_the_table() -> None:
    spec = importlib.util.spec_from_file_location("columns_page", ROOT / "docs" / "columns.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run: .venv/bin/python docs/columns.py"


def test_each_column_has_a_writer_that_is_a_stage_or_publishes() -> None:
    assert {column.writer for column in COLUMNS.values() if not column.optional} <= {"publish", *STAGES}


def test_stages_write_what_the_table_says_and_the_trainer_takes_in_all_but_what_it_marks() -> None:
    written = [name for stage in STAGES.values() for name in stage.writes]
    assert len(written) == len(set(written))
    assert set(written) == {c.name for c in COLUMNS.values() if c.writer != "publish" and not c.optional}
    assert STAGES["train"].needs == trained_columns()
    assert set(COLUMNS) - set(trained_columns()) == {
        *("routed_experts", "continued", "off_policy_tokens", "student_candidates"),
        *("teacher_prompt_tokens", "ref_logprobs", "teacher_logprobs", "candidates", "teacher_candidate_logprobs"),
        *("reference_weights", "old_logprobs", "values", "critic_state", "returns"),
        *("response_messages", "environment_reward", "environment_info", "turns", "environment_seconds"),
        *("outside_generation_seconds", "tool_calls", "tool_errors", "player", "sequence_reward"),
        *("message_returns", "weight_receipts"),
        *("prompt_media", "media_contents", "sequence_media", "sequence_contents"),
    }
