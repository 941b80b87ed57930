"""A parameter's Hugging Face tensors, whose views are kept, follow what becomes of the parameter."""

from pathlib import Path

import pytest
import torch

from services.trainer.model.architectures import FAMILIES, read_architecture
from services.trainer.model.hf_weights import ExportedParameter
from services.trainer.model.parameter_entries import entries
from tests.unit.trainer.model.model_configs import MOE, write

SHAPES = [
    pytest.param({"model_type": "llama"}, id="llama"),
    pytest.param({"model_type": "qwen2"}, id="biases"),
    pytest.param({"model_type": "phi3", "pad_token_id": 0}, id="fused by Hugging Face, too"),
    pytest.param(MOE, id="experts"),
]


@pytest.mark.parametrize("changes", SHAPES)
def test_they_are_the_merged_tensors_whatever_changes(tmp_path: Path, changes: dict) -> None:
    shape = read_architecture(write(tmp_path, **changes))
    assert shape.model_type in FAMILIES
    for entry in entries(shape):
        sizes = [part.shape for part in entry.parts[0]]
        whole = entry.layout.shard([torch.randn(size) for size in sizes], 0, 1, shape)
        # Of experts there is one tensor, in which each has a part.
        values = whole if entry.index is None else torch.randn(8, *whole.unflatten(0, (1, -1)).shape)
        parameter = torch.nn.Parameter(values)
        exported = ExportedParameter(entry, parameter)

        def check(exported=exported, entry=entry, sizes=sizes, parameter=parameter) -> list[torch.Tensor]:
            found = exported.own_tensors(shape)
            merged = entry.layout.merge([entry.of(parameter.detach())], sizes, shape)
            assert [part for part, _ in found] == list(entry.parts[0])
            for (_, tensor), right in zip(found, merged, strict=True):
                assert tensor.shape == right.shape, entry.megatron
                assert torch.equal(tensor, right), entry.megatron
            return [tensor for _, tensor in found]

        first, again = check(), check()
        for one, other in zip(first, again, strict=True):
            assert one is other or one.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
        with torch.no_grad():
            parameter.add_(1.0)
        check()
        storage, nbytes = parameter.untyped_storage(), parameter.nbytes
        content = parameter.detach().clone()
        storage.resize_(0)  # as the trainer's weights are moved to the host and back
        storage.resize_(nbytes)
        with torch.no_grad():
            parameter.copy_(content)
        check()
        parameter.data = torch.randn_like(parameter)
        check()
