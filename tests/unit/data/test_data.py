"""Prompt data: sources, templating against transformers, cursors, and every way in which data can be wrong."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from relaxd.config import RunConfig
from relaxd.data.dataset import Cursor, PromptDataset, load_data
from relaxd.data.examples import Example
from relaxd.data.prompt_files import open_rows
from relaxd.data.sources.addition_source import addition
from relaxd.data.sources.prompt_columns import Columns, Examples
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from tests.kit.tokenizer import CHATML, write_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def config(model: Path, **data: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"steps": 2},
            "model": {"path": str(model)},
            "data": {"source": "addition"} | data,
            "reward": {"name": "addition"},
        }
    )


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_addition_is_complete_right_and_keeps_held_out_sums_unseen() -> None:
    train, held_out = addition(2)
    numbers = {tuple(int(w.strip("?")) for w in e.text.split() if w.strip("?").isdigit()) for e in train + held_out}
    assert all(10 <= a <= 99 and 10 <= b <= 99 for a, b in numbers)
    assert len(numbers) == len(train) + len(held_out)
    assert len(held_out) == 1000
    assert 6000 < len(train) <= 7100
    asked = {e.text.replace("?", "") for e in train}
    for example in held_out:
        words = example.text.replace("?", "").split()
        a, b = words[2], words[4]
        assert int(example.answer) == int(a) + int(b)
        assert f"What is {a} + {b} Answer with the number only." not in asked
        assert f"What is {b} + {a} Answer with the number only." not in asked
    assert addition(2) == (train, held_out)


@pytest.mark.parametrize("digits", [1, 3, 6])
def test_addition_of_other_sizes(digits: int) -> None:
    train, held_out = addition(digits)
    assert train
    assert held_out
    assert len(train) + len(held_out) <= 65_536


def test_tokens_are_what_transformers_makes_of_the_same_messages(model_folder: Path) -> None:
    real = Path(os.environ.get("RELAXD_TEST_MODEL", "/nonexistent"))
    folder = real if real.is_dir() else model_folder
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    examples = [
        Example("What is 1 + 2?"),
        Example([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve → ünï <b>&amp;"}]),
    ]
    for chat_template in (None, CHATML):
        ours = PromptTokenizer(folder, chat_template).encode(examples)
        for example, tokens in zip(examples, ours, strict=True):
            expected = reference.apply_chat_template(
                example.messages, chat_template=chat_template, add_generation_prompt=True, return_dict=False
            )
            assert tokens.dtype == np.int32
            assert tokens.tolist() == list(expected)


def byte_level(tokenizer: Tokenizer) -> None:
    pieces = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])


def normalised(tokenizer: Tokenizer) -> None:
    byte_level(tokenizer)
    tokenizer.normalizer = normalizers.NFC()


def compatible(tokenizer: Tokenizer) -> None:
    byte_level(tokenizer)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])


def begun(tokenizer: Tokenizer) -> None:
    byte_level(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 256)])


def spaced(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def replaced(tokenizer: Tokenizer) -> None:
    """As Llama 2's: a space is three bytes, each of which may be a token."""
    byte_tokens = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer.model = models.BPE(vocab=byte_tokens, merges=[], byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None


@pytest.mark.parametrize(
    ("kind", "spared"),
    [(byte_level, 7), (normalised, 4), (begun, 4), (compatible, 0), (spaced, 0), (replaced, 0)],
)
def test_only_prompts_that_may_be_too_long_are_tokenised(tmp_path: Path, kind: Any, spared: int) -> None:
    changed = Tokenizer.from_file(str(write_tokenizer(tmp_path) / "tokenizer.json"))
    kind(changed)
    changed.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()  # no template, so that the text is the prompt
    tokenizer = PromptTokenizer(tmp_path)
    texts = ["a", "a b c", " x y", "1" * 12, "é" * 6, "\U0001d160" * 3, "\ufdfa" * 3, "<|im_end|>" * 4, "b" * 40]
    examples = [Example(text) for text in texts]
    lengths = list(map(len, tokenizer.encode(examples)))
    for limit in range(70):
        expected = {index: length for index, length in enumerate(lengths) if length > limit}
        assert tokenizer.longer(examples, limit) == expected
    assert sum(not tokenizer._may_exceed(text, 12) for text in texts) == spared


def test_a_prompt_of_several_messages_keeps_them(model_folder: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    examples = [Example(chat), Example("hi")]
    dataset = PromptDataset(examples, PromptTokenizer(model_folder, CHATML), shuffle=False, seed=0)
    common = {"text": "hi", "answer": "", "metadata": {}}
    assert [dataset.prompt(index).to_json() for index in (0, 1)] == [
        {**common, "messages": chat, "index": 0},
        {**common, "index": 1},
    ]


def test_a_model_without_template_gets_the_plain_prompt(model_folder: Path, tmp_path: Path) -> None:
    shutil.copy(model_folder / "tokenizer.json", tmp_path)
    tokenizer = PromptTokenizer(tmp_path)
    (tokens,) = tokenizer.encode([Example("1 + 2 =")])
    assert tokenizer.decode(tokens.tolist()) == "1 + 2 ="
    with pytest.raises(DataError, match=r"is not set, .* the prompt of x line 1 needs: it is a list of chat messages"):
        tokenizer.encode([Example([{"role": "user", "content": "hi"}], place="x line 1")])


def test_one_tokenizer_serves_all_runs_until_its_file_changes(tmp_path: Path) -> None:
    """Not for speed: what tokenizers keeps for a tokenizer is never freed, and a coordinator starts many runs."""
    folder = write_tokenizer(tmp_path)
    first = PromptTokenizer(folder)
    assert PromptTokenizer(folder)._tokenizer is first._tokenizer
    (before,) = first.encode([Example("hi")])
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|begin_of_it|>"))
    (after,) = PromptTokenizer(folder).encode([Example("hi")])
    assert len(after) > len(before), "the template's <|im_start|> is no longer one token"


class PlainTokenizer(PromptTokenizer):
    """Makes one token of anything."""

    def __init__(self) -> None: ...

    def encode(self, examples):
        return [np.asarray([1], dtype=np.int32) for _ in examples]


@settings(deadline=None)
@given(count=st.integers(1, 9), stops=st.lists(st.integers(1, 7), min_size=1, max_size=6), seed=st.integers(0, 3))
def test_going_on_from_a_cursor_gives_the_same_sequence(count: int, stops: list[int], seed: int) -> None:
    def read(cursor: Cursor, many: int) -> tuple[list[int], Cursor]:
        dataset = PromptDataset([Example(str(i)) for i in range(count)], PlainTokenizer(), shuffle=True, seed=seed)
        indices = []
        for _ in range(many):
            indices.append(dataset.index_at(cursor))
            cursor = dataset.after(cursor)
        return indices, cursor

    whole, end = read(Cursor(), sum(stops))
    cursor, parts = Cursor(), []
    for many in stops:  # a new data set each time: a restarted coordinator has only the cursor
        indices, cursor = read(Cursor.from_json(cursor.to_json()), many)
        parts += indices
    assert (parts, cursor) == (whole, end)
    for epoch in range(sum(stops) // count):
        assert sorted(whole[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_jsonl_keeps_answer_and_metadata(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = write(tmp_path / "d.jsonl", {"prompt": "p", "answer": 3, "level": "hard"}, "", {"prompt": chat})
    first, second = Examples(open_rows(path, "data.path"), Columns())
    assert (first.prompt, first.answer, first.metadata) == ("p", "3", {"level": "hard"})
    assert (second.messages, second.text, second.place) == (chat, "c", f"{path} line 3")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a"', "not JSON"),
        ('["a"]', "a JSON object such as"),
        ('{"promt": "a"}', r'"prompt" is missing \(found: promt\)'),
        ('{"prompt": ""}', '"prompt" is empty'),
        ('{"prompt": 3}', "must be text or a list of chat messages, not a number"),
        ('{"prompt": []}', "must be text or a list of chat messages"),
        ('{"prompt": [{"role": "user"}]}', r'"prompt"\[0\].content is null or missing'),
        ('{"prompt": "a", "answer": [["b"]]}', '"answer" must be text, a number or a list of them, not a list with'),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, model_folder: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "fine"}, line, {"prompt": "fine too"})
    with pytest.raises(DataError, match=rf"data\.path: 1 of 3 rows are wrong: .*line 2: .*{complaint}"):
        load_data(config(model_folder, source="jsonl", path=path))


def test_half_a_character_is_named(tmp_path: Path, model_folder: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "fine"}, '{"prompt": "so \\ud83d"}')
    with pytest.raises(DataError, match=r"line 2 has '\\ud83d', half of a character, which can't be tokenised"):
        load_data(config(model_folder, source="jsonl", path=path))


def test_unreadable_files_are_named(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: can't read .*missing\.jsonl: No such file"):
        load_data(config(model_folder, source="jsonl", path=tmp_path / "missing.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        load_data(config(model_folder, source="jsonl", path=tmp_path / "empty.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe4"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        load_data(config(model_folder, source="jsonl", path=tmp_path / "latin.jsonl"))
    many = write(tmp_path / "many.jsonl", *["x"] * 9, {"prompt": "fine"})
    with pytest.raises(DataError, match=r"9 of 10 rows are wrong: .*line 5: .*; and 4 more"):
        load_data(config(model_folder, source="jsonl", path=many))
    every = write(tmp_path / "every.jsonl", *["x"] * 9)
    with pytest.raises(DataError, match=r"all 9 rows that were read are wrong; the first: .*line 1: [^;]*$"):
        load_data(config(model_folder, source="jsonl", path=every))


def test_overlong_prompts_are_refused_by_name_or_skipped_and_counted(tmp_path: Path, model_folder: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "short"}, {"prompt": "long " * 50})
    strict = config(model_folder, source="jsonl", path=path, max_prompt_tokens=40)
    with pytest.raises(DataError, match=r"data\.path: .*line 2 has \d+ tokens, more than data\.max_prompt_tokens = 40"):
        load_data(strict)
    skipping = config(model_folder, source="jsonl", path=path, max_prompt_tokens=40, overlong="skip")
    loaded = load_data(skipping)
    assert (len(loaded.train), loaded.skipped, loaded.evaluation) == (1, 1, {})
    with pytest.raises(DataError, match="every prompt is longer"):
        load_data(config(model_folder, source="jsonl", path=path, max_prompt_tokens=3, overlong="skip"))


def test_the_addition_source_has_something_held_out(model_folder: Path) -> None:
    loaded = load_data(config(model_folder))
    prompt = loaded.evaluation["held_out"].prompt(0)
    assert prompt.to_json()["text"].startswith("What is ")
    assert prompt.tokens.dtype == np.int32


def test_model_folders(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXD_MODELS", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny") == (tmp_path / "tiny").resolve()
    assert resolve_model(str(model_folder)) == model_folder.resolve()
    with pytest.raises(DataError, match=r"model\.path: 'huge' is neither a folder, nor a fetched model .*has tiny"):
        resolve_model("huge")
    with pytest.raises(DataError, match=r"roles\.teacher\.model: 'smollm2-135m' is not fetched yet: `relaxd "):
        resolve_model("smollm2-135m", setting="roles.teacher.model")
    for slip, meant in {"smollm2-135n": "smollm2-135m", "tinny": "tiny"}.items():
        with pytest.raises(DataError, match=f"did you mean '{meant}'"):
            resolve_model(slip)
    with pytest.raises(DataError, match=r"model\.path: the model folder .*tiny has no tokenizer"):
        load_data(config(tmp_path / "tiny"))
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_data(config(tmp_path / "tiny"))


def test_broken_templates_are_named(model_folder: Path) -> None:
    with pytest.raises(DataError, match=r"model\.chat_template: the chat template is invalid in line 2"):
        PromptTokenizer(model_folder, "fine\n{% if %}")
    refusing = PromptTokenizer(model_folder, "{{ raise_exception('no system turn') }}")
    with pytest.raises(DataError, match="line 4: the chat template can't render this prompt: no system turn"):
        refusing.encode([Example("x", place="line 4")])


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_template_and_row_are_named(file: str, tmp_path: Path, model_folder: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    refusing = "{{ messages[-1].content if messages[0].role == 'user' else raise_exception('no system') }}"
    if file == "chat_template.jinja":
        (folder / file).write_text(refusing)
    else:
        described = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(described | {"chat_template": refusing}))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "d.jsonl", {"prompt": turns})
    with pytest.raises(DataError) as caught:
        load_data(config(folder, source="jsonl", path=str(path)))
    assert caught.value.field == "model.path"
    problem = f"with the prompt of {path} line 1: the chat template of {file} can't render this prompt: no system"
    assert caught.value.message == problem


@given(
    count=st.integers(1, 5),
    visited=st.integers(0, 12),
    later=st.integers(0, 6),
    data=st.data(),
)
@settings(deadline=None)
def test_a_cursor_that_is_resumed_visits_what_was_open_and_nothing_that_is_done(
    count: int, visited: int, later: int, data: st.DataObject
) -> None:
    dataset = PromptDataset([Example(str(i)) for i in range(count)], PlainTokenizer(), shuffle=True, seed=0)
    places = [divmod(number, count) for number in range(visited + later + 20)]
    # The cursor was at `visited` when it was last seen; some before it were open, some from there on have been trained.
    open_then = {place for place in places[:visited] if data.draw(st.booleans())}
    trained = {place for place in (*open_then, *places[visited : visited + later]) if data.draw(st.booleans())}
    cursor = dataset.resumed(Cursor(*divmod(visited, count)), open_then, trained)
    found = []
    for _ in range(20):
        found.append(cursor.place)
        cursor = Cursor.from_json(dataset.after(cursor).to_json())
    expected = sorted(open_then - trained) + [place for place in places[visited:] if place not in trained]
    assert found == expected[:20]
