"""The vocabularies of a run's models are compared."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from relaxd.cli.preparing.config_command import check
from relaxd.config import RunConfig
from relaxd.config.load_toml import load
from relaxd.models import DataError
from relaxd.models.vocabulary import check_vocabularies, vocabulary_problem

WORDS = ["<end>", "one", "two", "three"]


def make(folder: Path, words: list[str], vocab_size: int = 64, added: tuple[str, ...] = (), heads: int = 4) -> Path:
    """A model folder without weights; without a tokenizer if there are no words."""
    folder.mkdir()
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 2}
    sizes |= {"hidden_size": 24, "intermediate_size": 24, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    if words:
        tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<end>"))
        tokenizer.add_tokens([AddedToken(word) for word in added])
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def config(student: Path, teacher: Path, more: str = "") -> RunConfig:
    return load(
        f"""
run.steps = 1
model.path = "{student}"
data.source = "addition"
reward.name = "addition"
algorithm.name = "opd"
roles.teacher.model = "{teacher}"
{more}
"""
    )


def test_token_ids_must_mean_the_same(tmp_path: Path) -> None:
    student = make(tmp_path / "student", WORDS)
    larger = make(tmp_path / "larger", WORDS, vocab_size=128)  # output layers are padded to different sizes
    assert vocabulary_problem(student, larger) == ""
    check_vocabularies(config(student, larger), "teacher")
    swapped = make(tmp_path / "swapped", ["<end>", "two", "one", "three"])
    assert vocabulary_problem(student, swapped) == (
        "2 of 4 tokens differ: token 1 is 'two' and not 'one', token 2 is 'one' and not 'two'"
    )
    more = make(tmp_path / "more", WORDS, added=("<think>",))
    assert vocabulary_problem(student, more) == "1 of 4 tokens differ: token 4 is '<think>' and not missing"
    with pytest.raises(DataError) as refused:
        check_vocabularies(config(student, swapped), "teacher")
    assert refused.value.field == "roles.teacher.model"
    assert f"= '{swapped}' has another vocabulary than model.path = '{student}': 2 of 4" in refused.value.message


def test_without_tokenizers_only_sizes_can_be_compared(tmp_path: Path) -> None:
    student, same = make(tmp_path / "student", []), make(tmp_path / "same", [])
    assert vocabulary_problem(student, same) == ""
    other = make(tmp_path / "other", [], vocab_size=65)
    assert vocabulary_problem(student, other) == "vocab_size is 65, not 64"
    named = make(tmp_path / "named", WORDS)
    assert vocabulary_problem(student, named) == f"{student} has no tokenizer.json to compare"


def test_the_check_of_a_configuration_reads_the_teacher(tmp_path: Path) -> None:
    student, teacher = make(tmp_path / "student", WORDS), make(tmp_path / "teacher", WORDS, heads=6)
    swapped = make(tmp_path / "swapped", WORDS[::-1])

    def problems(teacher: Path | str, more: str = "") -> list[str]:
        found = check(config(student, Path(teacher), more), call_reward=False)
        return [str(one) for one in found if "roles." in str(one)]

    assert problems(teacher) == []
    (found,) = problems(swapped)
    assert found.startswith(f"roles.teacher.model = '{swapped}' has another vocabulary than model.path = '{student}'")
    (found,) = problems("nowhere")
    assert found.startswith("roles.teacher.model")
    assert "'nowhere' is neither a folder" in found
    assert problems(teacher, "roles.teacher.tensor_parallel = 4\nroles.teacher.micro_batch_tokens = 8") == [
        "roles.teacher.micro_batch_tokens = 8 is too small for one sample: "
        "data.max_prompt_tokens + rollout.max_new_tokens = 1280",
        "roles.teacher.tensor_parallel is 4: it must divide the model's 6 query heads; sizes that do: 1, 2, 3",
    ]
