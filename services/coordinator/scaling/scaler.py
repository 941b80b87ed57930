"""Scale requests: accepted one at a time for each role, carried out replica by replica."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from relaxd.rpc.errors import AlreadyExists, FailedPrecondition, NotFound
from services.coordinator.fleet.registry import Registry, Replica
from services.coordinator.runs.run_manager import RunManager
from services.coordinator.scaling.launchers import EXTERNAL, NO_LAUNCHER, Launchers
from services.coordinator.scaling.replica_drive import ReplicaDrive
from services.coordinator.scaling.scale_log import ScaleLog
from services.coordinator.state.records import Direction, ScaledReplica, ScaleRecord, ScaleSpec
from services.coordinator.state.retries import finish
from services.coordinator.state.store import AsyncStore

logger = logging.getLogger(__name__)


class Scaler:
    """Accepts and carries out scale requests. Lives in the event loop."""

    def __init__(
        self,
        store: AsyncStore,
        registry: Registry,
        runs: RunManager,
        launchers: Launchers,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`on_error` gets errors that end the coordinator, such as Superseded."""
        self._registry = registry
        self._runs = runs
        self._launchers = launchers
        self._on_error = on_error
        self.log = ScaleLog(store, registry.changed)
        self._accepting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def resume(self) -> None:
        """Load the requests, and resume those that an earlier coordinator left in progress."""
        await self.log.load()
        for record in self.log.in_progress():
            logger.info("resuming scale request %s (%s)", record.request_id, record.state.lower())
            self._start(record.request_id)

    async def close(self) -> None:
        """Stop working; the next coordinator resumes the requests in progress."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def accept(self, request_id: str, spec: ScaleSpec) -> ScaleRecord:
        """Start a request, or return the existing one if this repeats it.

        Raises AlreadyExists: the id belongs to a different request; FailedPrecondition: another request of the role is
        in progress, or this one is impossible; NotFound: no such replica.
        """
        return await finish(self._accept(request_id, spec), "a scale request")

    async def _accept(self, request_id: str, spec: ScaleSpec) -> ScaleRecord:
        async with self._accepting:
            current = next((record for record in self.log.in_progress() if record.spec.role == spec.role), None)
            known = self.log.find(request_id) if request_id else current
            if known is not None and known.spec == spec:
                return known
            if request_id and known is not None:
                raise AlreadyExists(f"scale request {request_id!r} asked for something else: choose another request_id")
            if current is not None:
                raise FailedPrecondition(
                    f"scale request {current.request_id!r} is in progress ({current.state.lower()}), and only one of "
                    f"role {spec.role} may be: wait for it, or cancel it",
                    reason="SCALE_REQUEST_IN_PROGRESS",
                    subject=current.request_id,
                )
            request_id = request_id or f"scale-{secrets.token_hex(3)}"
            scaled = (
                self._replicas_to_add(request_id, spec)
                if spec.direction == Direction.OUT
                else self._replicas_to_remove(spec)
            )
            deadline = datetime.now(UTC) + timedelta(seconds=spec.seconds)
            record = ScaleRecord(request_id=request_id, spec=spec, scaled=scaled, deadline=deadline)
            if not scaled:
                record = record.model_copy(update={"reason": "nothing to do"})
            await self.log.add(record)
            logger.info("scale request %s: %s %s", request_id, spec.direction.lower(), [r.launch_id for r in scaled])
            self._start(request_id)
            return record

    async def cancel(self, request_id: str) -> ScaleRecord:
        """Cancel a request and roll its replicas back. Raises NotFound, FailedPrecondition."""
        return await finish(self.log.cancel(request_id), "the end of a scale request")

    def live(self, role: str) -> list[Replica]:
        """Return the replicas of a role that are not draining, oldest first; only the newest per launch id."""
        replicas = [r for r in self._registry.of_role(role) if not r.draining]
        newest = {replica.launch_id or replica.replica_id: replica for replica in replicas}
        return sorted(newest.values(), key=lambda replica: replica.registered_at)

    def _replicas_to_add(self, request_id: str, spec: ScaleSpec) -> tuple[ScaledReplica, ...]:
        """Plan the replicas to create."""
        live = self.live(spec.role)
        if spec.addresses:
            there = {replica.registration.address for replica in live}
            names = [EXTERNAL + address for address in spec.addresses if address not in there]
        else:
            missing = max(0, spec.replicas - len(live))
            names = [f"{spec.role}-{request_id}-{number}" for number in range(1, missing + 1)]
            if names and not self._launchers.address:
                raise FailedPrecondition(f"{NO_LAUNCHER}, or give the addresses of services that wait to join")
        if not names:
            return ()
        share, rest = divmod(len(spec.gpu_uuids), len(names))
        if rest:
            raise FailedPrecondition(
                f"gpu_uuids: {len(spec.gpu_uuids)} GPUs can't be divided evenly among {len(names)} new replicas"
            )
        return tuple(
            ScaledReplica(launch_id=name, gpu_uuids=spec.gpu_uuids[index * share : (index + 1) * share])
            for index, name in enumerate(names)
        )

    def _replicas_to_remove(self, spec: ScaleSpec) -> tuple[ScaledReplica, ...]:
        """Plan the replicas to remove."""
        live = self.live(spec.role)
        if spec.replica_ids:
            named = (self._removable(replica_id, spec.role) for replica_id in spec.replica_ids)
            removed = list({replica.launch_id: replica for replica in named}.values())
        else:
            surplus = len(live) - spec.replicas
            scaled_out = [replica for replica in reversed(live) if replica.launch_id]
            if surplus > len(scaled_out):
                stay = len(live) - len(scaled_out)
                raise FailedPrecondition(
                    f"replicas: {stay} of the {len(live)} {spec.role} replicas were not scaled out and "
                    f"can't be removed: there can't be only {spec.replicas}"
                )
            removed = scaled_out[: max(0, surplus)]
        return tuple(
            ScaledReplica(launch_id=v.launch_id, replica_id=v.replica_id, address=v.registration.address)
            for v in removed
        )

    def _removable(self, replica_id: str, role: str) -> Replica:
        replica = self._registry.get(replica_id)
        if replica is None or replica.registration.role != role:
            raise NotFound(f"no {role} replica {replica_id!r} is registered")
        if not replica.launch_id:
            raise FailedPrecondition(f"{replica_id} was not scaled out: stop it where it was started")
        return replica

    def _start(self, request_id: str) -> None:
        task = asyncio.create_task(self._carry_out(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def _carry_out(self, request_id: str) -> None:
        drives = [
            ReplicaDrive(
                replica.launch_id,
                request_id,
                self.log,
                registry=self._registry,
                runs=self._runs,
                launchers=self._launchers,
            )
            for replica in self.log.get(request_id).scaled
            if not replica.state.ended
        ]
        tasks = [asyncio.create_task(drive.run()) for drive in drives]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        logger.info("scale request %s is %s", request_id, self.log.get(request_id).state.lower())
