"""A process that plays the trainer's side of weight groups, told line by line in JSON what to do.

The weights of version v are those of the model in the folder plus noise seeded by v; version 0 is the model itself.
Every third version has the vision tower of the one before.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from relaxd.weights.buckets import TensorSpec, checksum, pack, plan_buckets, to_proto
from relaxd.weights.weight_group import Rendezvous, WeightGroup, WeightGroupError, host_store


def weights_of(folder: Path, version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version, by Hugging Face name; tied tensors once."""
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        noise = torch.randn(tensor.shape, generator=generator) * 0.05 if version else 0.0
        tensors[name] = tensor.float() + noise
    if version and version % 3 == 0:
        before = weights_of(folder, version - 1)
        tensors |= {name: tensor for name, tensor in before.items() if ".visual." in name}
    return tensors


def main() -> None:
    """Answer each line with one line."""
    folder, bucket_bytes = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = host_store()
    specs = [TensorSpec(name, torch.float32, tuple(t.shape)) for name, t in weights_of(folder, 0).items()]
    buckets = plan_buckets(specs, bucket_bytes, source_rank=0)
    group: WeightGroup | None = None
    print(json.dumps({"port": store.port, "manifest": to_proto(buckets).SerializeToString().hex()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if command["do"] == "connect":
                if group is not None:
                    group.abort()
                place = {"name": command["name"], "world_size": command["world_size"]}
                group = WeightGroup(Rendezvous(transport="gloo", store_port=store.port, **place), 0)
                group.connect(20)
            else:
                assert group is not None
                tensors = weights_of(folder, command["version"])
                for bucket in buckets[: command["buckets"]]:
                    flat = pack(bucket, tensors, torch.empty(bucket.nbytes, dtype=torch.uint8))
                    group.broadcast(flat, 0, 20)
                answer["checksums"] = {name: checksum(tensor) for name, tensor in tensors.items()}
        except WeightGroupError as error:
            answer["error"] = str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()


def with_weights(folder: Path, version: int) -> PreTrainedModel:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.load_state_dict(weights_of(folder, version), strict=False)
    return reference
