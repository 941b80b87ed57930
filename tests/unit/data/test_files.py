"""Prompts in files of every format: columns, parts, folders, mixtures, large files, and what can be wrong with them."""

import json
from collections import Counter
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from relaxd.config import RunConfig
from relaxd.config.data import CurriculumConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.data import prompt_checks
from relaxd.data.curriculum.prompt_record import PromptRecord
from relaxd.data.curriculum.run_curriculum import Visits
from relaxd.data.dataset import Cursor, RunData, load_data
from relaxd.data.prompt_files import open_rows
from relaxd.data.sources.prompt_columns import Columns, Examples
from relaxd.data.sources.run_sources import Share, epoch_visits
from relaxd.models import DataError
from tests.kit.cases import each
from tests.kit.processes import run_python
from tests.kit.tokenizer import write_tokenizer

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "level": None if i % 2 else "hard"},
    }
    for i in range(300)
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def config(model: Path, **data: object) -> RunConfig:
    values = {"run": {"steps": 2}, "model": {"path": str(model)}, "reward": {"name": "math"}}
    return RunConfig.model_validate(values | {"data": {"source": "files"} | data})


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_file(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "parquet": lambda table, path: pa.parquet.write_table(table, path, row_group_size=50),
    "arrow": write_file,
    "feather": write_stream,
    "jsonl": lambda table, path: path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist())),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_of_verl_is_read_as_it_is(tmp_path, model_folder, kind):
    path = tmp_path / f"train.{kind}"
    WRITERS[kind](pa.Table.from_pylist(ROWS), path)
    data = load_data(config(model_folder, path=path, answer_key="reward_model.ground_truth", shuffle=False))
    assert len(data.train) == 300
    prompt = data.train.prompt(299)
    assert prompt.text == "What is 299 + 1?"
    assert prompt.answer == "300"
    assert prompt.metadata == {key: ROWS[299][key] for key in ("data_source", "reward_model", "extra_info")}
    assert json.loads(json.dumps(prompt.to_json()))["messages"] == ROWS[299]["prompt"]


def test_csv_columns_are_text(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('\ufeffprompt,answer,level\n"a, ""b""\nc",007,1\nd,,\n', encoding="utf-8")
    first, second = Examples(open_rows(path, "data.path"), Columns())
    assert (first.prompt, first.answer, first.metadata) == ('a, "b"\nc', "007", {"level": "1"})
    assert (second.prompt, second.answer, second.metadata) == ("d", "", {"level": ""})


def test_values_that_json_lacks(tmp_path):
    table = pa.Table.from_pylist([{"prompt": "p", "answer": Decimal("1.50"), "day": date(2024, 2, 3), "raw": b"x"}])
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r'a.parquet row 1: column "raw" has bytes, .* with data.original_key'):
        Examples(open_rows(tmp_path / "a.parquet", "data.path"), Columns())[0]
    pa.parquet.write_table(table.drop_columns("raw"), tmp_path / "b.parquet")
    example = Examples(open_rows(tmp_path / "b.parquet", "data.path"), Columns())[0]
    assert (example.answer, example.metadata) == ("1.50", {"day": "2024-02-03"})


def test_columns_with_bytes_may_be_left_out(tmp_path):
    row = {"prompt": "p", "answer": "a", "raw": b"x", "m": {"took": timedelta(seconds=3), "rate": float("nan")}}
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    examples = Examples(open_rows(tmp_path / "a.parquet", "data.path"), Columns(metadata="m"))
    assert examples[0].metadata == {"took": "0:00:03", "rate": None}
    assert [one and one.metadata for one in examples.scan()] == [examples[0].metadata]
    with pytest.raises(ValueError, match=r'"raw" must be text or a list of chat messages, not bytes'):
        Examples(open_rows(tmp_path / "a.parquet", "data.path"), Columns(prompt="raw", metadata="m"))[0]


def test_whole_pictures_that_no_prompt_can_have_are_refused(tmp_path):
    rows = [{"prompt": "<image>p", "images": [b"x" * (12 << 20)]}, {"prompt": "p", "images": None}]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = Columns(media={"image": "images"}, original="images")
    examples = Examples(open_rows(tmp_path / "a.parquet", "data.path"), columns)
    with pytest.raises(ValueError, match=r'row 1: "images" has a picture of 16777\d+ bytes as base64: at most'):
        examples[0]
    assert examples[1].metadata == {}
    near = Examples(open_rows(tmp_path / "a.parquet", "data.path"), replace(columns, original="image"))
    with pytest.raises(ValueError, match=r'"image" is missing .*; did you mean data.original_key = "images"'):
        near[0]
    assert near[1].metadata == {}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_categories_may_differ_between_the_parts_of_a_file(tmp_path, kind):
    """As pandas writes them: each part of the file has a dictionary of its own."""
    parts = [
        pa.table({"prompt": texts, "level": pa.array(levels).dictionary_encode(), "m": [{"k": 1}, {"k": 2}]})
        for texts, levels in ((["a", "b"], ["easy", "hard"]), (["c", "d"], ["new", "hard"]))
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        with pa.parquet.ParquetWriter(path, parts[0].schema) as writer:
            for part in parts:
                writer.write_table(part)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, parts[0].schema) as writer:
            for part in parts:
                writer.write_table(part)
    levels = [one.metadata["level"] for one in Examples(open_rows(path, "data.path"), Columns())]
    assert levels == ["easy", "hard", "new", "hard"]


def test_a_part_that_is_none_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    for part in ("@[0:x]", "@[0:1", "@[5]"):
        with pytest.raises(DataError, match=r'ends in no part of a file: write it as "PATH@\[START:END\]"'):
            open_rows(Path(f"{tmp_path}/a.jsonl{part}"), "data.path")


@pytest.mark.parametrize(
    ("part", "expected"), [("@[0:2]", [0, 1]), ("@[2:]", [2, 3, 4]), ("@[-2:]", [3, 4]), ("@[:1]", [0]), ("", range(5))]
)
def test_a_part_of_a_file(tmp_path, part, expected):
    path = tmp_path / "a@b.jsonl"
    path.write_text("".join(f'{{"prompt": "p{i}"}}\n\n' for i in range(5)))
    examples = Examples(open_rows(Path(f"{path}{part}"), "data.path"), Columns())
    assert [one.prompt for one in examples] == [f"p{i}" for i in expected]
    assert examples[len(examples) - 1].place == f"{path} line {2 * expected[-1] + 1}"


def test_a_folder_has_all_its_files_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n')
    (tmp_path / "deep" / "c.csv").write_text("prompt\nc1\nc2\n")
    (tmp_path / "readme.md").write_text("no data")
    pa.parquet.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    examples = Examples(open_rows(tmp_path, "data.path"), Columns())
    assert [one.prompt for one in examples] == ["a", "b", "c1", "c2"]
    assert [one.place for one in examples][-1] == f"{tmp_path}/deep/c.csv row 2"
    assert len(open_rows(Path(f"{tmp_path}@[1:3]"), "data.path")) == 2


# --- columns ------------------------------------------------------------------------------------------------------


@each(
    ("record", "columns", "expected"),
    [
        ({"q": "a", "a": 3}, {"prompt": "q", "answer": "a"}, ("a", "3", {})),
        ({"x": {"q": "a"}, "y": 1}, {"prompt": "x.q"}, ("a", "", {"x": {"q": "a"}, "y": 1})),
        ({"x.q": "a", "answer": None}, {"prompt": "x.q"}, ("a", "", {})),
        ({"prompt": "a", "m": {"k": 1}, "n": 2}, {"metadata": "m"}, ("a", "", {"k": 1})),
        ({"prompt": "a", "m": '{"k": 1}'}, {"metadata": "m"}, ("a", "", {"k": 1})),
        ({"prompt": "a", "m": None}, {"metadata": "m"}, ("a", "", {})),
        ({"prompt": "a"}, {"source": "mine"}, ("a", "", {"data_source": "mine"})),
        ({"prompt": "a", "answer": ["é", 2]}, {}, ("a", '["é", "2"]', {})),
        ({"prompt": "a", "answer": [2]}, {}, ("a", "2", {})),
        ({"prompt": "a", "r": {"t": ["b", "c"]}}, {"answer": "r.t"}, ("a", '["b", "c"]', {"r": {"t": ["b", "c"]}})),
        ({"prompt": "a", "data_source": "own"}, {"source": "mine"}, ("a", "", {"data_source": "own"})),
        (
            {"prompt": "a"},
            {"system_prompt": "Be brief."},
            ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}], "", {}),
        ),
        (
            {"prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "a", "name": None}]},
            {"system_prompt": "Be brief."},
            ([{"role": "system", "content": "Own."}, {"role": "user", "content": "a"}], "", {}),
        ),
    ],
)
def test_columns(record, columns, expected):
    example = Columns(**columns).example(record, "here")
    assert (example.prompt, example.answer, example.metadata) == expected


@each(
    ("record", "columns", "message"),
    [
        ({"promt": "a"}, {}, r'"prompt" is missing \(found: promt\); did you mean data.prompt_key = "promt"\?'),
        ({"zzz": "a"}, {}, r'"prompt" is missing \(found: zzz\); data.prompt_key names another column'),
        (
            {"prompt": "a", "reward_model": {"ground_truth": "1"}},
            {"answer": "ground_truth"},
            'did you mean data.answer_key = "reward_model.ground_truth"',
        ),
        (
            {"prompt": "a", "reward_model": {"ground_truth": "1"}},
            {"answer": "reward_model.ground_thruth"},
            'did you mean data.answer_key = "reward_model.ground_truth"',
        ),
        (
            {"prompt": "a", "answer": {"style": "rule", "ground_truth": "1"}},
            {},
            '"answer" is an object with style, ground_truth: .* data.answer_key = "answer.style"',
        ),
        (
            {"prompt": "a", "answer": [{}]},
            {},
            '"answer" must be text, a number or a list of them, not a list with someth',
        ),
        ({"prompt": "a", "answer": []}, {}, '"answer" must be .* not a list without entries'),
        (
            {"prompt": "a", "reward_model": {"ground_truth": {"target": ["b", "c"]}}},
            {"answer": "reward_model.ground_truth"},
            'data.answer_key = "reward_model.ground_truth.target"',
        ),
        ({"prompt": "a", "m": [1]}, {"metadata": "m"}, '"m" must be an object, for data.metadata_key, not a list'),
        ({"prompt": "a", "m": "{"}, {"metadata": "m"}, '"m" is text that is not JSON'),
        ({"prompt": "a"}, {"metadata": "meta"}, '"meta" is missing'),
        (
            {"q": [{"role": "user", "content": [{"type": "image"}]}]},
            {"prompt": "q"},
            r'"q"\[0\].content\[0\] has no item: add it, or name its column with data.media_keys = {image = "..."}',
        ),
        ({"q": None}, {"prompt": "q"}, '"q" must be text or a list of chat messages, not null'),
    ],
)
def test_wrong_columns_are_named(record, columns, message):
    with pytest.raises(ValueError, match=message):
        Columns(**columns).example(record, "here")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 and nothing more", r"can't read .*a\.parquet: .*(magic|footer|Parquet)"),
        ("a.parquet", b"", r"can't read .*a\.parquet"),
        ("a.arrow", b"ARROW1 and nothing more", r"can't read .*a\.arrow"),
        ("a.arrow", b"nothing", r"can't read .*a\.arrow"),
        ("a.csv", b'prompt,answer\na,b,c\n"', r"can't read .*a\.csv: CSV parse error"),
        ("a.csv", b"", r"a\.csv is empty"),
        ("a.csv", b"prompt,answer\n", r"a\.csv is empty"),
        ("a.csv", b"prompt\n\xff\n", r"can't read .*a\.csv: .*[Uu][Tt][Ff]-?8"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.path: .*{message}"):
        open_rows(tmp_path / name, "data.path")


def test_mixed_types_are_named_by_their_row(tmp_path, model_folder):
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": {"x": 1}}\n{"prompt": 3}\n'
    )
    with pytest.raises(DataError, match=r"2 of 3 rows are wrong: .*line 2: .*an object with x.*line 3: .*not a number"):
        load_data(config(model_folder, path=tmp_path / "a.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the folder .*empty has no file that ends in \.jsonl"):
        open_rows(tmp_path / "empty", "data.path")
    with pytest.raises(DataError, match=r"a\.jsonl@\[5:\] is empty"):
        open_rows(Path(f"{tmp_path}/a.jsonl@[5:]"), "data.path")


@each(
    ("text", "message"),
    [
        ('source = "files"', 'data.path is missing: source = "files" needs'),
        ('source = "files"\npath = "a"\n[[data.sources]]\npath = "b"', "give one of them"),
        ('source = "addition"\n[[data.sources]]\npath = "b"', 'data.sources are for source = "files"'),
        (
            'source = "files"\n[[data.sources]]\npath = "b"\nweight = 0',
            "sources.0.weight = 0: must be more than 0",
        ),
        ('source = "files"\n[[data.sources]]\nname = "b"', "data.sources.0.path is missing"),
    ],
)
def test_wrong_configurations_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        load(f'run.steps = 1\nmodel.path = "m"\nreward.name = "math"\n[data]\n{text}')


# --- templates ----------------------------------------------------------------------------------------------------


def test_arguments_reach_the_chat_template(tmp_path, model_folder):
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi"}\n')
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '!' if enable_thinking else '.' }}"
    texts = {}
    for thinking in (True, False):
        one = config(model_folder, path=tmp_path / "a.jsonl", system_prompt="S")
        arguments = {"chat_template": template, "chat_template_arguments": {"enable_thinking": thinking}}
        one = one.model_copy(update={"model": one.model.model_copy(update=arguments)})
        data = load_data(one)
        texts[thinking] = data.tokenizer.decode(data.train.prompt(0).tokens.tolist())
    assert texts == {True: "Shi!", False: "Shi."}


# --- mixtures -----------------------------------------------------------------------------------------------------


def test_an_epoch_visits_each_source_by_its_weight():
    shares = [Share(10), Share(4, 2.0), Share(8, 0.5), Share(3, 1.5)]
    epochs = [Counter(epoch_visits(shares, epoch, seed=0).tolist()) for epoch in range(2)]
    assert all(sum(epoch.values()) == 10 + 8 + 4 + 4 for epoch in epochs)
    both = epochs[0] + epochs[1]
    assert [both[i] for i in range(10)] == [2] * 10
    assert [both[i] for i in range(10, 14)] == [4] * 4
    assert [both[i] for i in range(14, 22)] == [1] * 8
    assert sum(both[i] for i in range(22, 25)) == 8
    assert max(both[i] for i in range(22, 25)) == 3
    np.testing.assert_array_equal(epoch_visits(shares, 1, seed=0), epoch_visits(shares, 1, seed=0))


def test_sources_are_mixed_and_named(tmp_path, model_folder):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "a{i}"}}\n' for i in range(6)))
    (tmp_path / "b.csv").write_text("q,solution\n" + "".join(f"b{i},{i}\n" for i in range(3)))
    sources = [
        {"path": tmp_path / "a.jsonl", "name": "a", "weight": 0.5},
        {"path": tmp_path / "b.csv", "name": "b", "weight": 2, "prompt_key": "q", "answer_key": "solution"},
    ]
    sources[1] |= {"max_new_tokens": 9, "top_p": 0.5}
    data = load_data(config(model_folder, sources=sources))
    assert len(data.train) == 3 + 6
    cursor, seen = Cursor(), Counter()
    for _ in range(2 * len(data.train)):
        prompt = data.train.prompt(data.train.index_at(cursor))
        seen[prompt.metadata["data_source"], prompt.text, prompt.answer] += 1
        own = {"sampling": {"max_new_tokens": 9, "top_p": 0.5}} if prompt.text.startswith("b") else {}
        assert {name: value for name, value in prompt.to_json().items() if name == "sampling"} == own
        cursor = data.train.after(cursor)
    assert seen == {**{("a", f"a{i}", ""): 1 for i in range(6)}, **{("b", f"b{i}", str(i)): 4 for i in range(3)}}
    wrong = [{**sources[1], "answer_key": "solutions"}]
    with pytest.raises(DataError, match=r"data\.sources\.0\.path: .*did you mean data\.answer_key = .solution"):
        load_data(config(model_folder, sources=wrong))


# --- large files --------------------------------------------------------------------------------------------------


def visits_of(data: RunData) -> Visits:
    return Visits(data.train, PromptRecord(data.train.prompts, CurriculumConfig()), 0)


def test_long_prompts_of_large_files_are_left_out_when_their_turn_comes(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(prompt_checks, "CHECKED", 4)
    lines = [json.dumps({"prompt": "long " * 100 if i in (1, 5, 6) else f"p{i}"}) for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    loaded = load_data(config(model_folder, path=tmp_path / "a.jsonl", max_prompt_tokens=40, overlong="skip"))
    assert len(loaded.train) == 8
    cursor, seen, visits = Cursor(), [], visits_of(loaded)
    for _ in range(10):
        visit = visits.next(cursor)
        seen.append(visit.prompt.text)
        cursor = loaded.train.after(visit.cursor)
    assert sorted(seen[:5]) == sorted(seen[5:]) == ["p0", "p2", "p3", "p4", "p7"]
    (tmp_path / "b.jsonl").write_text("\n".join(lines[:6]))
    strict = load_data(config(model_folder, path=tmp_path / "b.jsonl", max_prompt_tokens=40, shuffle=False))
    with pytest.raises(DataError, match=r"prompt 1 has \d+ tokens, more than data\.max_prompt_tokens = 40"):
        visits_of(strict).next(Cursor(0, 1))
    (tmp_path / "a.jsonl").write_text("\n".join(lines).replace('{"prompt": "p3"}', '{"prompt": 3333}'))
    broken = load_data(config(model_folder, path=tmp_path / "a.jsonl", max_prompt_tokens=40, overlong="skip"))
    with pytest.raises(DataError, match=r"line 4: \"prompt\" must be text"):
        broken.train.prompt(3)


MILLION = """
import re, sys, time
begun = time.process_time()
from relaxd.config import RunConfig
from relaxd.data.curriculum.run_curriculum import Curriculum
from relaxd.data.dataset import Cursor, load_data
config = RunConfig.model_validate({"run": {"steps": 1}, "model": {"path": sys.argv[1]}, "reward": {"name": "math"},
    "data": {"source": "files", "path": sys.argv[2], "curriculum": {"max_pass_rate": 0.9, "replay": 0.1}}})
data = load_data(config)
curriculum, cursor = Curriculum(config, data.train), Cursor()
for _ in range(200):
    visit = curriculum.visits.next(cursor)
    curriculum.record.observe([{"index": visit.prompt.index, "reward": 0.5}])
    cursor = data.train.after(visit.cursor)
peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]  # ru_maxrss has the parent's, too
print(len(data.train), time.process_time() - begun, int(peak) // 1024)
"""


def test_a_first_look_finds_wrong_rows_and_leaves_the_rest_to_the_next(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr("relaxd.data.dataset.FIRST_LOOK", 10)
    path, rows = tmp_path / "rows.jsonl", [{"prompt": "What is 1 + 1?", "answer": "2"} for _ in range(40)]
    read: list[int] = []
    of_row = Examples.__getitem__
    monkeypatch.setattr(Examples, "__getitem__", lambda self, index: read.append(index) or of_row(self, index))
    rows[4] = {"question": "?"}  # which is among every fourth
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = config(model_folder, path=str(path), deduplicate=True)
    with pytest.raises(DataError, match="line 5"):
        load_data(given, first_look=True)
    rows[4], rows[5] = rows[5], rows[4]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read.clear()
    assert load_data(given, first_look=True).train.prompts == 40  # repeats are left in
    assert read == list(range(0, 40, 4))
    with pytest.raises(DataError, match="line 6"):
        load_data(config(model_folder, path=str(path)))


@pytest.mark.night
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_million_prompts_start_soon_and_stay_on_disk(tmp_path, model_folder, kind):
    path = tmp_path / f"million.{kind}"
    text = "What is the sum of all the numbers that are in this long list of numbers, whose number is "
    table = pa.table({"prompt": [f"{text}{i}? {text}" for i in range(1_000_000)], "answer": pa.array(range(1_000_000))})
    WRITERS[kind](table, path) if kind == "jsonl" else pa.parquet.write_table(table, path)
    done = run_python("-c", MILLION, str(model_folder), str(path))
    assert done.returncode == 0, done.stderr
    prompts, seconds, mebibytes = map(float, done.stdout.split())
    assert prompts == 1_000_000
    assert seconds < 10  # of both cores; about half of it on the clock
    assert mebibytes < 300
