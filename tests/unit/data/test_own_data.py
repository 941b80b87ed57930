"""Tools, prompt functions, sources of one's own, data sets of the hub, and prompts that are there twice."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from relaxd.cli.execute import with_absolute_paths
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.data.dataset import load_data
from relaxd.data.duplicates import keys_of, normalised, overlap, repeats
from relaxd.data.examples import Example
from relaxd.data.prompt_files import open_rows
from relaxd.data.sources.prompt_columns import Columns, Examples
from relaxd.models import DataError
from tests.kit.cases import each
from tests.kit.processes import run_python
from tests.kit.tokenizer import CHATML, write_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = "{% if tools %}TOOLS {{ tools | tojson }} {% endif %}" + CHATML


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def config(model: Path, template: str = CHATML, eval: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    values = {
        "run": {"steps": 2},
        "model": {"path": str(model), "chat_template": template},
        "reward": {"name": "math"},
        "eval": eval or {},
    }
    return RunConfig.model_validate(values | {"data": {"source": "files", "shuffle": False} | data})


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["objects", "text", "parquet"])
def test_tools_reach_the_chat_template(tmp_path: Path, model_folder: Path, kind: str) -> None:
    tools = json.dumps([TOOL]) if kind == "text" else [TOOL]
    rows = [{"prompt": "a", "tools": tools}, {"prompt": "b", "tools": None}]
    path = write(tmp_path / "d.jsonl", *rows)
    if kind == "parquet":
        rows[0]["tools"] = [{"type": "function", "function": {"name": "add", "strict": True}}]
        rows[1]["tools"] = [{"type": "other", "more": 1}]  # so that the first has a null there
        path = tmp_path / "d.parquet"
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    data = load_data(config(model_folder, WITH_TOOLS, path=path, tools_key="tools"))
    texts = [data.tokenizer.render(data.train._examples[number]) for number in range(2)]
    assert data.train.prompt(0).to_json()["tools"] == (rows[0]["tools"] if kind == "parquet" else [TOOL])
    assert ("tools" in data.train.prompt(1).to_json()) == (kind == "parquet")
    assert texts[0].startswith("TOOLS " + json.dumps(rows[0]["tools"] if kind == "parquet" else [TOOL]))
    assert ("TOOLS" in texts[1]) == (kind == "parquet")


def test_tools_are_never_left_out_silently(tmp_path: Path, model_folder: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "a", "tools": [TOOL]})
    with pytest.raises(DataError, match=r"line 1: there are tools .* the chat template has no place for tools"):
        load_data(config(model_folder, CHATML, path=path, tools_key="tools"))
    with pytest.raises(
        DataError, match=r'data.tools_key = "tolls": no prompt .* has tools in such a column; did you mean "tools"\?'
    ):
        load_data(config(model_folder, WITH_TOOLS, path=path, tools_key="tolls"))
    for wrong in ("[", [1], {"name": "add"}):
        with pytest.raises(ValueError, match=r'"tools" (is text that is not JSON|must be a list of tools)'):
            Columns(tools="tools").example({"prompt": "a", "tools": wrong}, "here")


def test_a_file_of_tools_is_for_prompts_that_have_none(tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("yaml", reason="needs PyYAML")
    tool = {"class_name": "a.B", "config": {"type": "native"}, "tool_schema": TOOL}
    file = write(tmp_path / "tools.yaml", {"tools": [tool]})  # JSON is YAML
    own = {"type": "function", "function": {"name": "own"}}
    path = write(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": "b", "tools": [own]})
    data = load_data(config(model_folder, WITH_TOOLS, path=path, tools_key="tools", tools_file=file, eval_path=path))
    texts = [data.tokenizer.render(data.train._examples[number]) for number in range(2)]
    assert texts[0].startswith("TOOLS " + json.dumps([TOOL]))
    assert texts[1].startswith("TOOLS " + json.dumps([own]))
    made = load_data(config(model_folder, WITH_TOOLS, source="addition", digits=1, tools_file=file))
    assert made.tokenizer.render(made.train._examples[0]).startswith("TOOLS " + json.dumps([TOOL]))
    with pytest.raises(DataError, match="the chat template has no place for tools"):
        load_data(config(model_folder, CHATML, path=path, tools_file=file))
    with pytest.raises(DataError, match=r"data.tools_file.*nope.yaml"):
        load_data(config(model_folder, WITH_TOOLS, path=path, tools_file=tmp_path / "nope.yaml"))
    write(file, {"tools": [{"class_name": "a.B"}]})
    with pytest.raises(DataError, match=r"tool 1 \(a.B\) has no tool_schema"):
        load_data(config(model_folder, WITH_TOOLS, path=path, tools_file=file))


# --- prompt functions and sources of one's own ------------------------------------------------------------------------

OWN = """
from datetime import datetime
import numpy as np

def ask(row):
    return [{"role": "user", "content": f"{row['question']} ({row['level']['name']})"}]

class Endless:
    def __getitem__(self, index):
        return {"prompt": "?"}

class Squares:
    def __init__(self, count, start=1):
        self.numbers = range(start, start + count)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        if self.numbers[index] == 13:
            return "unlucky"
        return {"prompt": f"{self.numbers[index]} squared?", "answer": self.numbers[index] ** 2, "number": index}

    def held_out(self):
        return Squares(2, 100)

class Frame:  # rows as pandas and numpy give them
    def __init__(self, other=None):
        self.other = {"bytes": b"x", "object": object()}.get(other)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        prompt = np.array([{"role": "user", "content": f"{index}?"}], dtype=object)
        metadata = {"at": datetime(2026, 1, 2), "rate": np.float32(0.5), "scores": np.ones((1, 2))}
        metadata["known"] = np.bool_(True)
        return {"prompt": prompt, "answer": np.int64(index), "m": metadata | {"other": self.other}}
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_prompt_function_makes_prompts_from_rows(tmp_path: Path, model_folder: Path, own: str) -> None:
    rows = [{"question": "1 + 1?", "level": {"name": "easy"}, "answer": 2}, {"question": "?", "level": {}}]
    path = write(tmp_path / "d.jsonl", rows[0])
    data = load_data(config(model_folder, path=path, eval_path=path, prompt_function=f"{own}:ask"))
    prompt = data.train.prompt(0)
    assert (prompt.text, prompt.answer) == ("1 + 1? (easy)", "2")
    assert prompt.metadata == {"question": "1 + 1?", "level": {"name": "easy"}}
    assert data.evaluation["held_out"].prompt(0).text == "1 + 1? (easy)"
    path = write(tmp_path / "d.jsonl", *rows)
    with pytest.raises(DataError, match=r"line 2: data.prompt_function failed: KeyError: 'name' \(own.py:6, in ask\)"):
        load_data(config(model_folder, path=path, prompt_function=f"{own}:ask"))
    with pytest.raises(DataError, match=r"data.prompt_function = .*own.py has no aks; did you mean ask\?"):
        load_data(config(model_folder, path=path, prompt_function=f"{own}:aks"))


def test_a_source_of_ones_own(model_folder: Path, own: str) -> None:
    data = load_data(config(model_folder, source=f"{own}:Squares", settings={"count": 5}))
    assert [data.train.prompt(index).answer for index in range(5)] == ["1", "4", "9", "16", "25"]
    assert data.train.prompt(2).metadata == {"number": 2}
    assert [data.evaluation["held_out"].prompt(index).answer for index in range(2)] == ["10000", "10201"]
    with pytest.raises(DataError, match=r"data.source: 1 of 20 rows are wrong: .*Squares row 12: a row must be a dict"):
        load_data(config(model_folder, source=f"{own}:Squares", settings={"count": 20}))
    with pytest.raises(DataError, match=r"can't be made: TypeError: .*unexpected keyword argument 'many'"):
        load_data(config(model_folder, source=f"{own}:Squares", settings={"many": 1}))
    with pytest.raises(DataError, match="has no rows"):
        load_data(config(model_folder, source=f"{own}:Squares", settings={"count": 0}))
    with pytest.raises(DataError, match="has no length"):
        load_data(config(model_folder, source=f"{own}:Endless"))


def test_rows_of_ones_own_may_have_what_numpy_has(model_folder: Path, own: str) -> None:
    prompt = load_data(config(model_folder, source=f"{own}:Frame", shuffle=False)).train.prompt(1)
    assert json.loads(json.dumps(prompt.to_json())) == prompt.to_json()
    assert (prompt.text, prompt.answer) == ("1?", "1")
    metadata = {"at": "2026-01-02 00:00:00", "rate": 0.5, "scores": [[1, 1]], "known": True, "other": None}
    assert prompt.metadata == {"m": metadata}
    for other, kind in (("bytes", "bytes"), ("object", "a value of type object")):
        with pytest.raises(DataError, match=rf'row 0: column "m.other" has {kind}, which metadata can.t have'):
            load_data(config(model_folder, source=f"{own}:Frame", settings={"other": other}))


@each(
    ("text", "message"),
    [
        ('source = "filez"', "data.source = \"filez\": did you mean 'files'?"),
        ('source = "a:B"\npath = "x"', 'data.path is for source = "files", but it is "a:B": use data.settings'),
        ('source = "addition"\nsettings = { a = 1 }', "data.settings are for a source of your own, but data.source is"),
        ('source = "addition"\nprompt_function = "f"', 'data.prompt_function = "f": name it as'),
    ],
)
def test_wrong_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f'run.steps = 1\nmodel.path = "m"\nreward.name = "math"\n[data]\n{text}\n')
    assert message in str(caught.value)


# --- the hub --------------------------------------------------------------------------------------------------------


def test_a_name_of_the_hub_that_cannot_be_loaded_is_an_error_that_names_both_meanings(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = config(model_folder, path="relaxd-no-such-owner/data/main:test@[0:5]")
    assert with_absolute_paths(run).data.path == run.data.path
    with pytest.raises(DataError, match=r"data.path: .* is neither a file nor a folder here, and loading the split "):
        load_data(run)
    with pytest.raises(DataError, match=r"can't read data/missing.jsonl: No such file"):
        load_data(config(model_folder, path="data/missing.jsonl"))


def test_rows_of_the_hub_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package datasets, which finds the data set in its own cache of modules: a folder."""
    import datasets

    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "owner" / "name" / "test.jsonl", {"prompt": "a", "n": 1}, {"prompt": "b", "n": 2})
    (tmp_path / "owner" / "days").mkdir()
    days = pa.table({"prompt": ["a"], "day": [date(2026, 1, 2)]})
    pa.parquet.write_table(days, tmp_path / "owner" / "days" / "train.parquet")
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split: load_dataset(
            str(tmp_path / name), config, split=split, cache_dir=str(tmp_path / "cache")
        ),
    )
    rows = open_rows(Path("owner/name:test@[1:]"), "data.path")
    assert (len(rows), rows[0], rows.place(0)) == (1, {"prompt": "b", "n": 2}, "owner/name:test row 2")
    assert list(rows.scan()) == [{"prompt": "b", "n": 2}]
    assert Examples(open_rows(Path("owner/days"), "data.path"), Columns())[0].metadata == {"day": "2026-01-02"}


# --- prompts that are there twice -------------------------------------------------------------------------------------


def test_repeats_and_overlaps_are_counted() -> None:
    texts = ["What is 2 + 3?", "what is  2 + 3?", "What is 2 + 3?", "What is 2 - 3?", "x²", "x2"]
    keys = keys_of([Example(text, answer) for text, answer in zip(texts, "556178", strict=True)])
    found = repeats(keys)
    assert (found.exact, found.normalised, found.other_answers) == (1, 2, 1)
    assert overlap(keys, keys_of([Example("WHAT IS 2 + 3?\n"), Example("x")])) == 3
    assert normalised(" A\u0301\tb\n") == "á b"
    tools = keys_of([Example("a"), Example("a", tools=[TOOL]), Example([{"role": "system", "content": "a"}])])
    assert repeats(tools).normalised == 0


def test_repeated_prompts_are_left_out(tmp_path: Path, model_folder: Path) -> None:
    first = write(tmp_path / "a.jsonl", *({"prompt": text} for text in ("a", "b", "A ", "c", "held", "set")))
    second = write(tmp_path / "b.jsonl", *({"prompt": text} for text in ("B", "d", "d")))
    more = write(tmp_path / "set.jsonl", {"prompt": "SET"})
    run = config(
        model_folder,
        eval={"sets": [{"name": "more", "path": str(more)}]},
        sources=[{"path": str(first)}, {"path": str(second)}],
        eval_path=write(tmp_path / "held.jsonl", {"prompt": "held"}),
        deduplicate=True,
    )
    data = load_data(run)
    assert [data.train.prompt(index).text for index in range(len(data.train))] == ["a", "b", "c", "d"]
    assert (data.repeated, len(data.evaluation["more"])) == (5, 1)
    write(second, {"prompt": "a"})
    with pytest.raises(DataError, match=r"data.sources.1.path: every prompt is in an evaluation set or an earlier"):
        load_data(run)
    broken = tmp_path / "b.jsonl"
    broken.write_text('{"prompt": "d"}\n{"prompt": ""}\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"data.sources.1.path: 2 of 3 rows are wrong: .*b.jsonl line 2"):
        load_data(run)


MANY = """
import re, sys, time
begun = time.process_time()
from relaxd.config import RunConfig
from relaxd.data.curriculum.prompt_record import PromptRecord
from relaxd.data.curriculum.run_curriculum import Visits
from relaxd.data.dataset import Cursor, load_data
config = RunConfig.model_validate({"run": {"steps": 1}, "model": {"path": sys.argv[1]}, "reward": {"name": "math"},
    "data": {"source": "files", "path": sys.argv[2], "deduplicate": True}})
train = load_data(config).train
visits, cursor = Visits(train, PromptRecord(train.prompts, config.data.curriculum), 0), Cursor()
for _ in range(200):
    cursor = train.after(visits.next(cursor).cursor)
seconds = time.process_time() - begun
train.is_repeat(Cursor(0, len(train) - 1))  # which all others come before
peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]
print(len(train.repeats), seconds, time.process_time() - begun, int(peak) // 1024)
"""


@pytest.mark.night
def test_many_prompts_are_compared_within_seconds(tmp_path: Path, model_folder: Path) -> None:
    numbers = np.arange(200_000)
    numbers[::1000] = 0  # 200 rows are the same
    prompts = [
        f"What is the sum of all the numbers from one to {number}? Think first, then answer." for number in numbers
    ]
    pa.parquet.write_table(pa.table({"prompt": prompts, "answer": numbers}), tmp_path / "many.parquet")
    done = run_python("-c", MANY, str(model_folder), str(tmp_path / "many.parquet"))
    assert done.returncode == 0, done.stderr
    repeats, first_seconds, seconds, mebibytes = map(float, done.stdout.split())
    assert repeats == 199
    assert first_seconds < 10  # of both cores, as without data.deduplicate
    assert seconds < 40
    assert mebibytes < 300
