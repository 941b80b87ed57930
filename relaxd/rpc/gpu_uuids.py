"""GPU UUIDs in requests."""

import re
from collections.abc import Sequence

from relaxd.rpc.errors import Violations

GPU_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/_-]{1,120}")
GPU_UUID_RULE = "must be GPU-... or MIG-..."
MAX_GPUS = 1024
"""Limit of one request."""


def check_gpu_uuids(field: str, uuids: Sequence[str], violations: Violations) -> None:
    """Check the number and the form of the GPU UUIDs in a field."""
    violations.check(len(uuids) <= MAX_GPUS, field, f"must be at most {MAX_GPUS}")
    for index, uuid in enumerate(uuids[:MAX_GPUS]):
        violations.check(GPU_UUID.fullmatch(uuid), f"{field}[{index}]", f"is {uuid!r}: it {GPU_UUID_RULE}")
