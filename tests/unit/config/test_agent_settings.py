"""The section [agent]: names of environments, and settings that don't go with conversations."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from relaxd.config import AgentConfig, RunConfig
from relaxd.config.load_toml import ConfigError, load_file
from relaxd.evaluation.set_checks import environment_problems
from relaxd.evaluation.sets import sets_of
from tests.kit.cases import each

EXAMPLE = Path(__file__).parents[3] / "examples" / "addition.toml"
TEACHER = "algorithm.name=opd roles.teacher.model=big roles.teacher.placement=service"


def load(words: str) -> RunConfig:
    return load_file(EXAMPLE, [f"--{word}" for word in ["eval.prompts=0", "eval.interval=0", *words.split()]])


@pytest.mark.parametrize("name", ["calculator", "games.py:Maze", "my.games:Maze", "grpc://games:50070"])
def test_environment_is_a_name_or_an_address(name: str) -> None:
    load(f"agent.environment={name}")


@each("name", ["Maze", "games.py", "http://games:80", "grpc://games", "grpc://games:0", "grpc://a:70000"])
def test_other_names_of_environments_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' must be the name of a bundled environment"):
        load(f"agent.environment={name}")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("rollout.partial.enabled=true", "rollout.partial.enabled is true"),
        ("rollout.engine=sglang rollout.return_routed_experts=true", "rollout.return_routed_experts is true"),
        ("agent.turn_tokens=4000", "agent.turn_tokens is 4000: it must be at most rollout.max_new_tokens"),
        (f"{TEACHER} roles.teacher.privileged_key=answer", "roles.teacher.privileged_key"),
        (
            "algorithm.distill_candidates=student algorithm.distill_top_k=4 algorithm.distill_loss_coef=1 "
            "roles.teacher.model=big roles.teacher.placement=service",
            "conversations don't keep yet what the engine finds likeliest",
        ),
    ],
)
def test_settings_that_conversations_do_not_have_are_refused(words: str, problem: str) -> None:
    load(words) if "agent." not in words else None
    with pytest.raises(ConfigError) as caught:
        load(f"agent.environment=calculator {words}")
    assert problem in str(caught.value)
    assert 'agent.environment is "calculator"' in str(caught.value)


@each(
    ("words", "problem"),
    [
        ("agent.environment=calculator", 'agent.environment is "calculator", and agent.command is ["python", "a.py"]'),
        (
            "agent.call_seconds=3",
            'agent.call_seconds is 3.0, but agent.command is ["python", "a.py"]: only environments',
        ),
        ("agent.settings={a=1}", 'agent.settings is {"a": 1}, but agent.command is'),
        ("agent.memory_bytes=1", "agent.memory_bytes is 1, but agent.command is"),
        ('agent.command=[""]', "it must begin with a program"),
        (
            "agent.container_memory_gb=1",
            "agent.container_memory_gb is 1.0, but agent.container is empty: name",
        ),
    ],
)
def test_settings_that_programs_do_not_have_are_refused(words: str, problem: str) -> None:
    command = 'agent.command=["python","a.py"]'
    load(f"{command} agent.max_turns=3 agent.turn_tokens=9 agent.conversation_seconds=5")
    with pytest.raises(ConfigError) as caught:
        load(f"{command} {words}")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("agent.environment=calculator", 'is "calculator", and agent.function is "a.py:solve"'),
        ('agent.command=["python"]', 'agent.function is "a.py:solve", and agent.command is ["python"]'),
        ("agent.call_seconds=3", 'agent.call_seconds is 3.0, but agent.function is "a.py:solve": only environments'),
        ("agent.container=a", 'agent.container is set, but agent.function is "a.py:solve": only agent.command has it'),
        (
            'eval.sets=[{name="s",path="p",environment_settings={a=1}}]',
            'environment_settings is set, but agent.function is "a.py:solve", which has none',
        ),
    ],
)
def test_settings_that_functions_do_not_have_are_refused(words: str, problem: str) -> None:
    load("agent.function=a.py:solve agent.max_turns=3 agent.settings={tries=2} agent.python=python3")
    with pytest.raises(ConfigError) as caught:
        load(f"agent.function=a.py:solve {words}")
    assert problem in str(caught.value)
    with pytest.raises(ConfigError, match=r'agent.function = "solve": name it as "package.module:function"'):
        load("agent.function=solve")


def test_an_image_has_no_white_space() -> None:
    with pytest.raises(ValidationError, match=r'agent.container is "an image": it must be an image'):
        AgentConfig(command=("a",), container="an image")


def test_settings_of_agents_need_an_environment() -> None:
    with pytest.raises(ConfigError, match=r"agent.max_turns is 3, but agent.environment is empty"):
        load("agent.max_turns=3")
    with pytest.raises(ConfigError, match=r"agent.max_sequences is 3, but agent.environment is .*: only programs"):
        load("agent.environment=calculator agent.max_sequences=3")
    with pytest.raises(ConfigError, match=r'agent.credit is "sequence", but agent.players is 1'):
        load("agent.environment=calculator agent.credit=sequence")
    with pytest.raises(ConfigError, match=r'agent.credit is "step", but agent.function is .*: only environments'):
        load("agent.function=a.b:solve agent.credit=step")
    with pytest.raises(ConfigError, match=r'agent.credit is "step", but reward.name is "addition"'):
        load("agent.environment=calculator agent.credit=step reward.name=addition")
    with pytest.raises(ConfigError, match=r'agent.credit is "sequence", but reward.name is "addition"'):
        load("agent.environment=nim agent.players=2 agent.credit=sequence reward.name=addition")
    with pytest.raises(ConfigError, match=r"agent.settings is set, but agent.environment is .*, a service that runs"):
        load("agent.environment=grpc://games:50070 agent.settings={level=1}")


@pytest.mark.parametrize(
    ("agent", "own", "problem"),
    [
        ("", 'environment="calculator"', "eval.sets.0.environment is set, but agent.environment is empty"),
        ("", "environment_settings={a=1}", "eval.sets.0.environment_settings is set, but agent.environment is empty"),
        ("calculator", 'environment="No-Name"', "'No-Name' must be the name of a bundled environment"),
        ("calculator", 'environment="grpc://a:1",environment_settings={a=1}', "remove environment_settings"),
        ("grpc://a:1", "environment_settings={a=1}", 'agent.environment is "grpc://a:1", a service that runs already'),
    ],
)
def test_environments_of_evaluation_sets_are_checked(agent: str, own: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f'agent.environment={agent} eval.sets=[{{name="s",path="p",{own}}}]')
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("own", "environment", "settings"),
    [
        ("", "number_guessing", {"high": 9}),
        (",environment_settings={high=99}", "number_guessing", {"high": 99}),
        (',environment="calculator"', "calculator", {}),
        (',environment="a.py:A",environment_settings={b=1}', "a.py:A", {"b": 1}),
    ],
)
def test_evaluation_sets_have_the_runs_environment_or_their_own(
    own: str, environment: str, settings: dict[str, int]
) -> None:
    words = f'agent.environment=number_guessing agent.settings={{high=9}} eval.sets=[{{name="s",path="p"{own}}}]'
    (one,) = sets_of(load(words))
    assert one.agent is not None
    assert (one.agent.environment, one.agent.settings) == (environment, settings)


def test_names_of_environments_that_are_not_bundled_are_problems() -> None:
    words = 'agent.environment=calculater eval.sets=[{name="s",path="p",environment="guessing"}]'
    found = dict(environment_problems(load(words)))
    assert list(found) == ["agent.environment", "eval.sets.0.environment"]
    assert "did you mean 'calculator'?" in found["agent.environment"]
    own = 'eval.sets=[{name="s",path="p",environment="a.py:A"}]'
    assert not environment_problems(load(f"agent.environment=grpc://games:50070 {own}"))
