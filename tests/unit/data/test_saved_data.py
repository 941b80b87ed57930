"""Folders that datasets saved, and JSON files with an array."""

import json
import re
from pathlib import Path

import datasets
import pytest

from relaxd.data import prompt_files
from relaxd.data.prompt_files import open_rows
from relaxd.models import DataError
from tests.kit.processes import run_python

PEAK_OF_OPENING = """
import sys, tracemalloc
from pathlib import Path
from relaxd.data import prompt_files
from relaxd.data.prompt_files import open_rows
prompt_files._CHUNK = 1 << 18
tracemalloc.start()
rows = open_rows(Path(sys.argv[1]), "data.path")
print(tracemalloc.get_traced_memory()[1])
"""
"""Print the bytes that opening a file takes at most.

In a process of its own: to stop tracemalloc may crash one with threads (CPython's issue 128679).
"""


def saved(count: int, first: int = 0) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"prompt": f"p{i}", "answer": i} for i in range(first, first + count)])


def numbers(path: Path | str) -> list[int]:
    rows = open_rows(Path(path), "data.path")
    assert list(rows.scan()) == [rows[index] for index in range(len(rows))]
    return [row["answer"] for row in rows.scan()]


def test_a_saved_data_set_has_its_rows_in_their_order_and_no_others(tmp_path):
    saved(30).save_to_disk(tmp_path / "set", num_shards=3)
    state = tmp_path / "set" / "state.json"
    assert numbers(tmp_path / "set") == list(range(30))
    assert numbers(f"{tmp_path}/set@[5:15]") == list(range(5, 15))
    turned = json.loads(state.read_text())
    turned["_data_files"].reverse()  # the order is that of state.json, not of the names
    state.write_text(json.dumps(turned, indent=2))
    assert numbers(tmp_path / "set") == [*range(20, 30), *range(10, 20), *range(10)]
    assert numbers(tmp_path / "set") == datasets.load_from_disk(tmp_path / "set")["answer"]
    (tmp_path / "z.jsonl").write_text('{"answer": 99}\n')
    assert numbers(tmp_path)[-3:] == [8, 9, 99]  # in a folder of files


def test_a_split_must_be_named(tmp_path):
    datasets.DatasetDict({"train": saved(4), "test": saved(2, 4)}).save_to_disk(tmp_path / "set")
    train = re.escape(repr(f"{tmp_path}/set/train"))
    with pytest.raises(DataError, match=rf"data\.path: .*with the splits train, test: name one of them, as in {train}"):
        open_rows(tmp_path / "set", "data.path")
    with pytest.raises(DataError, match="with the splits train, test"):
        open_rows(tmp_path, "data.path")
    assert numbers(tmp_path / "set/train") == [0, 1, 2, 3]
    assert numbers(tmp_path / "set/test") == [4, 5]


def test_damage_of_a_saved_data_set_is_named(tmp_path):
    saved(4).save_to_disk(tmp_path / "set", num_shards=2)
    state = tmp_path / "set" / "state.json"
    text = state.read_text()
    state.write_text(text.replace('"_split": null', '"_indices_data_files": [{"filename": "indices.arrow"}]'))
    with pytest.raises(DataError, match=r"rows in another order .* save its flatten_indices"):
        open_rows(tmp_path / "set", "data.path")
    state.write_text(text)
    (tmp_path / "set" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json names data-00001-of-00002\.arrow, which isn't there"):
        open_rows(tmp_path / "set", "data.path")
    for wrong in ("[]", "{", '{"_data_files": 3}', '{"_data_files": [{"name": "a"}]}'):
        state.write_text(wrong)
        with pytest.raises(DataError, match=r"state\.json: it isn't as the package datasets writes it"):
            open_rows(tmp_path / "set", "data.path")


def test_descriptions_of_a_hub_folder_are_no_rows(tmp_path):
    (tmp_path / "dataset_infos.json").write_text('{"answer": -1}')
    (tmp_path / "a.jsonl").write_text('{"answer": 1}\n')
    assert numbers(tmp_path) == [1]


# --- arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_an_array_is_read(tmp_path, monkeypatch, indent, chunk):
    monkeypatch.setattr(prompt_files, "_CHUNK", chunk)
    rows = [{"prompt": 'ä "]}{[, \\ 😀\n', "answer": i, "x": [{"y": [i, 1.5, True, None, "é"]}]} for i in range(20)]
    path = tmp_path / "a.json"
    for ascii_only, before in ((True, ""), (False, "\ufeff \n")):
        path.write_text(before + json.dumps(rows, indent=indent, ensure_ascii=ascii_only) + "\n")
        assert list(open_rows(path, "data.path").scan()) == rows
        assert numbers(f"{path}@[3:]") == list(range(3, 20))
    assert open_rows(path, "data.path").place(2) == f"{path} entry 3"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # JSON lines with this ending, as before
    assert list(open_rows(path, "data.path").scan()) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is empty"),
        ("[", r"at byte 1 is the end of the file, but an object such as .* as entry 1 is needed"),
        ('["a"]', "at byte 1 is '\"', but an object"),
        ('[{"a": 1}', r'at byte 9 is the end of the file, but "," or "\]" after entry 1'),
        ('[{"a": 1} {"a": 2}]', r"at byte 10 is '{', but \",\""),
        ('[{"a": 1}, ]', r"at byte 11 is '\]', but an object such as .* as entry 2"),
        ('[{"a": 1}]\n{}', "at byte 11 is '{', but the end of the file"),
        ('[{"a": 1}, {"b": }]', r"entry 2, at byte 11, is not JSON \(Expecting value, byte 17\)"),
        ('[{"a": "b]', r"entry 1, at byte 1, is not JSON \(Unterminated string starting, byte 7\)"),
    ],
)
def test_what_is_wrong_with_an_array(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"data\.path: .*a\.json.*{message}"):
        open_rows(path, "data.path")


def test_the_places_of_a_large_array_are_all_that_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_files, "_CHUNK", 1 << 18)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "a long prompt " * 70, "answer": i} for i in range(20_000)]))
    assert path.stat().st_size > 19 << 20
    measured = run_python("-c", PEAK_OF_OPENING, str(path))
    assert int(measured.stdout or -1) in range(1, 4 << 20), measured.stderr
    rows = open_rows(path, "data.path")
    assert rows[19_999]["answer"] == 19_999
    broken = path.read_bytes()[:5000].replace(b'"prompt"', b"prompt", 3) + path.read_bytes()[5000:]
    path.write_bytes(broken)
    read = []
    pread = prompt_files.os.pread
    monkeypatch.setattr(prompt_files.os, "pread", lambda *given: read.append(given) or pread(*given))
    with pytest.raises(DataError, match=r"entry 1, at byte 1, is not JSON"):
        open_rows(path, "data.path")
    assert len(read) == 1  # a mistake isn't taken for an object without an end
