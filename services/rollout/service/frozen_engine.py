"""The engine of a replica whose model is never trained: the judge's, and that of a teacher."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from relaxd.config import RolloutConfig, RunConfig
from relaxd.process.child import ChildExit
from relaxd.replica.gpus import gpu_environment
from relaxd.replica.replica_context import ReplicaContext
from relaxd.roles import ROLES
from relaxd.rpc.errors import FailedPrecondition, RpcError
from services.rollout.service.child_engine import ChildEngine, loaded_mebibytes

logger = logging.getLogger(__name__)


class FrozenEngine:
    """Loads the engine and stops it. When it exits, so does the replica, and its supervisor starts another."""

    def __init__(self, context: ReplicaContext, role: str, names: Mapping[str, str]) -> None:
        """`names`: the role's settings, by the names under which the engine knows them."""
        self._context = context
        self._role = role
        self._names = names
        self._process = psutil.Process()
        self.child: ChildEngine | None = None
        """The engine, once its model is loaded."""
        self.loading = False
        self.detail = ""
        """The reason why it isn't loaded yet."""

    @property
    def loaded_mebibytes(self) -> int:
        """Progress of loading; 0 before and after."""
        return loaded_mebibytes(self._process) if self.loading else 0

    @property
    def rss_bytes(self) -> float:
        """Memory of this process."""
        return float(self._process.memory_info().rss)

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
        """Load the model in `folder`, on GPUs that are leased for it.

        Args:
            folder: the model.
            config: the run's configuration.
            settings: those of the engine.
            on_tokens, for_logprobs: those of ChildEngine.start.
            takes_turns: whether it waits for its turn on GPUs that it shares with a trainer.

        Raises:
            FailedPrecondition: the engine doesn't start; settings have the role's names.
        """
        role = ROLES[self._role]
        share = role.gpu_share(config)
        gpus = await self._context.gpus.lease(role.gpus(config), share)
        if takes_turns:
            await self._context.take_turn(self._set_detail)
        self.detail, self.loading = f"loading {folder.name}", True
        own = self._context.settings
        try:
            self.child = await ChildEngine.start(
                folder,
                settings,
                environment=gpu_environment(gpus, share),
                name=own.replica_id,
                role=self._role,
                log_level=own.log_level,
                python=own.engine_python,
                on_exit=self._on_exit,
                on_tokens=on_tokens,
                colocate=takes_turns,
                frozen=True,
                for_logprobs=for_logprobs,
                gpu_lease=self._context.gpus.child_lease if gpus else None,
            )
        except RpcError as error:
            message = str(error)
            for name, of_role in self._names.items():
                message = message.replace(name, of_role)
            raise FailedPrecondition(message) from error
        finally:
            self.loading = False
        self.detail = ""
        logger.info("%s is loaded (process %d)", folder.name, self.child.pid)
        return self.child

    async def stop(self) -> None:
        """Stop the engine, if there is one."""
        engine, self.child, self.detail = self.child, None, ""
        if engine is not None:
            await engine.stop()

    def _set_detail(self, detail: str) -> None:
        self.detail = detail

    def _on_exit(self, ended: ChildExit) -> None:
        if not self.loading:  # else `load` raises
            self._context.give_up(f"the {self._role}'s engine {ended}")
