"""Receiving weights into a model, over a real group of two members in this process."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from relaxd.weights.buckets import ManifestMismatch, TensorBucket, TensorSpec, checksum, pack, plan_buckets
from relaxd.weights.weight_group import Rendezvous, WeightGroup, WeightGroupError, host_store
from services.rollout.engines.request_types import EngineError, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.engines.transformers.transformers_process import WeightReceiver, check_manifest, named_parameters
from tests.kit.models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tied"))


class Pair:
    """A source (rank 0) and an engine (rank 1)."""

    store = host_store()
    number = 0

    def __init__(self, folder: Path, dtype: torch.dtype, *, stage_all: bool, wire: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.engine = TransformersEngine(
            self.model, str, [2], max_running_samples=8, on_output=lambda *_: None, on_failure=lambda *_: None
        )
        torch.manual_seed(1)
        shapes = {name: tensor.shape for name, tensor in self.model.named_parameters()}  # a tied tensor once
        self.tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
        self.buckets = plan_buckets([TensorSpec(n, wire, tuple(s)) for n, s in shapes.items()], 20_000, 0)
        assert len(self.buckets) > 3
        Pair.number += 1
        place = Rendezvous(transport="gloo", store_port=self.store.port, name=f"g{Pair.number}", world_size=2)
        members = [WeightGroup(place, rank) for rank in (0, 1)]
        connecting = threading.Thread(target=members[0].connect, args=(20,))
        connecting.start()
        members[1].connect(20)
        connecting.join()
        self.source, own = members
        self.receiver = WeightReceiver(self.engine, own, self.buckets, stage_all=stage_all)

    def send(self, buckets: list[TensorBucket]) -> None:
        for bucket in buckets:
            self.source.broadcast(pack(bucket, self.tensors, torch.empty(bucket.nbytes, dtype=torch.uint8)), 0, 20)

    def transfer(self, count: int | None = None) -> dict[str, int]:
        """Receive while `count` buckets (None: all) are sent and then, if not all, the source leaves."""

        def send() -> None:
            self.send(self.buckets[:count])
            if count is not None:
                self.source.abort()

        sending = threading.Thread(target=send)
        sending.start()
        try:
            return self.receiver.receive(Version(1, 7), 20, with_checksums=True)
        finally:
            sending.join()

    def close(self) -> None:
        self.source.abort()
        self.receiver.group.abort()
        self.engine.stop()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.mark.parametrize("stage_all", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_arrives_in_the_engine_s_type(
    folder: Path, pairs: list[Pair], dtype: torch.dtype, stage_all: bool
) -> None:
    pairs.append(pair := Pair(folder, dtype, stage_all=stage_all))
    pair.engine.pause("in_place", 60, 20)
    checksums = pair.transfer()
    assert checksums == {name: checksum(tensor) for name, tensor in pair.tensors.items()}
    assert pair.engine.gate.weights == Version(1, 7)
    for name, parameter in pair.model.named_parameters():
        assert torch.equal(parameter, pair.tensors[name].to(dtype))
    assert torch.equal(pair.model.lm_head.weight, pair.tensors["model.embed_tokens.weight"].to(dtype)), "tied"


def swap(pair: Pair, names: list[str]) -> None:
    """Two tensors of one shape get each other's values."""
    one, other = names
    parameters = pair.receiver._parameters
    copies = {one: parameters[other], other: parameters[one]}
    pair.receiver._copy = with_targets(pair, copies)  # type: ignore[method-assign]


def freeze(pair: Pair, names: list[str]) -> None:
    """A layer keeps the values that it has."""
    kept = {name: torch.empty_like(pair.receiver._parameters[name]) for name in names}
    pair.receiver._copy = with_targets(pair, kept)  # type: ignore[method-assign]


def with_targets(pair: Pair, targets: dict[str, torch.Tensor]) -> Callable[[int], None]:
    """A copy that writes some tensors elsewhere."""

    def copy(number: int) -> None:
        for spec, tensor in pair.receiver._received(number):
            targets.get(spec.name, pair.receiver._parameters[spec.name]).copy_(tensor)

    return copy


@pytest.mark.parametrize("stage_all", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["swapped", "frozen", "old"])
def test_weights_that_are_not_what_was_sent_have_other_checksums(
    folder: Path, pairs: list[Pair], fault: str, dtype: torch.dtype, stage_all: bool
) -> None:
    """Two tensors swapped, a layer frozen, or the version before under a new number."""
    pairs.append(pair := Pair(folder, dtype, stage_all=stage_all))
    pair.engine.pause("in_place", 60, 20)
    layer = [name for name in pair.tensors if ".layers.0." in name]
    norms = [name for name in layer if name.endswith("layernorm.weight")]
    wrong = {"swapped": norms, "frozen": layer, "old": list(pair.tensors)}[fault]
    assert len(norms) == 2
    (swap if fault == "swapped" else freeze)(pair, wrong)
    checksums = pair.transfer()
    sent = {name: checksum(tensor) for name, tensor in pair.tensors.items()}
    assert {name for name in sent if sent[name] != checksums[name]} == set(wrong)


def test_a_broken_broadcast_leaves_a_staging_engine_as_it_was(folder: Path, pairs: list[Pair]) -> None:
    pairs.append(pair := Pair(folder, torch.float32, stage_all=True))
    before = {name: parameter.clone() for name, parameter in pair.model.named_parameters()}
    pair.engine.pause("in_place", 60, 20)
    with pytest.raises(WeightGroupError):
        pair.transfer(2)
    assert not pair.engine.gate.quarantined
    assert all(torch.equal(parameter, before[name]) for name, parameter in pair.model.named_parameters())


def test_a_broken_broadcast_quarantines_an_engine_without_staging(folder: Path, pairs: list[Pair]) -> None:
    pairs.append(pair := Pair(folder, torch.float32, stage_all=False))
    pair.engine.pause("in_place", 60, 20)
    with pytest.raises(WeightGroupError):
        pair.transfer(2)
    assert pair.engine.gate.quarantined
    pair.engine.gate.resume()
    # A quarantined engine takes new weights without another pause, and is well again.
    pairs.append(again := Pair(folder, torch.float32, stage_all=False))
    pair.receiver, pair.source = (
        WeightReceiver(pair.engine, again.receiver.group, pair.buckets, stage_all=False),
        again.source,
    )
    pair.transfer()
    assert not pair.engine.gate.quarantined
    assert pair.engine.gate.weights == Version(1, 7)


def test_weights_are_only_taken_in_a_pause(folder: Path, pairs: list[Pair]) -> None:
    pairs.append(pair := Pair(folder, torch.float32, stage_all=True))
    with pytest.raises(EngineError, match="not paused"):
        pair.receiver.receive(Version(1, 1), 5, with_checksums=False)


def test_what_a_manifest_misses_is_named(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    specs = [TensorSpec(name, torch.float32, tuple(t.shape)) for name, t in model.named_parameters()]
    check_manifest(model, [TensorBucket(tuple(specs), 0)])
    left_out = specs.pop(3)
    with pytest.raises(ManifestMismatch, match=f"{left_out.name}: the manifest does not have"):
        check_manifest(model, [TensorBucket(tuple(specs), 0)])


def test_experts_are_known_by_the_names_of_checkpoints(tmp_path: Path) -> None:
    """transformers keeps a layer's experts in one tensor; what it saves, and the trainer sends, is one by one."""
    from safetensors.torch import load_file

    shape = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, num_experts=4, num_experts_per_tok=2))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    named = named_parameters(model)
    assert set(saved) == set(named)
    for name, tensor in saved.items():
        assert torch.equal(named[name], tensor), name
    named["model.layers.1.mlp.experts.2.up_proj.weight"].fill_(3.0)
    up = model.model.layers[1].mlp.experts.gate_up_proj[2, 24:]
    assert (up == 3.0).all(), "they are views"
