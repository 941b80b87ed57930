"""One rank of a world that broadcasts its weights tensor by tensor, as over NCCL, but over gloo.

RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as for torchrun; arguments: model, parallel sizes in JSON, the store's
port, the group's name and size
"""

import json
import os
import sys
from pathlib import Path

from relaxd.weights.weight_group import Rendezvous
from services.trainer.loop import weight_broadcast
from services.trainer.loop.weight_broadcast import WeightBroadcaster, weight_buckets
from tests.integration.trainer.trainer_worlds import Job, make_learner

BUCKET_BYTES = 30_000


def main() -> None:
    """Send twice; print the result of the second time."""
    model, parallel, port, name, size = sys.argv[1:]
    learner = make_learner(Job(Path(model), json.loads(parallel)), int(os.environ["WORLD_SIZE"]))
    weight_broadcast.broadcast_layout = lambda transport, engine: "direct"  # type: ignore[assignment]
    broadcaster = WeightBroadcaster(learner, weight_buckets(learner, BUCKET_BYTES), "sglang")
    if learner.world.gather.source:
        rendezvous = Rendezvous(transport="gloo", store_port=int(port), name=name, world_size=int(size))
        broadcaster.join(rendezvous, 60)
    for checksums in (False, True):
        result = broadcaster.broadcast(name, 60, checksums)
    print(json.dumps({"bytes": result.bytes, "checksums": dict(result.checksums)}), flush=True)


if __name__ == "__main__":
    main()
