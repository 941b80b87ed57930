"""A taskset of verifiers, for the tests of its adapter."""

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    first: int = 2


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(3):
            prompt = f"What is {self.config.first} + {number}?"
            answer = str(self.config.first + number)
            yield SumTask(SumData(prompt=prompt, system_prompt="Be short.", answer=answer))


class WithTools(Sums):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[object]:
        return [object()]
