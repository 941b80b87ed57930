"""Weight transfer from trainer to engines: groups, buckets, checksums and receipts.

This file imports no torch, because parents that start the processes of weight groups import it.
"""

NCCL_ENVIRONMENT = {
    # SGLang turns it off in its processes. If the two ends differ, they exchange incompatible handles, and the first
    # broadcast fails with "invalid argument" at one end while the other one waits.
    "NCCL_CUMEM_ENABLE": "0",
    # NVLink multicast needs CUMEM, and is not available on hosts whose switch is shared among tenants.
    "NCCL_NVLS_ENABLE": "0",
}
"""NCCL's environment variables, and their values, for every process of a weight group."""
WEIGHTS_CHANGED = "WEIGHTS_CHANGED"
"""Reason of the status FAILED_PRECONDITION: the trainer can't send the requested weights, because it has or is
computing newer weights."""
