"""Settings of evaluations."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, field_validator

from relaxd.config.agent import SERVICE, check_environment
from relaxd.config.reward import TokenVariable, check_address
from relaxd.config.section import Section, own_function
from relaxd.run_folder import HELD_OUT

MAX_SAMPLES = 1024
"""Maximum number of answers to a prompt in an evaluation. All answers to a prompt are scored together."""


class EvalSet(Section):
    """A named set of prompts to evaluate on."""

    name: str
    """Name of the set in tables and metrics: lower-case letters, digits, "_", "-" and "."."""
    path: Path | None = None
    """File or folder with the set's prompts, in the forms of data.path."""
    task: str = ""
    """Instead of path: a task of reasoning-gym, such as "spell_backward". Its prompts are generated, with seeds that
    training doesn't use."""
    task_settings: dict[str, Any] = Field(default_factory=dict)
    """With task: the task's own settings, like data.reasoning_gym.settings."""
    instruction: str = ""
    """With task: text added as a paragraph after the question."""
    benchmark: str = ""
    """Instead of path: a benchmark whose prompts come in a Python package: "humaneval" or "ifbench"
    (docs/evaluation.md)."""
    prompts: int = Field(default=0, ge=0)
    """Number of prompts of the set to use, from the first on. 0 means all of a file or benchmark, 100 of a task."""
    prompt_key: str = ""
    """Column of the set's prompts; empty: that of data.prompt_key."""
    answer_key: str = ""
    """Column of the set's reference answers; empty: that of data.answer_key."""
    metadata_key: str = ""
    """Overrides data.metadata_key unless empty; "*" means all columns except prompt and answer."""
    tools_key: str | None = None
    """Overrides data.tools_key if set; empty means that the set's prompts have no tools."""
    prompt_function: Annotated[str | None, own_function("prompt_function")] = None
    """Overrides data.prompt_function if set; empty means no function. If only prompt_key is set, data.prompt_function
    doesn't apply."""
    system_prompt: str | None = None
    """Overrides data.system_prompt if set; empty means no system prompt."""
    samples_per_prompt: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Number of answers to each prompt (n)."""
    k: tuple[int, ...] = ()
    """Values of k for pass@k and maj@k, at most samples_per_prompt; empty means 1, 2, 4, 8 ... up to
    samples_per_prompt."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy. Defaults to 0 with one answer per prompt, else to rollout.temperature."""
    top_p: float = Field(default=0.0, ge=0, le=1)
    """Nucleus sampling (top-p) of answers; 1 turns it off, 0 means rollout.top_p."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample answers from the k likeliest tokens; 0 turns it off. Defaults to rollout.top_k."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Maximum length of an answer, in tokens; 0 means eval.max_new_tokens."""
    stop: tuple[str, ...] | None = None
    """Strings that end an answer. Defaults to rollout.stop."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end an answer. Defaults to rollout.stop_token_ids."""
    min_new_tokens: int | None = Field(default=None, ge=0)
    """Minimum length of an answer, in tokens. Defaults to rollout.min_new_tokens."""
    reward: str = ""
    """Name of the set's reward, in the form of reward.name. Empty: the run's reward with its settings; for a task, the
    reward reasoning_gym; for a benchmark, the benchmark's own reward."""
    reward_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the set's reward, in the form of reward.settings."""
    reward_key: str = ""
    """Key of the set's reward in mappings that a reward returns, like reward.key."""
    reward_address: Annotated[str, AfterValidator(partial(check_address, token_setting="reward_address_token"))] = ""
    """Address of your own reward service, in place of `reward`, like reward.address."""
    reward_address_token: TokenVariable = ""
    """With reward_address: environment variable with the service's token, like reward.address_token."""
    environment: Annotated[str, AfterValidator(check_environment)] = ""
    """Environment of the set's conversations, in the form of agent.environment; empty: the run's."""
    environment_settings: dict[str, Any] | None = None
    """Settings of the set's environment, in the form of agent.settings. Defaults to agent.settings if the environment
    is the run's, else to none."""
    right_from: float = 1.0
    """Minimum reward of an answer that counts as right for pass@k and maj@k."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", name):
            raise ValueError(
                f'{name!r} can\'t be a set\'s name: use 1 to 64 lower-case letters, digits, "_", "-" and ".", such as '
                '"math500"'
            )
        return name

    def problems(self) -> Iterator[str]:
        this = f"the evaluation set {self.name!r}"
        given = {"path": self.path is not None, "task": bool(self.task), "benchmark": bool(self.benchmark)}
        if sum(given.values()) != 1:
            named = " and ".join(name for name, is_given in given.items() if is_given) or "no prompts"
            yield f"{this} has {named}: give one of path, task and benchmark"
        of_files = ("prompt_key", "answer_key", "metadata_key", "tools_key", "prompt_function")
        if self.path is None and (columns := [name for name in of_files if getattr(self, name)]):
            yield (f"{this} has {columns[0]}, which is for path: its prompts are not in a file")
        n = self.samples_per_prompt
        if wrong := [k for k in self.k if not 1 <= k <= n]:
            yield f"{this} has k = {wrong[0]}: it must be 1 to samples_per_prompt = {n}"
        if n > 1 and self.temperature == 0:
            yield (
                f"{this} has samples_per_prompt = {n} with temperature = 0: all answers to a prompt would be the same"
            )
        if "" in (self.stop or ()):
            yield f"{this} has an empty stop string: it must have a character"
        if wrong := [token for token in self.stop_token_ids or () if token < 0]:
            yield f"{this} has the stop token id {wrong[0]}: token ids are not negative"
        has_own = bool(self.reward or self.task or self.benchmark)
        if self.reward_address and (self.reward or self.reward_settings or self.reward_key):
            yield (
                f"{this} has reward_address, which is the whole reward: leave out reward, reward_settings and "
                "reward_key"
            )
        if (self.reward_settings or self.reward_key) and not has_own:
            yield (
                f"{this} has reward_settings or reward_key, but no reward: without one it has the run's, with "
                "reward.settings and reward.key"
            )
        if self.reward_address_token and not self.reward_address:
            yield f"{this} has reward_address_token, which is for a service at reward_address"
        if self.environment.startswith(SERVICE) and self.environment_settings:
            yield (
                f'{this} has environment = "{self.environment}", a service that runs '
                "already: remove environment_settings"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values of k for pass@k and maj@k, ascending: the setting `k`, or else 1, 2, 4, 8 ... up to
        samples_per_prompt."""
        n = self.samples_per_prompt
        return tuple(sorted(set(self.k))) or tuple(2**power for power in range(n.bit_length()) if 2**power <= n)


class EvalConfig(Section):
    """Evaluation on prompts that aren't trained on (docs/evaluation.md)."""

    section: ClassVar[str] = "eval"

    prompts: int = Field(default=0, ge=0)
    """Number of held-out prompts of the data source that are answered greedily, as the set held_out. 0: none."""
    sets: tuple[EvalSet, ...] = ()
    """Named sets of prompts, each in a table [[eval.sets]] with a name, its prompts (path or task), and
    perhaps samples_per_prompt, sampling parameters and a reward."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""
    interval: int = Field(default=0, ge=0)
    """Number of steps between evaluations during training; 0 turns these evaluations off. They use the engines' current
    weights, even if the weights change meanwhile."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Maximum length of an answer, in tokens; 0 means rollout.max_new_tokens."""
    engine_share: float = Field(default=1.0, gt=0, le=1)
    """Maximum share of each engine's rollout.max_running_samples for an evaluation during training; for conversations,
    of each agent replica's agent.max_sessions."""
    kept_prompts: int = Field(default=200, ge=0)
    """Number of prompts of each set whose texts and answers are kept; of other prompts, only rewards and lengths are
    kept."""
    stall_seconds: float = Field(default=300.0, gt=0)
    """Seconds without a new token after which a prompt moves to another engine, and without any engine after which the
    evaluation is abandoned. A whole answer may take any time."""

    def problems(self) -> Iterator[str]:
        if self.interval and not self.prompts and not self.sets:
            yield (
                f"eval.interval is {self.interval}, but eval.prompts is 0 and there are no eval.sets, which turns "
                "evaluation off: set one of them, or remove eval.interval"
            )
        if not self.interval:
            reason = "eval.interval is 0, so that no evaluation is beside training: set interval"
            yield from self.unused(("engine_share",), reason)
        names = [one.name for one in self.sets]
        if twice := next((name for name in names if names.count(name) > 1), None):
            yield f"eval.sets has {twice!r} twice: give each set a name of its own"
        if HELD_OUT in names:
            yield f'eval.sets has the name "{HELD_OUT}", which is that of the set that eval.prompts makes'
