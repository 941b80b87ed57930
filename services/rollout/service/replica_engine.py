"""The engine of a replica: waits for its GPUs, starts the engine, reports its loading, and stops it."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from relaxd.config import RolloutConfig, RunConfig
from relaxd.process.child import ChildExit
from relaxd.process.gpu_lease import GpuLease
from relaxd.replica.gpus import Gpu, gpu_environment
from relaxd.replica.replica_service import ReplicaContext
from relaxd.roles import ROLES
from relaxd.rpc.errors import FailedPrecondition, RpcError
from services.rollout.engines.engine_interface import RolloutEngine
from services.rollout.service.child_engine import ChildEngine, loaded_mebibytes

logger = logging.getLogger(__name__)

Engine = TypeVar("Engine", bound=RolloutEngine)
StartEngine = Callable[[Mapping[str, str], GpuLease | None], Awaitable[Engine]]
"""Type of functions that start an engine, given the environment of its process and its GPU lease, if any."""


class ReplicaEngine(Generic[Engine]):
    """Leases GPUs for a replica's engine, and starts and stops it."""

    def __init__(self, context: ReplicaContext, role: str) -> None:
        self._context = context
        self._role = ROLES[role]
        self._process = psutil.Process()
        self._environment: Mapping[str, str] = {}
        self.gpus: tuple[Gpu, ...] = ()
        """GPUs leased for the engine."""
        self.engine: Engine | None = None
        """Running engine; None until its model is loaded, and after it has stopped."""
        self.loading = False
        self.detail = ""
        """Reason why no engine is loaded yet, for the replica's status; empty if one is loaded."""

    @property
    def loaded_mebibytes(self) -> int:
        """Amount of data that the engine has loaded while it is loading its model, in MiB; otherwise 0."""
        return loaded_mebibytes(self._process) if self.loading else 0

    @property
    def rss_bytes(self) -> float:
        """Resident memory of this process, in bytes."""
        return float(self._process.memory_info().rss)

    async def lease(self, config: RunConfig) -> None:
        """Lease the GPUs of a run's engine. Raises the errors of `GpuLeases.lease`."""
        share = self._role.gpu_share(config)
        self.gpus = await self._context.gpus.lease(self._role.gpus(config), share)
        self._environment = gpu_environment(self.gpus, share)

    async def start(self, start_engine: StartEngine[Engine], *, takes_turns: bool) -> Engine:
        """Start an engine on the leased GPUs; with `takes_turns`, first wait for the engine's turn on them.

        Raises RpcError, OSError.
        """
        if takes_turns:
            await self._context.take_turn(self.set_detail)
        self.loading = True
        try:
            self.engine = await start_engine(self._environment, self._context.gpus.child_lease if self.gpus else None)
        finally:
            self.loading = False
        self.detail = ""
        return self.engine

    async def stop(self) -> None:
        """Stop the running engine, if any."""
        engine, self.engine, self.detail = self.engine, None, ""
        if engine is not None:
            await engine.stop()

    def set_detail(self, detail: str) -> None:
        """Set the reason why the engine isn't loaded yet."""
        self.detail = detail


class FrozenEngine(ReplicaEngine[ChildEngine]):
    """The engine of a judge or a teacher, whose model is never trained.

    If the engine exits, the replica exits too, and its supervisor starts a new one.
    """

    def __init__(self, context: ReplicaContext, role: str, names: Mapping[str, str]) -> None:
        """`names`: maps names of engine settings to the role's names, which replace them in error messages."""
        super().__init__(context, role)
        self._names = names

    async def load(
        self,
        folder: Path,
        config: RunConfig,
        settings: RolloutConfig,
        *,
        on_tokens: Callable[[int, float], None] = lambda count, per_second: None,
        takes_turns: bool = False,
        for_logprobs: bool = False,
    ) -> ChildEngine:
        """Lease GPUs and load the model in `folder` on them.

        Args:
            folder: the model's folder.
            config: the run's configuration.
            settings: the engine's settings.
            on_tokens, for_logprobs: as in ChildEngine.start.
            takes_turns: True if the engine shares its GPUs with a trainer and waits for its turn.

        Raises:
            FailedPrecondition: the engine doesn't start; the message has the role's names of settings.
        """
        own = self._context.settings

        def start_engine(environment: Mapping[str, str], gpu_lease: GpuLease | None) -> Awaitable[ChildEngine]:
            self.detail = f"loading {folder.name}"
            return ChildEngine.start(
                folder,
                settings,
                environment=environment,
                name=own.replica_id,
                role=self._role.name,
                log_level=own.log_level,
                python=own.engine_python,
                on_exit=self._on_exit,
                on_tokens=on_tokens,
                colocate=takes_turns,
                frozen=True,
                for_logprobs=for_logprobs,
                gpu_lease=gpu_lease,
            )

        await self.lease(config)
        try:
            engine = await self.start(start_engine, takes_turns=takes_turns)
        except RpcError as error:
            message = str(error)
            for name, of_role in self._names.items():
                message = message.replace(name, of_role)
            raise FailedPrecondition(message) from error
        logger.info("%s is loaded (process %d)", folder.name, engine.pid)
        return engine

    def _on_exit(self, ended: ChildExit) -> None:
        if not self.loading:  # else `load` raises
            self._context.give_up(f"the {self._role.name}'s engine {ended}")
