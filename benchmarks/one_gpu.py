"""Run a service that shares the first GPU of this machine with others: `python -m benchmarks.one_gpu NAME MODULE`.

A benchmark that isn't about speed needs no more than one GPU then. Each service has its own name: the coordinator
leases it a GPU "GPU-NAME", and NCCL takes the services for hosts that are connected by sockets.
Nothing limits their memory.
"""

import os
import runpy
import sys

from relaxd.replica import gpus


def main() -> None:
    """Run the module."""
    name, module = sys.argv[1:3]
    sys.argv[1:3] = []
    os.environ["NCCL_HOSTID"] = name
    gpus._all_gpus = lambda: (gpus.Gpu(f"GPU-{name}", 0),)  # type: ignore[assignment]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
