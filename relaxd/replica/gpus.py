"""The GPUs of this machine, as NVML reports them, and a replica's leases on them.

Every replica may see every GPU. The coordinator's leases, by UUID, decide which ones its child processes use. Querying
NVML creates no CUDA context, so a parent process uses no GPU memory.
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

from relaxd.process.gpu_lease import GpuLease, LeaseOver
from relaxd.rpc.errors import ResourceExhausted, explain
from relaxd.v1.coordinator_pb2 import LeaseGpusRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub

CALL_SECONDS = 5.0
"""Deadline of a LeaseGpus call to the coordinator, in seconds."""
RETRY_SECONDS = 1.0
TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Status codes after which a LeaseGpus call is repeated: the coordinator is away, or the GPUs' holder has just
ended."""
LEASE_MARGIN = 1 / 6
"""Fraction of a lease's duration that is reserved for killing the children and freeing the GPUs' memory."""
SHARE_VARIABLE = "RELAXD_GPU_SHARE"
"""Environment variable with the share of GPU memory that a child process may use, above 0 to 1; unset: 1."""

STEADY_SECONDS, STEADY_TICK_SECONDS, STEADY_LIMIT_SECONDS = 1.0, 0.2, 60.0
STEADY_BYTES = 64 << 20
"""Maximum change, in bytes, of a GPU's memory in use that still counts as steady."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG device."""

    uuid: str
    """UUID of the GPU (GPU-...) or of the MIG device (MIG-...)."""
    index: int
    """NVML's index of the GPU. A MIG device has the index of its GPU."""

    @property
    def is_mig(self) -> bool:
        """True if the GPU is a MIG device."""
        return self.uuid.startswith("MIG-")


def visible_gpus(environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs that programs started with `environment` (default: this process's) see, in their order.

    Returns () without an NVIDIA driver. The first call may block for seconds.
    """
    environment = os.environ if environment is None else environment
    return select_visible(_all_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))


def select_visible(gpus: Sequence[Gpu], selection: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES = `selection` selects, in its order; None selects all.

    The selection lists indices (in NVML's order, which is CUDA's on machines whose GPUs are alike) or unique prefixes
    of UUIDs. The first unknown entry ends the list, as in CUDA.
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


def gpu_environment(gpus: Sequence[Gpu], share: float = 1.0) -> dict[str, str]:
    """Return environment variables by which a child process uses only these GPUs, and only a share of their memory.

    GPUs that aren't MIG devices are named by index in PCI bus order, which is NVML's, and not by UUID, because SGLang's
    all-reduce parses the entries as numbers.
    """
    names = [gpu.uuid if gpu.is_mig else str(gpu.index) for gpu in gpus]
    shared = {SHARE_VARIABLE: repr(share)} if share < 1 else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **shared}


def gpu_share() -> float:
    """Return the share of GPU memory that this process may use, from the variables that `gpu_environment` returns."""
    return float(os.environ.get(SHARE_VARIABLE, "1"))


def gpu_gauges(gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return gpu_memory_bytes (bytes in use, summed over the GPUs) and gpu_utilisation (mean, 0 to 1).

    A measurement that no GPU reports is left out.
    """
    nvml = load_nvml()
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
    """Return the bytes in use on each GPU, by all processes; [] if NVML doesn't report them."""
    nvml = load_nvml()
    if nvml is None:
        return []
    try:
        return [nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).used for gpu in gpus]
    except nvml.NVMLError:
        return []


async def wait_until_steady(
    read: Callable[[], Sequence[int]],
    on_wait: Callable[[str], None],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until the memory in use on each GPU has not changed for a second, at most a minute.

    SGLang compares the free memory of its GPUs when it starts and fails if they differ, which happens while a process
    that used them before is still ending. `read` returns bytes in use by GPU; `on_wait` is called with the reason.
    """
    before, same = list(read()), 0.0
    for _ in range(int(STEADY_LIMIT_SECONDS / STEADY_TICK_SECONDS)):
        if not before or same >= STEADY_SECONDS:
            return
        await sleep(STEADY_TICK_SECONDS)  # named: `on_wait` reports it
        now = list(read())
        changed = [index for index, (a, b) in enumerate(zip(before, now, strict=True)) if abs(a - b) > STEADY_BYTES]
        same = 0.0 if changed else same + STEADY_TICK_SECONDS
        for index in changed:
            on_wait(f"waiting until memory in use on the engine's GPU {index} is steady ({now[index] >> 20} MiB now)")
        before = now
    logger.warning("memory in use on the GPUs still changes after %.0f s: starting all the same", STEADY_LIMIT_SECONDS)


def load_nvml() -> Any:
    """Return the initialised module pynvml; None if there is no working NVIDIA driver."""
    return _nvml_or_problem()[0]


def nvml_problem() -> str:
    """Return the reason why pynvml can't be used; "" if it can."""
    return _nvml_or_problem()[1]


@functools.cache
def _nvml_or_problem() -> tuple[Any, str]:
    try:
        import pynvml
    except ModuleNotFoundError:
        logger.warning("nvidia-ml-py is not installed: GPUs, if there are any, are not used")
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("no GPUs: %s", error)
        return None, str(error)
    return pynvml, ""


@functools.cache
def _all_gpus() -> tuple[Gpu, ...]:
    nvml = load_nvml()
    if nvml is None:
        return ()
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        devices = _mig_devices(nvml, handle) or [handle]
        gpus += [Gpu(nvml.nvmlDeviceGetUUID(device), index) for device in devices]
    return tuple(gpus)


def _mig_devices(nvml: Any, handle: Any) -> list[Any]:
    """Return NVML's handles of a GPU's MIG devices; [] for an undivided GPU."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current == nvml.NVML_DEVICE_MIG_ENABLE else 0
    except nvml.NVMLError:  # a GPU without MIG
        return []
    devices = []
    for slot in range(slots):
        try:
            devices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
        except nvml.NVMLError:  # an empty slot
            continue
    return devices


class GpuLeases:
    """One replica's leases on GPUs. Use it only in the event loop in which it was created.

    Args:
        replica_id: id of the replica.
        visible: GPUs that the replica sees.
        coordinator: stub of the coordinator, which grants leases.
    """

    def __init__(self, replica_id: str, visible: Sequence[Gpu], coordinator: CoordinatorStub) -> None:
        self.visible = tuple(visible)
        self.held: tuple[Gpu, ...] = ()
        """GPUs that this replica's child processes may use."""
        self.child_lease = GpuLease(self._on_lease_over)
        """Lease of the child processes that use GPUs, to pass to Child.start. It kills them if no heartbeat was
        answered in time."""
        self.waiting = ""
        """Reason why a call of `lease` is waiting for GPUs; empty if none is waiting."""
        self.on_lost: Callable[[], None] = lambda: None
        """Function that is called, in the event loop, whenever the lease was over and children were killed."""
        self._loop = asyncio.get_running_loop()
        self._share = 1.0
        """Share of each held GPU's memory that is leased, above 0 to 1."""
        self._until = 0.0
        """End of the children's lease by the monotonic clock, in seconds. Each answered heartbeat moves it."""
        self._replica_id = replica_id
        self._coordinator = coordinator
        self._settled = True
        """True if the coordinator's record of this replica's GPUs is known to match `held`."""
        self._calling = asyncio.Lock()

    async def lease(self, count: int, share: float = 1.0) -> tuple[Gpu, ...]:
        """Lease a share of the memory of `count` visible GPUs, instead of GPUs held before, and return these GPUs.

        Returns () if no GPU is visible; children then use the CPU. Waits for GPUs whose holders have just ended, and
        while the coordinator is away; `waiting` has the reason. Raises ResourceExhausted when other replicas hold too
        many (the message names them), LeaseOver when heartbeats are not answered, and grpc.aio.AioRpcError.
        """
        if not self.visible:
            return ()
        async with self._calling:
            self._settled = False
            self.held, self._share = (), share
            uuids = await self._request_with_retries(count)
            if uuids:
                try:
                    self.child_lease.begin(self._until)
                except LeaseOver:
                    self._settled = False
                    raise
            self.held = tuple(gpu for gpu in self.visible if gpu.uuid in uuids)
        return self.held

    def on_contact(self, sent: float, lease_seconds: float) -> None:
        """Renew the children's lease: a registration or heartbeat that was sent at `sent` (monotonic) was answered.

        The coordinator counts `lease_seconds` from the message's arrival. Counting from `sent`, which is earlier, is
        safe.
        """
        self._until = sent + lease_seconds * (1 - LEASE_MARGIN)
        self.child_lease.renew(self._until)

    async def give_back(self) -> None:
        """Return all leases on GPUs to the coordinator. Children that use GPUs must have ended before. If the
        coordinator is away, `settle` repeats this later."""
        self._settled = self._settled and not self.held
        self.held = ()
        self.child_lease.give_back()
        await self.settle()

    async def settle(self) -> None:
        """Tell the coordinator that this replica holds no GPU, unless the coordinator knows or a GPU is held."""
        if self._settled or self.held or self._calling.locked():
            return
        async with self._calling:
            try:
                await self._request([], 0)
            except grpc.aio.AioRpcError as error:
                # NOT_FOUND: the coordinator forgot this replica and its leases.
                self._settled = error.code() is grpc.StatusCode.NOT_FOUND
                if not self._settled:
                    logger.warning("GPUs can't be returned yet: %s", explain(error))

    async def confirm(self) -> None:
        """Lease the GPUs that this replica holds again, after a registration.

        Raises ResourceExhausted when another replica has one of these GPUs now, and grpc.aio.AioRpcError.
        """
        if self.held:
            async with self._calling:
                await self._request([gpu.uuid for gpu in self.held], len(self.held))

    async def _request_with_retries(self, count: int) -> set[str]:
        try:
            while True:
                try:
                    return await self._request([gpu.uuid for gpu in self.visible], count)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in TRANSIENT:
                        raise
                    if not self.waiting:
                        logger.info("waiting for GPUs: %s", explain(error))
                    self.waiting = f"waiting for GPUs: {error.details()}"
                await asyncio.sleep(RETRY_SECONDS)  # named: the status has `waiting`
        finally:
            self.waiting = ""

    def _on_lease_over(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(self._lose)

    def _lose(self) -> None:
        if not self.held:  # they have been returned meanwhile
            return
        logger.error(
            "no heartbeat was answered in time: the processes that used this replica's GPUs were killed, because the "
            "coordinator may soon lease the GPUs to others"
        )
        self.held, self._settled = (), False
        self.on_lost()

    async def _request(self, candidates: list[str], count: int) -> set[str]:
        request = LeaseGpusRequest(
            replica_id=self._replica_id, candidate_uuids=candidates, count=count, share=self._share
        )
        try:
            answer = await self._coordinator.LeaseGpus(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ResourceExhausted(error.details() or explain(error)) from error
            raise
        self._settled = True
        return set(answer.gpu_uuids)
