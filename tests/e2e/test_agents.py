"""Runs whose samples are conversations with an environment of the test's own."""

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from relaxd.cli.reading.logs_command import read_group_trace
from relaxd.run_folder import answers_file
from services.trainer.batch.groups import TrainGroup, bounds_of
from services.trainer.batch.step_plan import read_step_file, step_file_path
from tests.e2e.conftest import Workplace
from tests.e2e.echo_environment import ENVIRONMENT, MODES, OBSERVED
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import SPECIAL_TOKENS, byte_tokenizer, make_tiny_model
from tests.kit.reports import read_report

STEPS = 4
SETS = """[
    {name = "echoes", path = "set.jsonl", samples_per_prompt = 2, environment_settings = {turns = 2}, right_from = 0.9},
    {name = "broken", path = "set.jsonl", environment = "echo.py:Broken"},
]"""
AGENT = (
    *("--eval.prompts", "2", "--eval.sets", SETS, "--reward.name", "environment"),
    *("--agent.environment", "echo.py:Echo"),
    *("--agent.settings", "{turns = 3}", "--rollout.max_new_tokens", "300", "--agent.turn_tokens", "20"),
    # Random models rarely end a message by themselves.
    *("--rollout.stop_token_ids", json.dumps([2, *range(40, 140)])),
    *("--trainer.checkpoint.keep_step_files", "always", "--board.lease_seconds", "3"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_agent_loses_nothing_and_tokens_are_those_of_the_engine(workplace: Workplace) -> None:
    (workplace.folder / "echo.py").write_text(ENVIRONMENT)
    (workplace.folder / "set.jsonl").write_text('{"prompt": "a?", "answer": "a"}\n{"prompt": "b?", "answer": "b"}\n')
    run = workplace.start("run", "tiny.toml", "--run.steps", str(STEPS), "--run-id", "talks", *AGENT)
    workplace.kill_in_step(run, 2, "agent")

    folder = workplace.folder / "runs" / "talks"
    check_books(read_summary(folder), STEPS)
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = Counter(group for entry in ledger for group in entry["plan"]["groups"])
    assert set(trained.values()) == {1}
    evaluated, *steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in (evaluated, *steps)] == list(range(STEPS + 1))
    compared = [step["logprob_difference_max"] for step in steps if "logprob_difference_max" in step]
    assert compared
    assert max(compared) < 0.01  # other tokens than the engine's would have other log-probs
    for step in steps:
        assert 1 <= step["turns_mean"] <= step["turns_max"] <= 3
        assert step["environment_reward_mean"] == pytest.approx(step["reward_mean"])
        assert step["environment/letters"] > 0
        assert step["finish/env_done/share"] + step.get("finish/length/share", 0.0) == pytest.approx(1)
    for number in range(1, STEPS + 1):
        for group_id, columns in read_step_file(step_file_path(folder, number)).groups.items():
            check_tokens(TrainGroup(group_id, columns))
    check_evaluations(folder)


def check_evaluations(folder: Path) -> None:
    """Check the conversations of evaluations before the first and after the last step."""
    evaluated = {one["step"]: one for one in read_summary(folder)["evaluations"]}
    assert list(evaluated) == [0, STEPS]
    assert evaluated[0]["eval/echoes/reward"] > 0
    for step, metrics in evaluated.items():
        assert (metrics["eval_prompts"], metrics["eval/echoes/prompts"]) == (2, 2)
        assert metrics["eval_environment_failed"] == metrics["eval/echoes/environment_failed"] == 0
        assert 0 <= metrics["eval/echoes/pass_at_1"] <= metrics["eval/echoes/pass_at_2"] <= 1
        assert metrics["eval/broken/environment_failed"] == metrics["eval/broken/unscored"] == 2
        assert metrics["eval/broken/reward"] == 0
        conversations = [json.loads(line) for line in answers_file(folder, "echoes", step).read_text().splitlines()]
        assert sorted((one["index"], one["sample"]) for one in conversations) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        for one in conversations:
            opened, *_, last = one["messages"]
            assert opened == {"role": "user", "content": f"Say something about {one['answer']}"}
            assert last["content"].startswith(OBSERVED)
            assert 1 <= one["turns"] <= 2
            assert 0 <= one["reward"] <= one["turns"]
        (failed, _) = answers_file(folder, "broken", step).read_text().splitlines()
        assert "ValueError: broken on purpose (echo.py:" in json.loads(failed)["error"]


def check_tokens(group: TrainGroup) -> None:
    """Check that each sample is the prompt, the model's messages and between them the template's text."""
    columns, bounds = group.columns, bounds_of(group.lengths)
    tokenizer = byte_tokenizer()
    stop = SPECIAL_TOKENS.index("<|im_end|>")

    def encode(text: str, *, special: bool = True) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special))

    for sample in range(group.samples):
        own = slice(int(bounds[sample]), int(bounds[sample + 1]))
        tokens, mask = columns["tokens"][own], columns["loss_mask"][own]
        assert not columns["shares_prompt"][sample]  # the environment opens the conversation
        opened = encode("<|im_start|>user\nSay something about ") + encode(columns["prompt"]["answer"])
        prompt = columns["prompt_tokens"].tolist()[: -len(encode("<|im_start|>assistant\n"))]
        prompt += opened + encode("<|im_end|>\n<|im_start|>assistant\n")
        parts = np.split(tokens, np.flatnonzero(np.diff(mask)) + 1)
        assert parts[0].tolist() == prompt
        assert len(parts) == 2 * columns["turns"][sample]
        for reply, observation in zip(parts[1::2], parts[2::2], strict=False):
            said = tokenizer.decode(reply[:-1] if reply[-1] in range(3) else reply)
            expected = [] if reply[-1] == stop else [stop]
            expected += encode("\n<|im_start|>user\n") + encode(f"{OBSERVED} {len(said)}", special=False)
            assert observation.tolist() == expected + encode("<|im_end|>\n<|im_start|>assistant\n")
        logprobs, versions = columns["rollout_logprobs"][own], columns["versions"][own]
        assert (logprobs[mask == 0] == 0).all()
        assert (logprobs[mask == 1] < 0).all()
        assert (np.diff(versions[mask == 1]) >= 0).all()


TOOLS = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one in <tool_call></tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_bundled_calculator_is_trained_with(workplace: Workplace, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "long", max_position_embeddings=2048)
    (workplace.folder / "tools.jinja").write_text(TOOLS)
    code, output = workplace.relaxd(
        *("run", "tiny.toml", "--run.steps", "2", "--run-id", "sums", "--eval.prompts", "0"),
        *("--model.path", str(model), "--model.chat_template", "tools.jinja", "--data.max_prompt_tokens", "1000"),
        *("--agent.environment", "calculator", "--reward.name", "environment"),
        *("--algorithm.drop_zero_variance", "false", "--trainer.checkpoint.keep_step_files", "always"),
        *("--telemetry.traces", "file"),
    )
    assert code == 0, output
    folder = workplace.folder / "runs" / "sums"
    check_books(read_summary(folder), 2)
    (group, *_) = read_step_file(step_file_path(folder, 1)).groups.values()
    text = byte_tokenizer().decode(group["tokens"])
    assert '"name": "calculator"' in text.partition("<|im_end|>")[0]  # the tools are in the samples' own prompts
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in steps:  # of a random model
        assert (step["turns_mean"], step["environment/calls"]) == (1, 0)
        assert (step["tool_calls_mean"], step["tool_errors_mean"]) == (0, 0)
        assert 0 < step["environment_seconds_mean"] < step["outside_generation_seconds_mean"] < step["generate_seconds"]
        assert step["observation_tokens_mean"] == 0 < step["model_tokens_mean"] < step["response_length_mean"]
    assert steps[0]["logprob_difference_max"] < 0.01
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert sample["conversation"] == [{"role": "assistant", "content": sample["response"], "tool_calls": []}]
        assert (sample["turns"], sample["environment_reward"]) == (1, sample["reward"])
    assert {one["turns"] for one in read_report(folder / "report.html")["answers"]["samples"]["samples"]} == {1}
    check_trace(folder, json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])["plan"]["groups"][0])


def check_trace(folder: Path, group_id: str) -> None:
    """Check that a group's trace has a span for each message of the model and each call of the environment."""
    trace = read_group_trace(folder, group_id)
    assert trace is not None
    (stage,) = [span for span in trace.spans if span.name == "process rollout"]
    parts = [span for span in trace.spans if span.name in ("turn", "environment open", "environment step")]
    assert {span.parent_id for span in parts} == {stage.span_id}
    assert all(stage.start <= span.start <= span.end <= stage.end for span in parts)
    for sample in range(4):
        own = [span for span in parts if span.attributes["relaxd.session_id"] == f"{group_id}/{sample}/1"]
        found = [(span.name, span.attributes["relaxd.turn"]) for span in own]
        assert found == [("environment open", 0), ("turn", 1), ("environment step", 1)]
        assert 0 < own[1].attributes["relaxd.tokens"] <= 12
        assert own[2].attributes["relaxd.reward"] in (0, 1)
    asked = {span.parent_id for span in trace.spans if span.name == "relaxd.v1.Rollout/Generate"}
    assert asked >= {span.span_id for span in parts if span.name == "turn"}


FAILING = """
import time

class Failing:
    def __init__(self, hangs):
        self.hangs = hangs

    def open(self, sample):
        self.fails = sample.seed % 2 == 0

    def step(self, reply):
        if self.fails:
            time.sleep(3600) if self.hangs else 1 / 0
        return None, len(reply.text) + sum(reply.text.encode()) / 1e4, True
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.night)])
def test_an_environment_that_fails_drops_its_group_with_the_reason(workplace: Workplace, hangs: bool) -> None:
    (workplace.folder / "failing.py").write_text(FAILING)
    code, output = workplace.relaxd(
        *("run", "tiny.toml", "--run.steps", "2", "--run-id", "fails", "--eval.prompts", "0"),
        *("--reward.name", "environment", "--agent.environment", "failing.py:Failing"),
        *("--agent.settings", f"{{hangs = {str(hangs).lower()}}}", "--agent.call_seconds", "1"),
    )
    assert code == 0, output
    folder = workplace.folder / "runs" / "fails"
    summary = read_summary(folder)
    check_books(summary, 2)
    fates = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    dropped = [fate for fate in fates if fate.get("reason") == "environment_failed"]
    assert dropped
    assert summary["dropped_by_reason"]["environment_failed"] == len(dropped)
    expected = (
        r"step\(\) took longer than 1 s"
        if hangs
        else r"ZeroDivisionError: division by zero \(failing.py:\d+, in step\)"
    )
    logs = "".join(path.read_text() for path in sorted(Path(folder / "logs").glob("agent*")))
    assert re.search(expected, logs), logs[-2000:]


PROGRAM = """
import json, os, urllib.request

sample, said = json.load(open(os.environ["RELAXD_SAMPLE"])), []
messages = [*sample["messages"]]
for turn in range(3):
    if turn == 2:  # a compacted history: another sequence
        messages = [*sample["messages"], {"role": "user", "content": f"You said {len(said[1])} letters."}]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]
    said.append(answer["content"])
    messages += [answer, {"role": "user", "content": "Really<|im_end|>?"}]
with open(os.environ["RELAXD_RESULT"], "w") as file:
    reward = sum(map(len, said)) + sum("".join(said).encode()) / 1e4
    json.dump({"reward": reward, "info": {"letters": len(said[0])}}, file)
"""


FUNCTION = """
async def talk(sample, model):
    said, messages = [], list(sample.messages)
    for turn in range(3):
        if turn == 2:  # a compacted history
            messages = [*sample.messages, {"role": "user", "content": f"You said {len(said[1])} letters."}]
        answer = await model.generate(messages)
        said.append(answer.text)
        messages += [answer.message, {"role": "user", "content": "Really<|im_end|>?"}]
    return sum(map(len, said)) + sum("".join(said).encode()) / 1e4, {"letters": len(said[0])}
"""
LEADERS = {
    "program": (PROGRAM, "--agent.command", json.dumps([sys.executable, "talk.py"])),
    "function": (FUNCTION, "--agent.function", "talk.py:talk"),
}


@pytest.mark.night
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("leader", LEADERS)
def test_a_program_or_a_function_leads_the_conversations(workplace: Workplace, leader: str, mode: str) -> None:
    source, *setting = LEADERS[leader]
    (workplace.folder / "talk.py").write_text(source)
    code, output = workplace.relaxd(
        *("run", "tiny.toml", "--run.steps", "2", "--run-id", "led", "--eval.prompts", "0"),
        *("--reward.name", "environment", *setting, *MODES[mode]),
        *("--rollout.max_new_tokens", "200", "--agent.turn_tokens", "20"),
        *("--trainer.checkpoint.keep_step_files", "always"),
    )
    assert code == 0, output
    folder = workplace.folder / "runs" / "led"
    check_books(read_summary(folder), 2)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert (step["turns_mean"], step["sequences_mean"]) == (3, 2)
        assert step["environment/letters"] > 0
        assert step["environment_reward_mean"] == pytest.approx(step["reward_mean"])
        assert step.get("finish/env_done/share", 0.0) + step.get("finish/length/share", 0.0) == pytest.approx(1)
    assert steps[0]["logprob_difference_max"] < 0.01
    stop, asked = SPECIAL_TOKENS.index("<|im_end|>"), byte_tokenizer().encode("Really", add_special_tokens=False)
    for columns in read_step_file(step_file_path(folder, 1)).groups.values():
        samples = len(columns["reward"])
        assert columns["sample_of_sequence"].tolist() == [sample for sample in range(samples) for _ in range(2)]
        assert columns["shares_prompt"].tolist() == [1, 0] * samples
        bounds = bounds_of(columns["lengths"])
        for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
            observed = columns["tokens"][begin:end][columns["loss_mask"][begin:end] == 0].tolist()
            text = byte_tokenizer().decode(observed)
            if sequence % 2 == 0:
                assert text.count("user\nReally<|im_end|>?<|im_end|>\n<|im_start|>assistant\n") == 1
                assert asked[0] in observed
                assert observed.count(stop) in (1, 2)
            else:
                assert text.startswith("<|im_start|>user\n")
                assert "<|im_start|>user\nYou said " in text
        per_sample = bounds[::2]
        for begin, end in itertools.pairwise(per_sample):  # one advantage a sample, in all of its sequences
            assert len(set(columns["advantages"][begin:end].tolist())) == 1
    code, output = workplace.relaxd("samples", "led", "--step", "1")
    assert code == 0, output
    assert "You said" in output
