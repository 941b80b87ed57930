"""Programs that lead conversations in containers of a real Docker engine, with a scripted engine of the model."""

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from relaxd.config import AgentConfig
from relaxd.data.examples import Example
from relaxd.envs.replies import reply_format
from relaxd.rpc.errors import InvalidArgument
from services.agent.containers import NETWORK, OWNER, ContainerPrograms
from services.agent.conversation import Conversation, ConversationStart
from services.agent.engines import EngineSession, OutOfTime
from services.agent.model_turns import PolicyModel
from services.agent.program_conversations import ProgramConversations
from tests.compose.stack import docker
from tests.integration.agent.program_kit import config_of, tokenizer
from tests.integration.agent.scripted_engines import Fleet
from tests.kit.processes import start_python
from tests.kit.waiting import wait_until

__all__ = ["tokenizer"]
pytestmark = pytest.mark.slow
IMAGE = "python:3.11-slim"
PROGRAM = """
import json, os, socket, sys, threading, time, urllib.request

sample = json.load(open(os.environ["RELAXD_SAMPLE"]))
body = json.dumps({"model": "policy", "messages": sample["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]

def reaches(address):
    try:
        socket.create_connection(address, 2).close()
        return True
    except OSError:
        return False

what = sample["metadata"]["what"]
if what == "fail":
    sys.exit("no luck")
if what == "hang":
    time.sleep(600)
if what == "eat":
    eaten = bytearray(200_000_000)
threads = 0
try:
    for threads in range(50):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
except RuntimeError:
    pass
secrets = [name for name in os.environ if name.startswith(("RELAXD_TOKEN", "REDIS")) or name == "A_SECRET"]
found = {"outside": reaches(("1.1.1.1", 53)), "another": reaches(tuple(sample["metadata"]["another"])),
         "threads": threads, "secrets": len(secrets)}
with open(os.environ["RELAXD_RESULT"], "w") as file:
    json.dump({"reward": answer == "5 and 9", "info": {name: float(value) for name, value in found.items()}}, file)
"""
LIMITS = {"container": IMAGE, "container_memory_gb": 0.1, "container_processes": 20}


def containers() -> list[str]:
    """Return the ids of all containers of agent services."""
    return docker("ps", "--all", "--quiet", "--filter", f"label={OWNER}").split()


class Held:
    """Conversations of programs in containers."""

    def __init__(self, model: PolicyModel, programs: ContainerPrograms) -> None:
        self.model = model
        self.conversations = ProgramConversations(model, programs)

    async def hold(self, **metadata: Any) -> Conversation:
        example = Example([{"role": "user", "content": "2 + 3 and 4 + 5?"}], "5 and 9", metadata)
        published = self.model.tokenizer.encode([example])[0].tolist()
        return await self.conversations.hold("s", example, published, 7, 8)


@asynccontextmanager
async def holding(tokenizer: Any) -> AsyncIterator[Held]:
    config = config_of(["python3", "-c", PROGRAM], **LIMITS)
    programs = ContainerPrograms(config.agent)
    await programs.start()
    try:
        async with Fleet(["5 and 9"], versions=[3]).serving() as engines:
            yield Held(PolicyModel(config, tokenizer, reply_format(tokenizer.template), engines), programs)
    finally:
        await programs.close()


@contextmanager
def neighbour() -> Iterator[list[Any]]:
    """Another container of the network, with a server; yields its address."""
    words = ("run", "--detach", "--network", NETWORK, IMAGE, "python3", "-m", "http.server", "8000")
    container = docker(*words).strip()
    try:
        (found,) = json.loads(docker("inspect", container))
        address = [found["NetworkSettings"]["Networks"][NETWORK]["IPAddress"], 8000]
        wait_until(lambda: reaches(address), "a server in a container")
        yield address
    finally:
        docker("rm", "--force", "--volumes", container)


def reaches(address: list[Any]) -> bool:
    try:
        socket.create_connection(tuple(address), 2).close()
        return True
    except OSError:
        return False


@pytest.mark.timeout(300)
async def test_a_container_reaches_nothing_but_the_model_and_is_removed(
    engine: None, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    async with holding(tokenizer) as held:
        with neighbour() as another:
            looks, failed, eats = await asyncio.gather(
                *(held.hold(what=what, another=another) for what in ("look", "fail", "eat"))
            )
        assert looks.failure == ""
        assert (looks.finish, looks.reward) == ("env_done", 1.0)
        assert 0 < looks.info.pop("threads") < 20
        assert looks.info == {"outside": 0.0, "another": 0.0, "secrets": 0.0}
        assert failed.failure == "the program ended with exit code 1; the end of its output:\nno luck"
        assert eats.failure.startswith("the program ended with SIGKILL")
        assert eats.failure.endswith("agent.container_memory_gb = 0.1 was used up")

        result = Conversation()
        example = Example([{"role": "user", "content": "2 + 3 and 4 + 5?"}], "", {"what": "hang"})
        start = ConversationStart(EngineSession("h"), example, 7, 8, lambda: 0.0 if result.turns else 100.0)
        with pytest.raises(OutOfTime):
            await held.conversations._converse(result, start)
        assert containers() == []


KILLED = """
import asyncio, json, sys
from pathlib import Path
from relaxd.config import AgentConfig
from services.agent.containers import ContainerProgram, ContainerPrograms

async def main():
    programs = ContainerPrograms(AgentConfig.model_validate(json.loads(sys.argv[1])))
    await programs.start()
    await ContainerProgram.start(programs._engine, programs.container_of({}), b"{}", Path("none"), 1.0)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.timeout(300)
async def test_containers_of_a_killed_service_are_removed_at_the_next_start(engine: None) -> None:
    agent = {"command": ["sleep", "600"], **LIMITS}
    programs = ContainerPrograms(AgentConfig.model_validate(agent))
    await programs.start()
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    try:
        with start_python("-c", KILLED, json.dumps(agent), **pipes) as service:
            assert service.stdout.readline() == b"started\n"
            await programs.sweep()
            assert len(containers()) == 1, "the service is alive"
            service.kill()
        await programs.sweep()
        assert containers() == []
    finally:
        await programs.close()


async def test_an_image_that_is_not_there_refuses_the_start(engine: None) -> None:
    programs = ContainerPrograms(AgentConfig(command=("a",), container="relaxd/no-such-image"))
    with pytest.raises(InvalidArgument, match="this machine has no such image: pull or build it first"):
        await programs.start()
    await programs.close()
