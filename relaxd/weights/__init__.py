"""Weight transfer from trainer to engines: groups, buckets, checksums, receipts; and NCCL's environment in every
process of a weight group; and the reason why a trainer doesn't send weights any more.

Imports no torch, for the parents that start these processes.
"""

NCCL_ENVIRONMENT = {
    # SGLang turns it off in its processes. If the two ends differ, they exchange incompatible handles, and the first
    # broadcast fails with "invalid argument" at one end while the other one waits.
    "NCCL_CUMEM_ENABLE": "0",
    # NVLink multicast needs CUMEM, and is not available on hosts whose switch is shared among tenants.
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables of NCCL and their values, the same in all members."""
WEIGHTS_CHANGED = "WEIGHTS_CHANGED"
"""Reason of FAILED_PRECONDITION: the trainer has, or is making, newer weights than the requested ones."""
