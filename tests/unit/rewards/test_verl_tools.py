"""verl's tools as a reward: files of both generations, unchanged, without verl."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from relaxd.config import RewardConfig
from relaxd.data.tools_file import ToolsFileError, read_tools, schemas_of
from relaxd.envs.environment import Reply, Sample, ToolCall, calls_in
from relaxd.envs.loading import load_environment
from relaxd.envs.verl_tools import ToolFailure, VerlTools, load_tools
from relaxd.rewards import BadRewardError, RewardInput, UnknownRewardError, resolve
from relaxd.rewards.scorers import scorer_of

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

NEW = '''
import asyncio
import logging
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

HISTORY = []

class Calculator(BaseTool):
    """A tool of verl 0.6 and later: create returns (id, ToolResponse), execute returns a ToolResponse."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._states = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth=None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._states[instance_id] = {"truth": ground_truth, "last": None}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        if "sleep" in parameters:
            await asyncio.sleep(parameters["sleep"])
        value = parameters["a"] + parameters["b"]
        self._states[instance_id]["last"] = value
        return ToolResponse(text=str(value)), self.config["step_reward"], {"value": value}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._states[instance_id]
        return float(state["truth"] is not None and str(state["last"]) == state["truth"])

    async def release(self, instance_id: str, **kwargs) -> None:
        HISTORY.append(("release", self._states.pop(instance_id)["truth"]))
'''
OLD = '''
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema

HISTORY = []

class Search(BaseTool):
    """A tool of verl 0.4: create returns an id, execute a text."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._found = {}

    async def create(self, instance_id, documents=None) -> str:
        self._found[instance_id] = documents or {}
        HISTORY.append(("create", instance_id))
        return instance_id

    async def execute(self, instance_id, parameters, top=1):
        found = self._found[instance_id][parameters["query"]]
        if parameters.get("as_mapping"):
            return {"text": found}, None, {}
        return found * top, 0.25, {}

    async def release(self, instance_id):
        HISTORY.append(("release", instance_id))

class Broken(Search):
    """Fails where its config says."""

    async def create(self, instance_id, **kwargs):
        if self.config.get("at") == "create":
            raise RuntimeError("no sandbox")
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        if self.config.get("at") == "value":
            return "text alone"
        if self.config.get("at") == "number":
            return "text", float("nan"), {}
        raise KeyError("page")

    async def calc_reward(self, instance_id, **kwargs):
        if self.config.get("at") == "calc_reward":
            raise RuntimeError("no judge")
        return 0.0

    async def release(self, instance_id, **kwargs):
        await super().release(instance_id)
        if self.config.get("at") == "release":
            raise RuntimeError("still busy")
'''


def schema(name, **properties):
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    function = {"name": name, "description": f"The tool {name}.", "parameters": parameters | {"required": []}}
    return {"type": "function", "function": function}


ADD = {
    "class_name": "new_tools.Calculator",
    "config": {"type": "native", "step_reward": 0.5},
    "tool_schema": schema("add", a="number", b="number"),
}
SEARCH = {"class_name": "old_tools.Search", "config": {}, "tool_schema": schema("search", query="string")}


def broken(at):
    return {"class_name": "old_tools.Broken", "config": {"at": at}, "tool_schema": schema("broken")}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(autouse=True)
def _modules(tmp_path, monkeypatch):
    (tmp_path / "new_tools.py").write_text(NEW)
    (tmp_path / "old_tools.py").write_text(OLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("new_tools", "old_tools", "verl"):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write_tools(*tools):
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": list(tools)}))
        return tmp_path / "tools.yaml"

    return write_tools


def score(path, *responses, metadata=None, **settings):
    scorer = scorer_of(RewardConfig(name="verl_tools", settings={"config": str(path)} | settings))
    assert scorer.awaits
    samples = [RewardInput(prompt="?", response=one, metadata=metadata or {}) for one in responses]
    with asyncio.Runner() as runner:
        outcomes = scorer.score(samples, runner)
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
    return [{"reward": one.reward, **one.parts} for one in outcomes]


def history(module):
    return sys.modules[module].HISTORY


# --- what a reply calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        (call("add", a=1), [ToolCall("add", {"a": 1})]),
        (
            call("add", a=1) + "and" + call("add", b="</tool>"),
            [ToolCall("add", {"a": 1}), ToolCall("add", {"b": "</tool>"})],
        ),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"function": {"name": "add", "arguments": {"a": 1}}}</tool_call>', [ToolCall("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "argu', []),  # cut off
        ("<tool_call>", []),
    ],
)
def test_calls(text, calls):
    assert calls_in(text) == calls


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("add(1, 2)", "in JSON"),
        ("", "in JSON"),
        ("[1]", "in JSON"),
        ("3", "in JSON"),
        ("[" * 50_000, "in JSON"),
        ('{"arguments": {}}', "has no name"),
        ('{"name": 3}', "has no name"),
        ('{"name": "add", "arguments": "a=1"}', "the arguments of add are no object"),
        ('{"name": "add", "arguments": [1]}', "the arguments of add are no object"),
        ('{"name": "add", "arguments": null}', "the arguments of add are no object"),
    ],
)
def test_what_is_written_as_a_call_but_is_none(block, problem):
    (found,) = calls_in(f"<tool_call>{block}</tool_call>")
    assert problem in found.problem


# --- the environment ----------------------------------------------------------------------------------------------


async def test_a_conversation_of_several_turns(write):
    tools = load_tools(write(ADD, SEARCH))
    kwargs = {"add": {"create_kwargs": {"ground_truth": "7"}}, "search": {"create_kwargs": {"documents": {"x": "X!"}}}}
    conversation = VerlTools(tools, kwargs)
    await conversation.reset()
    answers, info = await conversation.execute(calls_in("Look. " + call("search", query="x")))
    assert (answers, info) == (["X!"], {"reward": 0.25, "calls": 1, "errors": 0})
    both = call("add", a=3, b=4) + call("search", query="x", as_mapping=True)
    assert await conversation.execute(calls_in(both)) == (["7", "X!"], {"reward": 0.5, "calls": 2, "errors": 0})
    assert await conversation.execute(calls_in("It is 7.")) == ([], {"reward": 0, "calls": 0, "errors": 0})
    assert await conversation.final_reward() == 1
    await conversation.close()
    await conversation.close()
    assert history("new_tools") == [("release", "7")]
    assert [what for what, _ in history("old_tools")] == ["create", "release"]


async def test_what_goes_wrong_is_observed(write):
    conversation = VerlTools(load_tools(write(ADD, broken(""))), call_seconds=0.1)
    await conversation.reset()
    bad = [
        ("<tool_call>nonsense</tool_call>", "Error: a tool call is"),
        (call("subtract", a=1), "Error: there is no tool 'subtract'; there are add, broken"),
        (call("add", a=1), "Error: KeyError: 'b'"),
        (call("add", a=1, b="2"), "Error: TypeError: unsupported operand"),
        (call("add", sleep=60), "Error: Calculator.execute took longer than 0.1 s"),
        (call("broken"), "Error: KeyError: 'page'"),
    ]
    for text, error in bad:
        (answer,), info = await conversation.execute(calls_in(text))
        assert error in answer
        assert info == {"reward": 0, "calls": 1, "errors": 1}
    _, info = await conversation.execute(calls_in("".join(text for text, _ in bad) + call("add", a=1, b=2)))
    assert info == {"reward": 0.5, "calls": 7, "errors": 6}
    await conversation.close()
    assert history("new_tools") == [("release", None)]


async def test_a_conversation_with_the_tools_is_an_environment(write):
    settings = {"config": str(write(ADD, SEARCH))}
    game, other = (load_environment("verl_tools", settings)() for _ in range(2))
    assert [tool["function"]["name"] for tool in game.tools] == ["add", "search"]
    kwargs = {"extra_info": {"tools_kwargs": {"add": {"create_kwargs": {"ground_truth": "7"}}}}}
    await game.open(Sample([{"role": "user", "content": "?"}], metadata=kwargs))
    await other.open(Sample([{"role": "user", "content": "?"}]))
    step = await game.step(Reply("", [ToolCall("add", {"a": 3, "b": 4}, id="c"), ToolCall("page", {}, id="d")]))
    first, second = step.observation
    assert first == {"role": "tool", "name": "add", "tool_call_id": "c", "content": "7"}
    assert second["content"] == "Error: there is no tool 'page'; there are add, search"
    assert (step.reward, step.done, step.info) == (0.5, False, {"calls": 2.0, "errors": 1.0})
    assert (await game.step(Reply("", problem="no name"))).observation == "Error: no name"
    last = await game.step(Reply("7"))
    assert (last.observation, last.reward, last.done) == (None, 1.0, True)
    assert last.info == {"calls": 2.0, "errors": 2.0}
    assert (await other.step(Reply("7"))).reward == 0.0
    await game.close()
    await other.close()
    assert history("new_tools") == [("release", "7"), ("release", None)]


# --- the reward ---------------------------------------------------------------------------------------------------


def test_step_rewards_add_up_with_the_last_one(write):
    metadata = {"extra_info": {"tools_kwargs": {"add": {"create_kwargs": {"ground_truth": "7"}}, "search": None}}}
    right, wrong, twice, none, bad = score(
        write(ADD, SEARCH),
        call("add", a=3, b=4),
        call("add", a=3, b=5),
        call("add", a=1, b=1) + call("add", a=3, b=4),
        "The sum is 7.",
        "<tool_call>add(3, 4)</tool_call>",
        metadata=metadata,
    )
    assert right == {"reward": 1.5, "calls": 1, "errors": 0}
    assert wrong == {"reward": 0.5, "calls": 1, "errors": 0}
    assert twice == {"reward": 2, "calls": 2, "errors": 0}
    assert none == {"reward": 0, "calls": 0, "errors": 0}
    assert bad == {"reward": 0, "calls": 1, "errors": 1}
    assert history("new_tools") == [("release", "7")] * 5
    created = [what for what, _ in history("old_tools")]
    assert (created.count("create"), created.count("release")) == (5, 5)


def test_settings(write):
    path, many = write(ADD), call("add", a=1, b=1) * 5
    assert score(path, many, max_calls=2) == [{"reward": 1, "calls": 2, "errors": 0}]
    assert score(path, many)[0]["reward"] == 2.5
    hanging = call("add", sleep=60)
    assert score(path, hanging, call_seconds=0.1) == [{"reward": 0, "calls": 1, "errors": 1}]
    arguments = {"search": {"create_kwargs": {"documents": {"x": "X"}}, "execute_kwargs": {"top": 3, "unknown": 1}}}
    asked = call("search", query="x")
    assert score(write(SEARCH), asked, metadata={"tools_kwargs": arguments})[0]["reward"] == 0.25


def test_the_answers_of_a_group_are_in_flight_together(write):
    asked = [call("add", a=1, b=1, sleep=0.5)] * 20
    loop_time = asyncio.Runner()
    begun = loop_time.get_loop().time()
    assert len(score(write(ADD), *asked)) == 20
    assert loop_time.get_loop().time() - begun < 5
    loop_time.close()


@pytest.mark.parametrize(
    ("at", "error", "message"),
    [
        (
            "create",
            ToolFailure,
            r"create of the tool broken failed: RuntimeError: no sandbox \(old_tools.py:\d+, in create",
        ),
        ("calc_reward", ToolFailure, r"calc_reward of the tool broken failed: RuntimeError: no judge"),
        ("release", ToolFailure, r"release of the tool broken failed: RuntimeError: still busy"),
        (
            "value",
            BadRewardError,
            "execute of the tool broken returned a str: it must return its answer, a step reward",
        ),
        ("number", BadRewardError, "the step reward of the tool broken is nan: it must be a finite number"),
    ],
)
def test_everything_is_released_after_a_failure(write, at, error, message):
    path = write(SEARCH, broken(at), ADD)
    with pytest.raises(error, match=message):
        score(path, call("broken"))
    created = [one for what, one in history("old_tools") if what == "create"]
    released = [one for what, one in history("old_tools") if what == "release"]
    assert sorted(created) == sorted(released)
    assert len(created) == (1 if at == "create" else 2)
    if at != "create":
        assert history("new_tools") == [("release", None)]


def test_it_is_a_term_among_others(write):
    terms = [
        {"name": "regex", "settings": {"pattern": "^Let"}},
        {"name": "verl_tools", "settings": {"config": str(write(ADD))}, "weight": 2.0},
    ]
    scorer = scorer_of(RewardConfig.model_validate({"terms": terms}))
    with asyncio.Runner() as runner:
        (one,) = scorer.score([RewardInput(prompt="?", response="Let us: " + call("add", a=1, b=2))], runner)
    assert (one.reward, one.parts["verl_tools_calls"], one.parts["verl_tools"]) == (2, 1, 0.5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ad": {}}, "tools_kwargs has 'ad', but the tools are add"),
        ({"add": 3}, "tools_kwargs.add must be an object"),
        ([1], "tools_kwargs is a list"),
    ],
)
def test_wrong_tools_kwargs_are_named(write, kwargs, message):
    with pytest.raises(ValueError, match=message):
        score(write(ADD), "x", metadata={"extra_info": {"tools_kwargs": kwargs}})


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: [", "is not YAML"),
        ("", "has no tools"),
        ("tools: []", "has no tools"),
        ("- a", "has no tools"),
        ("tools: [a]", "tool 1 is a str"),
        ("tools: [{class_name: a.B, confg: {}}]", "tool 1 has 'confg': did you mean config"),
        ("tools: [{class_name: B}]", "class_name is 'B': it must be a class"),
        ("tools: [{config: {}}]", "class_name is None"),
        ("tools: [{class_name: a.B, config: [1]}]", "config is a list"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "config.type is 'mcp': only native"),
        ("tools: [{class_name: a.B, config: {key: '${oc.env:KEY}'}}]", r"has \${oc.env:KEY}, which is not resolved"),
        ("tools: [{class_name: a.B, tool_schema: {type: function}}]", "tool_schema must have type, and function"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ToolsFileError, match=f"tools.yaml.*{message}"):
        read_tools(tmp_path / "tools.yaml")
    with pytest.raises(UnknownRewardError, match=f'"verl_tools" can\'t be made with.*{message}'):
        resolve("verl_tools", {"config": "tools.yaml"})


def test_files_that_are_not_there_and_classes_that_are_not_tools(write, tmp_path):
    with pytest.raises(ToolsFileError, match=r"cannot read .*nope.yaml: No such file"):
        read_tools(tmp_path / "nope.yaml")
    with pytest.raises(BadRewardError, match=r"reward.settings.config is missing"):
        resolve("verl_tools", {})
    with pytest.raises(UnknownRewardError, match="add' twice"):
        resolve("verl_tools", {"config": str(write(ADD, ADD))})
    with pytest.raises(UnknownRewardError, match=r"module new_tools has no Calculater; did you mean Calculator\?"):
        resolve("verl_tools", {"config": str(write(ADD | {"class_name": "new_tools.Calculater"}))})
    with pytest.raises(UnknownRewardError, match=r"pathlib.Path can't be made|pathlib.Path has no create"):
        resolve("verl_tools", {"config": str(write(ADD | {"class_name": "pathlib.Path"}))})
    with pytest.raises(UnknownRewardError, match=r"module verl.tools.gsm8k_tool can't be imported"):
        resolve("verl_tools", {"config": str(write(ADD | {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool"}))})
    assert schemas_of(write(ADD, SEARCH)) == [ADD["tool_schema"], SEARCH["tool_schema"]]
    with pytest.raises(ToolsFileError, match=r"tool 2 \(old_tools.Search\) has no tool_schema: prompts need it"):
        schemas_of(write(ADD, {"class_name": "old_tools.Search"}))


def test_verl_itself_is_used_where_it_is_installed(tmp_path, write, monkeypatch):
    folder = tmp_path / "site" / "verl"
    (folder / "tools").mkdir(parents=True)
    (folder / "utils").mkdir()
    for name in ("__init__.py", "tools/__init__.py", "utils/__init__.py"):
        (folder / name).write_text("")
    (folder / "utils" / "rollout_trace.py").write_text("rollout_trace_op = lambda function: function\n")
    from relaxd.envs import verl_tools

    own = Path(verl_tools.__file__).read_text()
    (folder / "tools" / "schemas.py").write_text(own.replace('"""Tools in', 'IS_VERL = True\n"""Tools in'))
    (folder / "tools" / "base_tool.py").write_text("from verl.tools.schemas import BaseTool\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert score(write(ADD), call("add", a=1, b=2))[0]["reward"] == 0.5
    assert sys.modules["verl.tools.schemas"].IS_VERL
    (folder / "__init__.py").write_text("import ray_that_is_missing\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    with pytest.raises(UnknownRewardError, match=r"verl is installed, but verl.tools.base_tool can't be imported"):
        resolve("verl_tools", {"config": str(write(ADD))})
