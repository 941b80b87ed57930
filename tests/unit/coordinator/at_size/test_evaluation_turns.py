"""Evaluations leave the coordinator's event loop free for others."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from threading import Barrier, BoundedSemaphore, Event
from types import SimpleNamespace
from typing import Any

from relaxd.config import RunConfig
from relaxd.data.vision import THREADS
from relaxd.evaluation.sets import sets_of
from services.coordinator.runs.evaluation import TURN, _Evaluation, _Question

ENGINES, PROMPTS = 64, 640


async def test_others_get_turns_while_an_evaluation_is_given_to_the_engines() -> None:
    engines = [SimpleNamespace(replica_id=f"engine-{number}", version=(1, 3)) for number in range(ENGINES)]
    values = {"run": {"steps": 1}, "model": {"path": "/model"}, "data": {"source": "addition"}}
    config = RunConfig.model_validate(values | {"reward": {"name": "addition"}, "eval": {"prompts": PROMPTS}})
    context: Any = SimpleNamespace(config=config, fleet=SimpleNamespace(candidates=lambda: engines))
    turns, begun_in = 0, []

    class Evaluation(_Evaluation):
        async def _judge(self, question: Any, engine: Any) -> list[Any]:
            begun_in.append(turns)
            return []

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    (one,) = sets_of(config)
    evaluation = Evaluation(context, {}, (1, 3), lambda name, lines: None, False)
    await evaluation.run(deque(_Question(one, index) for index in range(PROMPTS)), lambda done: None)
    running.cancel()
    assert len(begun_in) == PROMPTS
    assert max(begun_in.count(turn) for turn in begun_in) <= 2 * TURN


async def test_others_get_turns_while_media_of_a_prompt_are_read() -> None:
    fetched = Event()
    read = reading_with(lambda index: (fetched.wait(30), index))
    reading = asyncio.create_task(read(7))
    asyncio.get_running_loop().call_soon(fetched.set)
    assert await reading == (True, 7)


async def test_media_of_as_many_prompts_are_read_at_once_as_their_data_have_threads() -> None:
    all_read, free = Barrier(THREADS), BoundedSemaphore(THREADS)

    def prompt(index: int) -> int:
        assert free.acquire(blocking=False)
        all_read.wait(10)
        free.release()
        return index

    read = reading_with(prompt)
    assert await asyncio.gather(*map(read, range(2 * THREADS))) == list(range(2 * THREADS))


def reading_with(prompt: Callable[[int], Any]) -> Callable[[int], Coroutine[Any, Any, Any]]:
    """Return an evaluation's reading of a prompt with media, by index, from data that do it with `prompt`."""
    values = {"run": {"steps": 1}, "model": {"path": "/model"}, "reward": {"name": "addition"}, "eval": {"prompts": 1}}
    config = RunConfig.model_validate(values | {"data": {"source": "addition", "media_keys": {"image": "images"}}})
    context: Any = SimpleNamespace(config=config)
    (one,) = sets_of(config)
    data: Any = {one.name: SimpleNamespace(prompt=prompt)}
    evaluation = _Evaluation(context, data, (1, 3), lambda name, lines: None, False)
    return lambda index: evaluation._prompt(_Question(one, index))
