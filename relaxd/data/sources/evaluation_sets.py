"""The prompts of [[eval.sets]]."""

from relaxd.config import RunConfig
from relaxd.config.evaluation import EvalSet
from relaxd.config.prompts.reasoning_gym import ReasoningGymConfig
from relaxd.data.errors import DataError
from relaxd.data.examples import Example
from relaxd.data.files.opening import open_rows
from relaxd.data.sources.benchmarks import read_benchmark
from relaxd.data.sources.columns import Examples
from relaxd.data.sources.reasoning_gym import reasoning_gym
from relaxd.data.sources.sources import Source, columns_of, tools_of

TASK_PROMPTS = 100
"""Prompts of a task if eval.sets says nothing."""
TASK_SEED = 1_000_000_000
"""Seed of the tasks' prompts. A task makes item i from seed + i, so training's, which are small, are others."""


def read_set(config: RunConfig, number: int) -> Source:
    """Open the prompts of one of eval.sets, all that it has. Raises DataError, which names the setting and the file."""
    one = config.eval.sets[number]
    kind = "task" if one.task else "benchmark" if one.benchmark else "path"
    place = f"eval.sets.{number}"
    field = f"{place}.{kind}"
    if one.path is None:
        made = _of_task(one, field) if one.task else read_benchmark(one.benchmark, field)
        text = config.data.system_prompt if one.system_prompt is None else one.system_prompt
        return Source([example.with_system_prompt(text) for example in made], field, shown=one.name)
    examples = Examples(open_rows(one.path, field), columns_of(config.data, one, place))
    if not len(examples):
        raise DataError(field, f"{one.path} has no prompts")
    return Source(examples, field, one.name, tools_of(config.data, one, place))


def _of_task(one: EvalSet, field: str) -> list[Example]:
    settings = ReasoningGymConfig(
        task=one.task,
        settings=one.task_settings,
        size=one.prompts or TASK_PROMPTS,
        held_out=0,
        seed=TASK_SEED,
        instruction=one.instruction,
    )
    try:
        return reasoning_gym(settings)[0]
    except DataError as error:
        raise DataError(field, error.message.removeprefix("= ")) from error
