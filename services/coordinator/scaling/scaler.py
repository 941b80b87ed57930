"""Scale requests: accepted one at a time, kept in Redis, carried out replica by replica."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from relaxd.rpc.errors import AlreadyExists, FailedPrecondition, NotFound, RpcError
from relaxd.v1.replica_pb2 import Role
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Registry, Replica
from services.coordinator.runs.manager import RunManager
from services.coordinator.scaling.drive import ReplicaDrive
from services.coordinator.scaling.launchers import EXTERNAL, NO_LAUNCHER, Launchers
from services.coordinator.state.scale_records import Direction, ScaledReplica, ScaleRecord, Wish
from services.coordinator.state.store import Store, StoreUnavailable

logger = logging.getLogger(__name__)

REMEMBERED = 100
"""Requests that are kept."""


class Scaler:
    """All scale requests. Lives in the event loop."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        runs: RunManager,
        peers: Peers,
        launcher: str,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`launcher` is the launcher's address, if any; `on_error` is told of errors that are no request's own."""
        self._store = store
        self._registry = registry
        self._runs = runs
        self._peers = peers
        self._launchers = Launchers(peers, launcher, store.term)
        self._on_error = on_error
        self._records: dict[str, ScaleRecord] = {}
        """By id, oldest first."""
        self._accepting = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def launcher(self) -> str:
        """The launcher's address; empty: there is none."""
        return self._launchers.address

    async def take_up(self) -> None:
        """Go on with the request that an earlier coordinator left, if there is one."""
        records = await asyncio.to_thread(self._store.scaling)
        self._records = {record.request_id: record for record in records}
        if (record := self.in_progress()) is not None:
            logger.info("going on with scale request %s (%s)", record.request_id, record.state.lower())
            self._go(record.request_id)

    async def close(self) -> None:
        """Stop working; the next coordinator goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # --- what people ask for ------------------------------------------------------------------------------------

    def in_progress(self) -> ScaleRecord | None:
        """The request that has not ended."""
        return next((record for record in self._records.values() if not record.state.ended), None)

    def all(self) -> list[ScaleRecord]:
        """The requests, newest first."""
        return list(reversed(self._records.values()))

    def get(self, request_id: str) -> ScaleRecord:
        """A request; without an id, the newest. Raises NotFound."""
        if not request_id and not self._records:
            raise NotFound("there is no scale request yet")
        record = self._records.get(request_id or next(reversed(self._records), ""))
        if record is None:
            raise NotFound(f"there is no scale request {request_id!r}")
        return record

    async def accept(self, request_id: str, wish: Wish) -> ScaleRecord:
        """Begin with a request, or find the one that this is.

        Raises AlreadyExists: the id is one of another request; FailedPrecondition: another is in progress, or it can't
        be done; NotFound: no such replica.
        """
        return await _to_the_end(self._accept(request_id, wish))

    async def _accept(self, request_id: str, wish: Wish) -> ScaleRecord:
        async with self._accepting:
            current = self.in_progress()
            known = self._records.get(request_id) if request_id else current
            if known is not None and known.wish == wish:
                return known
            if request_id and known is not None:
                raise AlreadyExists(f"scale request {request_id!r} asked for something else: choose another request_id")
            if current is not None:
                raise FailedPrecondition(
                    f"scale request {current.request_id!r} is in progress ({current.state.lower()}), and one is at a "
                    "time: wait for it, or cancel it"
                )
            request_id = request_id or f"scale-{secrets.token_hex(3)}"
            scaled = self._outwards(request_id, wish) if wish.direction == Direction.OUT else self._inwards(wish)
            deadline = datetime.now(UTC) + timedelta(seconds=wish.seconds)
            record = ScaleRecord(request_id=request_id, wish=wish, scaled=scaled, deadline=deadline)
            if not scaled:
                record = record.model_copy(update={"reason": "nothing to do"})
            forget = list(self._records)[: len(self._records) + 1 - REMEMBERED]
            async with self._saving:
                await self._write(record, forget)
            logger.info("scale request %s: %s %s", request_id, wish.direction.lower(), [r.launch_id for r in scaled])
            self._go(request_id)
            return record

    async def cancel(self, request_id: str) -> ScaleRecord:
        """Roll back what can be. Raises NotFound; FailedPrecondition: nothing can."""
        return await _to_the_end(self._cancel(request_id))

    async def _cancel(self, request_id: str) -> ScaleRecord:
        async with self._saving:
            current = self.in_progress()
            if not request_id and current is None:
                raise FailedPrecondition("no scale request is in progress")
            record = self.get(request_id or (current.request_id if current else ""))
            if record.cancelled:
                return record
            if not any(replica.state.can_go_back for replica in record.scaled):
                raise FailedPrecondition(
                    f"scale request {record.request_id!r} is {record.state.lower()}: there is nothing left to roll back"
                )
            record = record.model_copy(update={"cancelled": True, "reason": "cancelled"})
            await self._write(record)
        self._registry.changed.fire()
        return record

    # --- what has to be done --------------------------------------------------------------------------------------

    def _outwards(self, request_id: str, wish: Wish) -> tuple[ScaledReplica, ...]:
        """The replicas to create."""
        live = self._live(wish.role)
        if wish.addresses:
            there = {replica.registration.address for replica in live}
            names = [EXTERNAL + address for address in wish.addresses if address not in there]
        else:
            missing = max(0, wish.replicas - len(live))
            names = [f"{wish.role.lower()}-{request_id}-{number}" for number in range(1, missing + 1)]
            if names and not self._launchers.address:
                raise FailedPrecondition(f"{NO_LAUNCHER}, or give the addresses of services that wait to be asked")
        if not names:
            return ()
        share, rest = divmod(len(wish.gpu_uuids), len(names))
        if rest:
            raise FailedPrecondition(
                f"gpu_uuids: {len(wish.gpu_uuids)} GPUs can't be dealt out evenly to {len(names)} new replicas"
            )
        return tuple(
            ScaledReplica(launch_id=name, gpu_uuids=wish.gpu_uuids[index * share : (index + 1) * share])
            for index, name in enumerate(names)
        )

    def _inwards(self, wish: Wish) -> tuple[ScaledReplica, ...]:
        """The replicas to remove."""
        live = self._live(wish.role)
        if wish.replica_ids:
            named = (self._victim(replica_id, wish.role) for replica_id in wish.replica_ids)
            victims = list({replica.launch_id: replica for replica in named}.values())
        else:
            surplus = len(live) - wish.replicas
            scaled_out = [replica for replica in reversed(live) if replica.launch_id]
            if surplus > len(scaled_out):
                stay = len(live) - len(scaled_out)
                raise FailedPrecondition(
                    f"replicas: {stay} of the {len(live)} {wish.role.lower()} replicas were not scaled out, and stay: "
                    f"there can't be only {wish.replicas}"
                )
            victims = scaled_out[: max(0, surplus)]
        return tuple(
            ScaledReplica(launch_id=v.launch_id, replica_id=v.replica_id, address=v.registration.address)
            for v in victims
        )

    def _victim(self, replica_id: str, role: str) -> Replica:
        replica = self._registry.get(replica_id)
        if replica is None or replica.registration.role != Role.Value(f"ROLE_{role}"):
            raise NotFound(f"no {role.lower()} replica {replica_id!r} is registered")
        if not replica.launch_id:
            raise FailedPrecondition(f"{replica_id} was not scaled out, so it stays: end it where it was started")
        return replica

    def _live(self, role: str) -> list[Replica]:
        """The replicas of a role that are not on their way out, oldest first; of one launch id, the newest."""
        replicas = [r for r in self._registry.of_role(Role.Value(f"ROLE_{role}")) if not r.draining]
        newest = {replica.launch_id or replica.replica_id: replica for replica in replicas}
        return sorted(newest.values(), key=lambda replica: replica.registered_at)

    # --- doing it ---------------------------------------------------------------------------------------------------

    def _go(self, request_id: str) -> None:
        self._task = asyncio.create_task(self._carry_out(request_id))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def _carry_out(self, request_id: str) -> None:
        async def save(launch_id: str, changes: dict[str, Any], unless_cancelled: bool) -> bool:
            async with self._saving:
                record = self._records[request_id]
                if unless_cancelled and record.cancelled:
                    return False
                scaled = tuple(
                    replica.model_copy(update=changes) if replica.launch_id == launch_id else replica
                    for replica in record.scaled
                )
                await self._write_patiently(
                    record.model_copy(update={"scaled": scaled, "update_time": datetime.now(UTC)})
                )
            self._registry.changed.fire()
            return True

        drives = [
            ReplicaDrive(
                replica.launch_id,
                lambda: self._records[request_id],
                save,
                self._registry,
                self._runs,
                self._peers,
                self._launchers,
            )
            for replica in self._records[request_id].scaled
            if not replica.state.ended
        ]
        tasks = [asyncio.create_task(drive.run()) for drive in drives]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        record = self._records[request_id]
        logger.info("scale request %s is %s", request_id, record.state.lower())

    async def _write(self, record: ScaleRecord, forget: Sequence[str] = ()) -> None:
        """Replace a record, in Redis first. Hold `_saving`. Raises StoreUnavailable."""
        await asyncio.to_thread(self._store.save_scaling, record, forget)
        self._records[record.request_id] = record
        for request_id in forget:
            del self._records[request_id]

    async def _write_patiently(self, record: ScaleRecord) -> None:
        """Replace a record as soon as Redis is there."""
        while True:
            try:
                return await self._write(record)
            except StoreUnavailable as error:
                logger.warning("scale request %s waits for Redis: %s", record.request_id, error)
                await asyncio.sleep(0.5)


async def _to_the_end(work: Coroutine[Any, Any, ScaleRecord]) -> ScaleRecord:
    """Wait for work of which a caller that goes away must not leave half."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_after_the_caller)
        raise


def _after_the_caller(task: "asyncio.Task[ScaleRecord]") -> None:
    """Say what the caller is no longer there to hear."""
    if not task.cancelled() and (error := task.exception()) is not None:
        bug = None if isinstance(error, RpcError) else error
        logger.warning("a scale request whose caller had gone came to nothing: %s", error, exc_info=bug)
