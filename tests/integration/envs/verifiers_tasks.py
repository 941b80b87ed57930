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


class Doubling(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "integers"

    @vf.tool
    async def double(self, number: int) -> int:
        """Double a number."""
        return 2 * number


class FileTask(SumTask):
    @vf.reward
    async def written(self, runtime: vf.Runtime) -> float:
        return float((await runtime.read("sum.txt")).decode().strip() == self.data.answer)


class WithTools(vf.Taskset[FileTask, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Doubling(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[FileTask]:
        for number in (3, 4):
            prompt = f"Write twice the sum of 2 and {number} to sum.txt."
            yield FileTask(SumData(prompt=prompt, answer=str(2 * (2 + number))))


if __name__ == "__main__":
    Doubling.run()  # as verifiers starts it
