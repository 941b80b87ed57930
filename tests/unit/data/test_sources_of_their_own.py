"""Sources and evaluation sets with columns, prompts, tools and sampling of their own, and temperatures of mixtures."""

import json
from collections import Counter
from pathlib import Path

import pytest

from relaxd.config import RunConfig
from relaxd.config.data import DataConfig
from relaxd.config.load_toml import ConfigError, load
from relaxd.data.dataset import load_data
from relaxd.data.sources.run_sources import Share, epoch_visits, mixture_weights
from relaxd.models import DataError
from tests.kit.cases import each
from tests.kit.tokenizer import write_tokenizer

TOOL = {"type": "function", "function": {"name": "look_up"}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def config(model: Path, sets: object = (), **data: object) -> RunConfig:
    values = {"run": {"steps": 2}, "model": {"path": str(model), "chat_template": TEMPLATE}, "reward": {"name": "math"}}
    values |= {"data": {"source": "files", "shuffle": False} | data, "eval": {"sets": sets}}
    return RunConfig.model_validate(values)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "p", "question": "q", "schemas": [TOOL], "others": json.dumps([TOOL, TOOL])}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "global_prompts.py").write_text("def ask(row):\n    return 'global ' + row['prompt']\n")
    (tmp_path / "own_prompts.py").write_text(
        "def ask(row):\n    return 'own ' + row['prompt']\n\n\ndef fail(row):\n    return row['x']\n"
    )
    return tmp_path / "a.jsonl"


CASES = [
    ({}, "<system>S<user>global p[look_up]"),
    ({"prompt_key": "question"}, "<system>S<user>q[look_up]"),
    ({"prompt_function": "own_prompts.py:ask"}, "<system>S<user>own p[look_up]"),
    ({"prompt_function": "own_prompts.py:ask", "prompt_key": "question"}, "<system>S<user>own p[look_up]"),
    ({"prompt_function": ""}, "<system>S<user>p[look_up]"),
    ({"system_prompt": "T"}, "<system>T<user>global p[look_up]"),
    ({"system_prompt": ""}, "<user>global p[look_up]"),
    ({"tools_key": "others"}, "<system>S<user>global p[look_up][look_up]"),
    ({"tools_key": ""}, "<system>S<user>global p"),
]


@pytest.mark.parametrize(("own", "expected"), CASES)
def test_what_a_source_or_a_set_says_wins(file: Path, model_folder: Path, own: dict, expected: str) -> None:
    common = {"tools_key": "schemas", "system_prompt": "S", "prompt_function": "global_prompts.py:ask"}
    one = {"path": str(file)} | own
    data = load_data(config(model_folder, [{"name": "x"} | one], sources=[one, {"path": str(file)}], **common))
    texts = [data.tokenizer.decode(part.prompt(n).tokens.tolist()) for part, n in ((data.train, 0), (data.train, 1))]
    assert texts == [expected, CASES[0][1]]
    assert data.tokenizer.decode(data.evaluation["x"].prompt(0).tokens.tolist()) == expected


def test_a_system_prompt_is_also_put_before_generated_prompts(model_folder: Path) -> None:
    spell = {"task": "spell_backward", "prompts": 1}
    sets = [{"name": "a"} | spell, {"name": "b", "system_prompt": ""} | spell]
    data = load_data(config(model_folder, sets, source="addition", system_prompt="S"))
    for part, begins in ((data.train, "<system>S<user>What is"), (data.evaluation["a"], "<system>S<user>")):
        assert data.tokenizer.decode(part.prompt(0).tokens.tolist()).startswith(begins)
    assert data.tokenizer.decode(data.evaluation["b"].prompt(0).tokens.tolist()).startswith("<user>")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"prompt_function": "own_prompts.py:aks"}, r"{place}.prompt_function = .* has no aks; did you mean ask"),
        (
            {"prompt_function": "own_prompts.py:fail"},
            r"{place}.path: .*line 1: {place}.prompt_function failed: KeyError",
        ),
        ({"tools_key": "tolls"}, r'{place}.tools_key = "tolls": no prompt that was looked at has tools'),
    ],
)
def test_errors_name_the_setting_of_the_source_or_set(file: Path, model_folder: Path, own: dict, message: str) -> None:
    one = {"path": str(file)}
    with pytest.raises(DataError, match=message.format(place=r"data\.sources\.1")):
        load_data(config(model_folder, sources=[one, one | own]))
    with pytest.raises(DataError, match=message.format(place=r"eval\.sets\.0")):
        load_data(config(model_folder, [{"name": "x"} | one | own], sources=[one]))


def test_a_column_with_tools_must_be_in_one_of_the_sources_that_share_it(file: Path, model_folder: Path) -> None:
    one = {"path": str(file)}
    with pytest.raises(DataError, match=r'data\.tools_key = "tolls": no prompt'):
        load_data(config(model_folder, sources=[one, one | {"tools_key": "schemas"}], tools_key="tolls"))
    (file.parent / "b.jsonl").write_text('{"prompt": "b"}\n')
    data = load_data(config(model_folder, sources=[one, {"path": str(file.parent / "b.jsonl")}], tools_key="schemas"))
    assert data.tokenizer.decode(data.train.prompt(1).tokens.tolist()) == "<user>b"


# --- temperatures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1, [1000, 100, 10]), (2, [783.8, 247.9, 78.4]), (5, [547.1, 345.2, 217.8]), (1e9, [370, 370, 370])],
)
def test_sources_come_in_proportion_to_a_power_of_their_sizes(temperature: float, expected: list[float]) -> None:
    counts = [1000, 100, 10]
    data = DataConfig(source="files", sources=[{"path": "a"}] * 3, temperature=temperature)
    weights = mixture_weights(data, counts)
    powers = [count ** (1 / temperature) for count in counts]
    by_formula = [1110 * power / sum(powers) for power in powers]
    visits = [count * weight for count, weight in zip(counts, weights, strict=True)]
    assert visits == pytest.approx(by_formula)
    assert visits == pytest.approx(expected, abs=0.06)
    shares = [Share(count, weight) for count, weight in zip(counts, weights, strict=True)]
    seen = Counter(epoch_visits(shares, 0, seed=0).tolist())
    assert sum(seen.values()) == pytest.approx(1110, abs=1)


def test_a_temperature_mixes_sources_of_a_run(tmp_path: Path, model_folder: Path) -> None:
    for name, count in (("a", 90), ("b", 10)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"prompt": "{name}{i}"}}\n' for i in range(count)))
    sources = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl")}]
    given = config(model_folder, sources=sources, temperature=2.0)
    data = load_data(RunConfig.model_validate_json(given.model_dump_json()))  # as services get it
    assert len(data.train) == 100
    assert {share.visits for share in data.train._shares} == {75, 25}


@each(
    ("text", "message"),
    [
        (
            "temperature = 2\npath = 'a'",
            r"no data\.sources to mix: .* \(the sampling temperature is rollout\.temperature\)",
        ),
        ("temperature = 0\n[[data.sources]]\npath = 'a'", r"data\.temperature = 0: must be more than 0"),
        ("temperature = 2\n[[data.sources]]\npath = 'a'\nweight = 2", r"data\.sources\.0\.weight is set, too"),
        ("[[data.sources]]\npath = 'a'\ntemperature = 0.5", r"all sources have rollout\.temperature"),
        ("[[data.sources]]\npath = 'a'\npresence_penalty = 0.5", "there are no penalties"),
        ("[[data.sources]]\npath = 'a'\nprompt_function = 'ask'", 'prompt_function = "ask": name it as'),
        ("[[data.sources]]\npath = 'a'\nstop = ['']", "an empty stop string"),
        ("[[data.sources]]\npath = 'a'\nstop_token_ids = [-1]", "stop token id -1"),
        ("[[data.sources]]\npath = 'a'\nmin_new_tokens = 257", r"sources\.0\.min_new_tokens is 257: .* is only 256"),
        (
            "[[data.sources]]\npath = 'a'\nmin_new_tokens = 9\nmax_new_tokens = 8",
            r"must be 9 \(its min_new_tokens\) to 256",
        ),
        (
            "path = 'a'\n[[eval.sets]]\nname = 'x'\ntask = 'spell_backward'\nprompt_key = 'q'",
            "has prompt_key, which is for path",
        ),
    ],
)
def test_wrong_settings_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f'run.steps = 1\nmodel.path = "m"\nreward.name = "math"\n[data]\nsource = "files"\n{text}')
