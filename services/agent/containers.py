"""Programs that lead conversations from containers of the Docker engine, one per sample (agent.container)."""

import asyncio
import io
import json
import logging
import os
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Self

import aiohttp
import psutil

from relaxd.config import AgentConfig
from relaxd.envs.client import EnvironmentFailed
from relaxd.envs.environment import MAX_BYTES
from relaxd.process.child import KILL_SECONDS
from relaxd.rpc.errors import InvalidArgument, Unavailable
from relaxd.telemetry.logs import escape
from services.agent.chat_session import ChatSession
from services.agent.program_conversations import TAIL_BYTES, Programs, RunningProgram, sample_folder

CALL_SECONDS = 60.0
"""Deadline of calls to the Docker engine, in seconds, except for the wait for a container's end."""
MAX_ANSWER = 8 << 20
"""Number of bytes of an answer of the Docker engine after which the rest is not read."""


class EngineError(OSError):
    """The Docker engine doesn't answer, or refuses a call. `status` is its HTTP status, or 0 without an answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class DockerEngine:
    """Client of the Docker engine's HTTP API. Use it in one event loop."""

    def __init__(self) -> None:
        """Create a client of the Docker engine at DOCKER_HOST.

        Raises InvalidArgument if the address is no Unix socket.
        """
        self._address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        if not self._address.startswith("unix://"):
            raise InvalidArgument(
                f'agent.container needs a Docker engine on this machine, but DOCKER_HOST is "{self._address}": it must '
                "be unix:///path/of/its/socket"
            )
        connector = aiohttp.UnixConnector(self._address.removeprefix("unix://"), limit=0)
        self._session = aiohttp.ClientSession("http://docker", connector=connector)

    async def close(self) -> None:
        """Close the connections to the Docker engine."""
        await self._session.close()

    async def json(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Any:
        """Send a call to the Docker engine and return its JSON answer, or None if it is empty. Raises EngineError."""
        found = await self.bytes(method, path, None if body is None else json.dumps(body).encode(), query)
        return json.loads(found) if found.strip() else None

    async def bytes(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
        *,
        kind: str = "application/json",
        seconds: float | None = CALL_SECONDS,
    ) -> bytes:
        """Send a call to the Docker engine and return the answer's content in bytes. Raises EngineError.

        Args:
            method: HTTP method.
            path: path of the call.
            body: content of the request.
            query: query parameters.
            kind: content type of `body`.
            seconds: deadline in seconds; None for no deadline.
        """
        try:
            async with self._session.request(
                method,
                path,
                params=query or {},
                data=body,
                headers={"Content-Type": kind},
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as answer:
                found = bytearray()
                async for chunk in answer.content.iter_any():
                    found += chunk
                    if len(found) > MAX_ANSWER:
                        break
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"it is late by more than {seconds} s"
            raise EngineError(f"the Docker engine at {self._address} doesn't answer: {why}") from error
        if not answer.ok:
            said = found.decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(found)["message"]
            raise EngineError(f"the Docker engine refuses {method} {path}: {said}", answer.status)
        return bytes(found)


NETWORK = "relaxd-agent"
"""Name of the Docker network of all containers. It connects them neither to the outside nor to each other."""
OWNER = "relaxd.agent-owner"
"""Name of the container label that contains the id and start time of the process that started the container."""
FOLDER = "/relaxd"
"""Folder in a container that holds the sample and the program's result."""
TAIL_LINES = 50
"""Maximum number of lines to read from the end of a program's output."""
TAR = "application/x-tar"
FRAME = 8
"""Size of the header that the Docker engine puts before each piece of output, in bytes."""
SIGNALLED = 128
"""Number that is added to a signal's number in the exit code of a program that the signal ended."""

_log = logging.getLogger(__name__)


class ContainerProgram:
    """An agent program that runs in a container."""

    def __init__(self, engine: DockerEngine, container: str, result: Path, memory_gb: float) -> None:
        self._engine = engine
        self._id = container
        self._result = result
        self._memory_gb = memory_gb
        self._removed = False
        self._waiting = asyncio.create_task(self._wait(), name="wait for a container")

    @classmethod
    async def start(
        cls, engine: DockerEngine, container: Mapping[str, Any], sample: bytes, result: Path, memory_gb: float
    ) -> Self:
        """Start the program in a new container.

        Args:
            engine: the Docker engine.
            container: body of the call that creates the container.
            sample: content of the file RELAXD_SAMPLE.
            result: path on this machine for the program's result.
            memory_gb: memory limit in GB, for messages.

        Raises EngineError.
        """
        name = (await engine.json("POST", "/containers/create", container))["Id"]
        try:
            archive = _archive_of(sample)
            await engine.bytes("PUT", f"/containers/{name}/archive", archive, {"path": "/"}, kind=TAR)
            await engine.bytes("POST", f"/containers/{name}/start")
        except BaseException:
            await _remove(engine, name)
            raise
        return cls(engine, name, result, memory_gb)

    async def wait(self) -> int:
        """Wait until the program ends.

        Return its exit code, or minus the number of the signal that ended it. Raises EngineError.
        """
        return await asyncio.shield(self._waiting)

    async def end(self) -> str:
        """Kill the program, fetch its result and remove the container. Returns the end of the program's output.

        A second call returns "". Raises EngineError, and EnvironmentFailed if the result can't be used.
        """
        if self._removed:
            return ""
        try:
            with suppress(EngineError):  # it has ended; if the engine is away, the next call says so
                await self._engine.bytes("POST", f"/containers/{self._id}/kill")
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_SECONDS):
                    await self.wait()
            state = (await self._engine.json("GET", f"/containers/{self._id}/json"))["State"]
            output = await self._output()
            await self._fetch_result()
        finally:
            self._removed = True
            self._waiting.cancel()
            await _remove(self._engine, self._id)
        limit = f"agent.container_memory_gb = {self._memory_gb:g} was used up"
        return f"{output}\n{limit}".strip() if state["OOMKilled"] else output

    async def _wait(self) -> int:
        answer = await self._engine.bytes("POST", f"/containers/{self._id}/wait", seconds=None)
        code: int = json.loads(answer)["StatusCode"]
        return code if code <= SIGNALLED else SIGNALLED - code

    async def _output(self) -> str:
        path = f"/containers/{self._id}/logs"
        data = await self._engine.bytes("GET", path, query={"stdout": "1", "stderr": "1", "tail": str(TAIL_LINES)})
        text = bytearray()
        while len(data) >= FRAME:  # header: stdout or stderr, three zeros, length of the bytes that follow
            length = int.from_bytes(data[4:FRAME], "big")
            text += data[FRAME : FRAME + length]
            data = data[FRAME + length :]
        return escape(bytes(text[-TAIL_BYTES:]).decode(errors="replace").strip(), keep="\t\n")

    async def _fetch_result(self) -> None:
        """Copy the program's result from the container to this machine, if there is a result."""
        try:
            where = {"path": f"{FOLDER}/result.json"}
            archive = await self._engine.bytes("GET", f"/containers/{self._id}/archive", query=where)
            with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
                member = opened.next()
                file = opened.extractfile(member) if member is not None and member.isreg() else None
                content = b"" if file is None else file.read(MAX_BYTES + 1)
        except EngineError as error:
            if error.status != 404:
                raise
            return
        except tarfile.TarError:
            file = None
        if file is None:
            raise EnvironmentFailed("the program's result (RELAXD_RESULT) can't be used: it isn't a plain file")
        await asyncio.to_thread(self._result.write_bytes, content)


class ContainerPrograms(Programs):
    """Starts a run's program in a container for each sample. Use it in one event loop."""

    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config)
        self._config = config
        self._engine: DockerEngine | None = None
        self._network = NETWORK
        """Id of the containers' network once `start` has returned; the network's name before."""

    async def start(self) -> None:
        """Start the endpoint, and remove the containers of services that were killed.

        Raises InvalidArgument if the image doesn't exist, Unavailable if the Docker engine fails.
        """
        self._engine = engine = DockerEngine()
        try:
            await engine.json("GET", f"/images/{self._config.container}/json")
            await self.sweep()
            network = await _network_of(engine)
            self._network = network["Id"]
            await self.endpoint.start(_gateway(network))
        except EngineError as error:
            if error.status == 404:
                raise InvalidArgument(
                    f'agent.container is "{self._config.container}", but this machine has no such image: pull or build '
                    "it first"
                ) from error
            raise Unavailable(f"agent.container: {error}") from error

    async def close(self) -> None:
        """Stop the endpoint, and close the connections to the Docker engine."""
        await super().close()
        if self._engine is not None:
            await self._engine.close()

    @asynccontextmanager
    async def run(self, session: ChatSession, sample: Mapping[str, Any]) -> AsyncIterator[tuple[RunningProgram, Path]]:
        """Run the agent program while the context is open, as `Programs.run` does."""
        assert self._engine is not None
        environment = self.model_variables(session) | {
            "RELAXD_SAMPLE": f"{FOLDER}/sample.json",
            "RELAXD_RESULT": f"{FOLDER}/result.json",
        }
        try:
            async with sample_folder(sample) as folder:
                result = folder / "result.json"
                content = json.dumps(sample).encode()
                program = await ContainerProgram.start(
                    self._engine, self.container_of(environment), content, result, self._config.container_memory_gb
                )
                try:
                    yield program, result
                finally:
                    await program.end()
        finally:
            self.endpoint.close_session(session)

    async def sweep(self) -> None:
        """Remove containers of agent processes that have ended. Raises EngineError."""
        assert self._engine is not None
        labelled = {"all": "1", "filters": json.dumps({"label": [OWNER]})}
        for one in await self._engine.json("GET", "/containers/json", query=labelled):
            pid = one["Labels"][OWNER].partition(":")[0]
            if one["Labels"][OWNER] != _owner_of(int(pid)):
                _log.warning("removing container %s of an agent service that has ended", one["Id"][:12])
                await _remove(self._engine, one["Id"])

    def container_of(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return the JSON body of the call that creates a container."""
        config, memory = self._config, int(self._config.container_memory_gb * 1e9)
        return {
            "Image": config.container,
            "Entrypoint": list(config.command),  # replaces the image's entry point
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "Labels": {OWNER: _owner_of(os.getpid())},
            "HostConfig": {
                "NetworkMode": self._network,
                "Memory": memory,
                "MemorySwap": memory,
                "PidsLimit": config.container_processes,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges:true"],
                "Init": True,
                "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
            },
        }


def _owner_of(pid: int) -> str:
    """Return the label for a process's containers: its id and start time, because a later process may have the same
    id."""
    try:
        return f"{pid}:{psutil.Process(pid).create_time():.2f}"
    except psutil.NoSuchProcess:
        return f"{pid}:ended"


def _archive_of(sample: bytes) -> bytes:
    """Return a tar archive with the folder FOLDER, writable by any user, and the sample's JSON file in it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        folder, file = tarfile.TarInfo(FOLDER.strip("/")), tarfile.TarInfo(f"{FOLDER.strip('/')}/sample.json")
        folder.type, folder.mode, file.size = tarfile.DIRTYPE, 0o777, len(sample)
        archive.addfile(folder)
        archive.addfile(file, io.BytesIO(sample))
    return packed.getvalue()


async def _remove(engine: DockerEngine, container: str) -> None:
    try:
        await engine.bytes("DELETE", f"/containers/{container}", query={"force": "1", "v": "1"})
    except EngineError as error:
        if error.status not in (404, 409):  # it is gone, or being removed
            _log.warning("container %s stays until the next start of an agent service: %s", container[:12], error)


async def _network_of(engine: DockerEngine) -> dict[str, Any]:
    """Return the containers' network, creating it if necessary."""
    made = {"Name": NETWORK, "Internal": True, "Options": {"com.docker.network.bridge.enable_icc": "false"}}
    named = {"filters": json.dumps({"name": [f"^{NETWORK}$"]})}
    if not await engine.json("GET", "/networks", query=named):
        await engine.json("POST", "/networks/create", made)
    # Names aren't unique: if two were created at once, all services use the older network.
    found: list[dict[str, Any]] = await engine.json("GET", "/networks", query=named)
    return min(found, key=lambda network: (network["Created"], network["Id"]))


def _gateway(network: Mapping[str, Any]) -> str:
    """Return the address of this machine in a Docker network."""
    (addresses,) = network["IPAM"]["Config"]
    # Without a configured gateway, the engine uses the network's first address and may not report it.
    return addresses.get("Gateway") or str(next(ip_network(addresses["Subnet"]).hosts()))
