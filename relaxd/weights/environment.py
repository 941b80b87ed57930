"""What NCCL's environment must be in every process of a weight group, before NCCL is first used there.

It imports no torch: parents that start the processes use it, too.
"""

NCCL_ENVIRONMENT = {
    # SGLang turns it off in its own processes. With it on at one end only, the ends exchange handles of different
    # kinds, and the first broadcast fails with "invalid argument" at one end while the other one waits.
    "NCCL_CUMEM_ENABLE": "0",
    # Multicast through NVLink's switches needs the former; on hosts that share a switch among tenants it can't be had.
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables and their values; all members must agree on them."""
