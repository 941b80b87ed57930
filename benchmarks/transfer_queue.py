"""TransferQueue 0.1.11 for comparison with the board: put and get of the same bytes. Needs the `bench` extra."""

import importlib.util
import logging
import os
import time

import numpy as np

from relaxd.process.upkeep import freeze_objects

TIMEOUT_SECONDS = 120.0


def installed() -> bool:
    """Return whether TransferQueue is installed."""
    return importlib.util.find_spec("transfer_queue") is not None


class TransferQueue:
    """TransferQueue on ray, set up as documented, with a consumer actor in its own process."""

    def __init__(self) -> None:
        os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
        import ray
        import transfer_queue
        from omegaconf import OmegaConf

        ray.init(num_cpus=8, logging_level=logging.ERROR, include_dashboard=False, object_store_memory=2 << 30)
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        self._ray, self._queue = ray, transfer_queue
        self._client = transfer_queue.get_client()
        self._number = 0

        class Consumer:
            def __init__(self) -> None:
                import transfer_queue

                transfer_queue.init()
                self.client = transfer_queue.get_client()
                freeze_objects()  # as the board's processes do

            def read(self, partition: str, total: int, batch: int) -> int:
                got = 0
                while got < total:
                    meta = self.client.get_meta(
                        data_fields=["x"], batch_size=batch, partition_id=partition, task_name="read", mode="fetch"
                    )
                    if meta.size == 0:
                        time.sleep(0.002)
                        continue
                    got += len(self.client.get_data(meta)["x"])
                return got

        self._consumer = ray.remote(Consumer).remote()
        freeze_objects()

    def measure(self, row: np.ndarray, batch: int, total: int) -> float:
        """Return groups per second of concurrent put and get, for `total` groups with this row."""
        import torch
        from tensordict import TensorDict

        self._number += 1
        partition = f"partition-{self._number}"
        rows = torch.from_numpy(np.tile(row, (batch, 1)))
        batches = [TensorDict({"x": rows.clone()}, batch_size=batch) for _ in range(total // batch)]
        reading = self._consumer.read.remote(partition, total, batch)
        begun = time.perf_counter()
        for data in batches:
            self._client.put(data=data, partition_id=partition)
        self._ray.get(reading, timeout=TIMEOUT_SECONDS)
        taken = time.perf_counter() - begun
        self._client.clear_partition(partition)
        return total / taken

    def close(self) -> None:
        self._queue.close()
        self._ray.shutdown()
