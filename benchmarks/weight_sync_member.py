"""One process of benchmarks.weight_sync, on its own GPU: a trainer with its Learner, or an SGLang model.

It reads commands as lines of JSON. Each answer has the seconds that the command took on this side, including the GPU.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relaxd.weights import NCCL_ENVIRONMENT

os.environ.update(NCCL_ENVIRONMENT)

# isort: split
import torch
import torch.distributed as dist

from relaxd.v1 import weights_pb2
from relaxd.weights.buckets import TensorBucket, from_proto, to_proto
from relaxd.weights.weight_group import Rendezvous, host_store

TIMEOUT = 60.0
STOCK_GROUP = "stock"


class Side:
    """Commands of both sides: SGLang's own group, and NCCL alone."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.stock: Any = None

    def join_stock(self, port: int, rank: int, world_size: int) -> None:
        """Create SGLang's kind of group, with one broadcast, in which NCCL connects."""
        from sglang.srt.utils import init_custom_process_group

        self.stock = init_custom_process_group(
            backend="nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=world_size, rank=rank,
            group_name=f"{STOCK_GROUP}-{port}",
        )  # fmt: skip
        dist.broadcast(torch.zeros(1 << 20, device=self.device), src=0, group=self.stock)
        torch.cuda.synchronize()

    def raw(self, nbytes: int, repeat: int) -> None:
        """Broadcast one buffer of this size repeatedly."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        for _ in range(repeat):
            dist.broadcast(buffer, src=0, group=self.stock)

    def forget(self) -> None:
        """Free memory."""
        torch.cuda.empty_cache()


class TrainerSide(Side):
    """Megatron's model and optimizer, as in a run."""

    def load(self, folder: str, bucket_bytes: int) -> dict[str, Any]:
        """Load the model and fill the weights with random numbers, as the folder's are zeros."""
        from relaxd.config import GRPOConfig, TrainerConfig
        from services.trainer.learner.learner import Learner

        config = TrainerConfig(dtype="bfloat16", micro_batch_tokens=1024)
        self.learner = Learner(Path(folder), config, GRPOConfig(), steps=1)
        with torch.no_grad():
            for parameter in self.learner._policy.parameters():
                parameter.normal_(std=0.02)
        self.store = host_store()
        self.name = ""
        return {"port": self.store.port, **self.plan(bucket_bytes)}

    def plan(self, bucket_bytes: int) -> dict[str, Any]:
        """Plan the buckets."""
        from services.trainer.loop.weight_broadcast import WeightBroadcaster, weight_buckets

        if self.name:
            self.broadcaster.leave(self.name)
        self.buckets = weight_buckets(self.learner, bucket_bytes, first_alone=True)
        self.broadcaster = WeightBroadcaster(self.learner, self.buckets, "sglang")
        manifest = to_proto(self.buckets).SerializeToString()
        return {"manifest": manifest.hex(), "bytes": sum(bucket.nbytes for bucket in self.buckets)}

    def join(self, port: int, name: str, rank: int, world_size: int) -> None:
        """Join a weight group."""
        self.name = name
        self.broadcaster.join(Rendezvous(transport="nccl", store_port=port, name=name, world_size=world_size), TIMEOUT)

    def sync(self, name: str, checksum: bool) -> dict[str, Any]:
        """Send the weights."""
        return {"checksums": dict(self.broadcaster.broadcast(name, TIMEOUT, checksum).checksums)}

    def sync_stock(self) -> None:
        """Send as SGLang expects it: each bucket flattened."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        tensors = self.learner.iter_hf_tensors()
        for bucket in self.buckets:
            named = [next(tensors) for _ in bucket.tensors]
            flat = FlattenedTensorBucket(named_tensors=named).get_flattened_tensor()
            dist.broadcast(flat, src=0, group=self.stock)


class EngineSide(Side):
    """An SGLang model, as in its scheduler."""

    def load(self, folder: str, port: int) -> None:
        """Create the model with dummy weights."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.model_loader import get_model
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        args = ServerArgs(
            model_path=folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True,
            attention_backend="triton", sampling_backend="pytorch", grammar_backend="none",
        )  # fmt: skip
        set_global_server_args_for_scheduler(args)
        init_distributed_environment(
            backend="nccl", world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}"
        )
        initialize_model_parallel(tensor_model_parallel_size=1)
        config = ModelConfig.from_server_args(args)
        initialize_dp_attention(server_args=args, model_config=config)
        self.model = get_model(
            model_config=config, load_config=LoadConfig(load_format="dummy"), device_config=DeviceConfig("cuda")
        )
        from services.rollout.engines.sglang.sglang_weights import SGLangWeights

        self.weights = SGLangWeights(self.model, self.device, 1)
        self.buckets: list[TensorBucket] = []

    def join(self, port: int, name: str, rank: int, world_size: int, manifest: str) -> None:
        """Join a weight group."""
        sent = weights_pb2.WeightManifest.FromString(bytes.fromhex(manifest))
        self.buckets = from_proto(sent)
        rendezvous = Rendezvous(transport="nccl", store_port=port, name=name, world_size=world_size)
        self.weights.join(rendezvous, rank, sent, TIMEOUT)

    def sync(self, name: str, checksum: bool) -> dict[str, Any]:
        """Receive the weights."""
        begun = self.weights.begin(name, TIMEOUT)
        return {"checksums": self.weights.finish(begun, checksum=checksum, commit=lambda: None).checksums}

    def sync_stock(self) -> None:
        """Receive by SGLang's own code."""
        from sglang.srt.model_executor.model_runner import ModelRunner

        runner: Any = SimpleNamespace(
            _model_update_group={STOCK_GROUP: self.stock}, model=self.model, device=self.device
        )  # fmt: skip
        runner._update_bucketed_weights_from_distributed = partial(
            ModelRunner._update_bucketed_weights_from_distributed, runner
        )
        for bucket in self.buckets:
            names, dtypes, shapes = zip(*((s.name, s.dtype, list(s.shape)) for s in bucket.tensors), strict=True)
            done, reason = ModelRunner.update_weights_from_distributed(
                runner, names, dtypes, shapes, STOCK_GROUP, load_format="flattened_bucket"
            )
            if not done:
                raise RuntimeError(reason)


def main() -> None:
    """Answer each line with one line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stdout, too
    side: Any = TrainerSide() if sys.argv[1] == "trainer" else EngineSide()
    for line in sys.stdin:
        command = json.loads(line)
        action = getattr(side, command.pop("do"))
        started = time.monotonic()
        answer = action(**command) or {}
        torch.cuda.synchronize()
        print(json.dumps({**answer, "seconds": time.monotonic() - started}), file=answers)


if __name__ == "__main__":
    main()
