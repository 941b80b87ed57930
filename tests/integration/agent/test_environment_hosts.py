"""Processes that host environments, and hang or die."""

from pathlib import Path

import psutil
import pytest

from relaxd.config import AgentConfig
from relaxd.envs.client import EnvironmentFailed
from relaxd.envs.environment import Reply, Sample
from services.agent.environments import Environments
from tests.kit.processes import is_alive
from tests.kit.waiting import eventually

FORKING = """
import os
import time

class Forking:
    def __init__(self, note):
        self.note = note

    def step(self, reply):
        if not (child := os.fork()):
            time.sleep(600)
        with open(self.note, "a") as file:
            file.write(f"{child}\\n")
        if reply.text == "die":
            os._exit(7)
        if reply.text == "hang":
            time.sleep(600)
        return "well", 1.0
"""
LEAKING = """
kept = []

class Leaking:
    def step(self, reply):
        while reply.text == "leak":
            kept.append(bytearray(64 << 20))
        return "well", 1.0
"""
SAMPLE = Sample([{"role": "user", "content": "hello"}], "42", {}, seed=7)


@pytest.mark.parametrize("ending", ["dies", pytest.param("is frozen", marks=pytest.mark.slow)])
async def test_a_host_that_dies_or_answers_nothing_is_started_again_and_leaves_nothing(
    ending: str, tmp_path: Path
) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    note = tmp_path / "note"

    def left() -> list[int]:
        return [pid for pid in map(int, note.read_text().split()) if is_alive(pid)]

    async def opened(session: str) -> bool:
        try:
            await environments.open(session, SAMPLE)
        except EnvironmentFailed:
            return False
        return True

    agent = {"environment": f"{tmp_path}/forking.py:Forking", "settings": {"note": str(note)}, "call_seconds": 2}
    environments = Environments(AgentConfig.model_validate(agent))
    before = set(psutil.Process().children())
    await environments.start()
    try:
        (host,) = set(psutil.Process().children()) - before
        await environments.open("a", SAMPLE)
        if ending == "dies":
            with pytest.raises(EnvironmentFailed, match="exited with code 7"):
                await environments.step("a", 1, Reply("die"))
        else:
            await environments.open("late", SAMPLE)
            with pytest.raises(EnvironmentFailed, match=r"step\(\) took longer than 2 s"):
                await environments.step("late", 1, Reply("hang"))  # which is no reason to end the host
            assert (await environments.step("a", 1, Reply("well"))).reward == 1.0
            host.suspend()
            with pytest.raises(EnvironmentFailed, match="did not answer Step within"):
                await environments.step("a", 2, Reply("well"))
        await eventually(lambda: not is_alive(host.pid), "the end of the host")
        await eventually(lambda: not left(), "the end of what the host has forked")
        await eventually(lambda: opened("b"), "a new host")  # until its end is noticed, sessions fail
        assert (await environments.step("b", 1, Reply("well"))).reward == 1.0
        assert left()
    finally:
        await environments.close()
    await eventually(lambda: not left(), "the end of what the next host has forked")


async def test_a_host_that_leaks_is_ended_at_its_limit_and_started_again(tmp_path: Path) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    agent = {"environment": f"{tmp_path}/leaking.py:Leaking", "memory_bytes": 2 << 30}
    environments = Environments(AgentConfig.model_validate(agent))
    await environments.start()
    try:
        await environments.open("a", SAMPLE)
        assert (await environments.step("a", 1, Reply("well"))).reward == 1.0
        with pytest.raises(EnvironmentFailed, match=r"agent\.memory_bytes = 2147483648 is used up: raise it"):
            await environments.step("a", 2, Reply("leak"))

        async def opened() -> bool:
            try:
                await environments.open("b", SAMPLE)
            except EnvironmentFailed:
                return False
            return True

        await eventually(opened, "a new host")
        assert (await environments.step("b", 1, Reply("well"))).reward == 1.0
    finally:
        await environments.close()
