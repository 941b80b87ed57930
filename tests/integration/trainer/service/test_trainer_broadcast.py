"""Broadcasts tensor by tensor: what the ranks of a world send is the model, whoever holds which part of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relaxd.models.layouts import Layout
from relaxd.weights.buckets import TensorSpec, checksum, piece_bytes, pieces, plan_buckets
from relaxd.weights.weight_group import Rendezvous, WeightGroup, host_store
from services.trainer.model.architectures import read_architecture
from services.trainer.model.hf_weights import hf_tensor_specs
from tests.integration.trainer.service.broadcasting_ranks import BUCKET_BYTES
from tests.integration.trainer.trainer_worlds import make_model, start_ranks
from tests.kit.ports import free_port
from tests.kit.processes import kill

PATIENCE = 120.0
"""Longest wait for anything, in seconds."""


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ["pipeline_parallel", "tensor_parallel"])
def test_what_is_sent_directly_is_the_model(arrangement: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    stages = 2 if arrangement == "pipeline_parallel" else 1
    store = host_store()
    arguments = [str(model), json.dumps({arrangement: 2}), str(store.port), "group", str(stages + 1)]
    processes = start_ranks(
        "tests.integration.trainer.service.broadcasting_ranks", *arguments, ranks=2, port=free_port()
    )
    try:
        rendezvous = Rendezvous(transport="gloo", store_port=store.port, name="group", world_size=stages + 1)
        group = WeightGroup(rendezvous, stages)
        group.connect(PATIENCE)
        expected = load_file(model / "model.safetensors")
        specs = hf_tensor_specs(read_architecture(model), torch.float32, Layout(stages, pipeline=stages))
        buckets = [
            bucket
            for stage in range(stages)
            for bucket in plan_buckets(
                [TensorSpec(s.name, s.dtype, s.shape) for s in specs if s.stage == stage], BUCKET_BYTES, stage
            )
        ]
        assert len({bucket.source_rank for bucket in buckets}) == stages
        for _ in range(2):
            received: dict[str, torch.Tensor] = {}
            for bucket in buckets:
                wire = pieces(bucket, torch.empty(piece_bytes(bucket), dtype=torch.uint8))
                group.start_broadcasts(wire, bucket.source_rank, PATIENCE).wait()
                received |= {spec.name: tensor for spec, tensor in zip(bucket.tensors, wire, strict=True)}
            assert received.keys() == expected.keys()
            for name, tensor in received.items():
                assert torch.equal(tensor, expected[name]), name
        told = [json.loads(process.communicate(timeout=PATIENCE)[0].splitlines()[-1]) for process in processes]
        group.abort()
    finally:
        kill(*processes)
    assert sum(each["bytes"] for each in told) == sum(tensor.nbytes for tensor in expected.values())
    checksums = {name: value for each in told for name, value in each["checksums"].items()}
    assert checksums == {name: checksum(tensor) for name, tensor in expected.items()}
