"""The GPUs of this process's machine, as NVML shows them, and the leases on them.

Every replica may see every GPU: which ones its child processes use is settled by leases that the coordinator grants, by
UUID. NVML is asked without making a CUDA context, so that a parent process takes no memory of a GPU.
"""

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from relaxd.rpc.errors import ResourceExhausted, explain
from relaxd.rpc.gpu_lease import GpuLease, LeaseOver
from relaxd.v1.coordinator_pb2 import LeaseGpusRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub

CALL_SECONDS = 5.0
"""Deadline of asking for GPUs, or of giving them back."""
ASK_AGAIN_SECONDS = 1.0
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Answers that may be others soon: the coordinator is away, or who holds the GPUs is gone."""
LEASE_MARGIN = 1 / 6
"""Share of a lease that is left when what uses the GPUs is ended: it takes a moment until they are free."""

STEADY_SECONDS, STEADY_TICK_SECONDS, STEADY_LIMIT_SECONDS = 1.0, 0.2, 60.0
STEADY_BYTES = 64 << 20
"""A smaller change of a GPU's memory is none."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG device: a part of one."""

    uuid: str
    """GPU-... or MIG-..."""
    index: int
    """NVML's index of the (whole) GPU."""

    @property
    def is_mig(self) -> bool:
        """Whether it is a part of a GPU."""
        return self.uuid.startswith("MIG-")


def visible_gpus(environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """The GPUs that programs started with `environment` (default: this process's) can use, in the order they see them.

    None without NVML: there is no NVIDIA driver. Blocks for up to seconds the first time.
    """
    environment = os.environ if environment is None else environment
    return select_visible(_all_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))


def select_visible(gpus: Sequence[Gpu], selection: str | None) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES = `selection` leaves of all GPUs, in its order; None leaves them all.

    It lists indices (in NVML's order, which is CUDA's on machines whose GPUs are alike) or UUIDs, which may be cut
    short as long as they are unique; the first one that there isn't ends the list, as in CUDA.
    """
    if selection is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for word in selection.split(","):
        word = word.strip()
        if word.isdecimal():
            found = [gpu for gpu in gpus if gpu.index == int(word)]
        else:
            found = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
            found = found if len(found) == 1 else []
        if not found:
            break
        chosen += [gpu for gpu in found if gpu not in chosen]
    return tuple(chosen)


def gpu_environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Environment variables that let a child process use these GPUs and no others.

    Whole GPUs are named by index in the order of the bus, which is NVML's, and not by UUID: SGLang's all-reduce between
    GPUs reads the list as numbers.
    """
    names = [gpu.uuid if gpu.is_mig else str(gpu.index) for gpu in gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpu_gauges(gpus: Sequence[Gpu]) -> dict[str, float]:
    """gpu_memory_bytes, in use on all of them, and gpu_utilisation, their mean, 0 to 1; what a device doesn't tell is
    left out."""
    nvml = _nvml()
    if nvml is None or not gpus:
        return {}
    memory, utilisation = [], []
    for gpu in gpus:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            memory.append(float(nvml.nvmlDeviceGetMemoryInfo(handle).used))
            utilisation.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        except nvml.NVMLError:  # MIG devices have no utilisation, and a GPU may have fallen off the bus
            continue
    gauges = {"gpu_memory_bytes": sum(memory)} if memory else {}
    return gauges | ({"gpu_utilisation": sum(utilisation) / len(utilisation)} if utilisation else {})


def memory_used(gpus: Sequence[Gpu]) -> list[int]:
    """Bytes in use of each GPU, whoever uses them; empty where that isn't told."""
    nvml = _nvml()
    if nvml is None:
        return []
    try:
        return [nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).used for gpu in gpus]
    except nvml.NVMLError:
        return []


async def wait_until_steady(
    read: Callable[[], Sequence[int]],
    told: Callable[[str], None],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once the memory in use of several GPUs has stayed the same for a second, or after a minute.

    SGLang compares the free memory of its GPUs when it starts, and gives up if they differ: somebody who has just been
    told to go may still be giving memory back. `read` returns bytes in use by GPU; `told` hears what is waited for.
    """
    before, same = list(read()), 0.0
    for _ in range(int(STEADY_LIMIT_SECONDS / STEADY_TICK_SECONDS)):
        if not before or same >= STEADY_SECONDS:
            return
        await sleep(STEADY_TICK_SECONDS)
        now = list(read())
        changed = [index for index, (a, b) in enumerate(zip(before, now, strict=True)) if abs(a - b) > STEADY_BYTES]
        same = 0.0 if changed else same + STEADY_TICK_SECONDS
        for index in changed:
            told(f"waiting until nobody gives back memory of the engine's GPU {index} ({now[index] >> 20} MiB in use)")
        before = now
    logger.warning("memory in use of the GPUs still changes after %.0f s: starting all the same", STEADY_LIMIT_SECONDS)


@functools.cache
def _nvml() -> Any:
    """The initialised module pynvml; None without a driver."""
    try:
        import pynvml
    except ModuleNotFoundError:
        logger.warning("nvidia-ml-py is not installed: GPUs, if there are any, are not seen")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("no GPUs: %s", error)
        return None
    return pynvml


@functools.cache
def _all_gpus() -> tuple[Gpu, ...]:
    nvml = _nvml()
    if nvml is None:
        return ()
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        devices = _mig_devices(nvml, handle) or [handle]
        gpus += [Gpu(nvml.nvmlDeviceGetUUID(device), index) for device in devices]
    return tuple(gpus)


def _mig_devices(nvml: Any, handle: Any) -> list[Any]:
    """Handles of the parts that a GPU is divided into; none for a whole one."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current == nvml.NVML_DEVICE_MIG_ENABLE else 0
    except nvml.NVMLError:  # a GPU that can't be divided
        return []
    devices = []
    for slot in range(slots):
        try:
            devices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
        except nvml.NVMLError:  # an empty slot
            continue
    return devices


class GpuLeases:
    """What one replica has leased of the GPUs that it sees. Lives in its event loop.

    Args:
        replica_id: the replica.
        visible: what it sees.
        coordinator: who grants leases.
    """

    def __init__(self, replica_id: str, visible: Sequence[Gpu], coordinator: CoordinatorStub) -> None:
        self.visible = tuple(visible)
        self.held: tuple[Gpu, ...] = ()
        """What children may use."""
        self.lease_of_children = GpuLease(self._over)
        """What ends children when this replica was out of touch for too long."""
        self.waiting = ""
        """What `lease` waits for; empty while it doesn't."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when children were ended because the lease was over: the run has to be started anew."""
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        """When children have to be gone unless another heartbeat is answered, by the monotonic clock."""
        self._replica_id = replica_id
        self._coordinator = coordinator
        self._settled = True
        """Whether the coordinator knows what is held, and nothing else."""
        self._asking = asyncio.Lock()

    async def lease(self, count: int) -> tuple[Gpu, ...]:
        """Hold `count` of the GPUs, and no others.

        Where no GPU is to be seen, the answer is () and the children work on the CPU. Waits for GPUs whose holders are
        gone, and for the coordinator; `waiting` says so. Raises ResourceExhausted: others hold too many; LeaseOver: no
        heartbeat is answered; grpc.aio.AioRpcError.
        """
        if not self.visible:
            return ()
        async with self._asking:
            self._settled = False
            self.held = ()
            uuids = await self._ask_patiently(count)
            if uuids:
                try:
                    self.lease_of_children.begin(self._until)
                except LeaseOver:
                    self._settled = False
                    raise
            self.held = tuple(gpu for gpu in self.visible if gpu.uuid in uuids)
        return self.held

    def heartbeat_answered(self, sent: float, lease_seconds: float) -> None:
        """The coordinator has heard a registration or heartbeat, which was sent at a time by the monotonic clock.

        It counts `lease_seconds` from when it heard it, which was later; so whoever counts from the sending is earlier.
        """
        self._until = sent + lease_seconds * (1 - LEASE_MARGIN)
        self.lease_of_children.renew(self._until)

    async def give_back(self) -> None:
        """Hold none: the children that used them are gone. If the coordinator is away, `settle` tells it later."""
        self._settled = self._settled and not self.held
        self.held = ()
        self.lease_of_children.give_back()
        await self.settle()

    async def settle(self) -> None:
        """Tell the coordinator that nothing is held, if it may think otherwise."""
        if self._settled or self.held or self._asking.locked():
            return
        async with self._asking:
            try:
                await self._ask([], 0)
            except grpc.aio.AioRpcError as error:
                self._settled = error.code() is grpc.StatusCode.NOT_FOUND  # forgotten, with what it held
                if not self._settled:
                    logger.warning("GPUs can't be given back yet: %s", explain(error))

    async def confirm(self) -> None:
        """After a time in which the coordinator did not know this replica: hold on to what is held.

        Raises ResourceExhausted: another replica has it now; grpc.aio.AioRpcError.
        """
        if self.held:
            async with self._asking:
                await self._ask([gpu.uuid for gpu in self.held], len(self.held))

    async def _ask_patiently(self, count: int) -> set[str]:
        try:
            while True:
                try:
                    return await self._ask([gpu.uuid for gpu in self.visible], count)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in PASSING:
                        raise
                    if not self.waiting:
                        logger.info("waiting for GPUs: %s", explain(error))
                    self.waiting = f"waiting for GPUs: {error.details()}"
                await asyncio.sleep(ASK_AGAIN_SECONDS)
        finally:
            self.waiting = ""

    def _over(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._lost)

    def _lost(self) -> None:
        if not self.held:  # they have been given back meanwhile
            return
        logger.error(
            "no heartbeat was answered for so long that the coordinator may soon give this replica's GPUs to others: "
            "what used them has been ended"
        )
        self.held, self._settled = (), False
        self.on_lost()

    async def _ask(self, candidates: list[str], count: int) -> set[str]:
        request = LeaseGpusRequest(replica_id=self._replica_id, candidate_uuids=candidates, count=count)
        try:
            answer = await self._coordinator.LeaseGpus(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ResourceExhausted(error.details() or explain(error)) from error
            raise
        self._settled = True
        return set(answer.gpu_uuids)
