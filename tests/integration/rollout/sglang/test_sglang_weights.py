"""SGLang's own models receive weights: what arrives is what SGLang's loaders would have made of them."""

import re
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from relaxd.weights.buckets import TensorBucket, TensorSpec, as_sent, checksum, pack, plan_buckets, to_proto
from relaxd.weights.weight_group import Rendezvous, WeightGroup, host_store
from tests.kit.ports import free_port
from tests.kit.processes import Partner
from tests.kit.vision import make_vision_model
from tests.kit.waiting import wait_until
from tests.sglang.environment import CPU_ENVIRONMENT, EnvironmentUnavailable, sglang_python

SHAPE = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
"""259 is padded by SGLang, to a multiple of 64."""
NAMES = count()
STORE = host_store()


def make_models(folder: Path) -> dict[str, Path]:
    """A tied dense model whose one key-value head two ranks share, an untied mixture of experts, one that sees."""
    torch.manual_seed(0)
    models: dict[str, PreTrainedModel] = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True)),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SHAPE, num_key_value_heads=2, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=32,
            )
        ),
    }  # fmt: skip
    for name, model in models.items():
        model.bfloat16().save_pretrained(folder / name)
    return {name: folder / name for name in models} | {"qwen3_vl": make_vision_model(folder / "qwen3_vl")}


class Source:
    """The trainer's side of one group: new values for a model's tensors."""

    def __init__(self, folder: Path, seed: int, dtype: torch.dtype = torch.bfloat16, *, in_one: bool = False) -> None:
        self._in_one = in_one
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn(tensor.shape, generator=generator).to(dtype)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    @property
    def buckets(self) -> list[TensorBucket]:
        """Several, unless all has to be in one."""
        return [TensorBucket(tuple(self.specs), 0)] if self._in_one else plan_buckets(self.specs, 20_000, 0)

    def send(self, group: WeightGroup, layout: str, buckets: list[TensorBucket]) -> None:
        """As a trainer does."""
        for bucket in buckets:
            flat = pack(bucket, self.tensors, torch.empty(bucket.nbytes, dtype=torch.uint8))
            tensors = [flat] if layout == "flat" else as_sent(bucket, self.tensors)
            group.start_broadcasts(tensors, 0, 20).wait()


class Ranks:
    """The tensor-parallel ranks of one engine."""

    def __init__(self, size: int) -> None:
        try:
            python = sglang_python()
        except EnvironmentUnavailable as error:
            pytest.fail(str(error))
        port = free_port()
        member = "tests.integration.rollout.sglang.weights_member"
        self.members = [
            Partner("-m", member, *map(str, (rank, size, port)), python=python, environment=CPU_ENVIRONMENT)
            for rank in range(size)
        ]

    def tell(self, do: str, **command: Any) -> None:
        """Begin something on all ranks."""
        for member in self.members:
            member.tell(do=do, **command)

    def answers(self) -> list[dict[str, Any]]:
        """How it ended on each rank."""
        return [member.answer() for member in self.members]

    def do(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """All of it."""
        self.tell(do, **command)
        return self.answers()

    def join(self, source: Source, layout: str) -> tuple[WeightGroup, list[dict[str, Any]]]:
        """A new group of the source and all ranks."""
        size = len(self.members) + 1
        place = {"store_port": STORE.port, "name": f"group-{next(NAMES)}", "world_size": size}
        group = WeightGroup(Rendezvous(transport="gloo", **place), 0)
        connecting = threading.Thread(target=group.connect, args=(30,))
        connecting.start()
        manifest = to_proto(source.buckets).SerializeToString().hex()
        for rank, member in enumerate(self.members, start=1):
            member.tell(do="join", manifest=manifest, layout=layout, rank=rank, **place)
        connecting.join()
        return group, self.answers()

    def refuse(self, source: Source) -> str:
        """Why the first rank doesn't join."""
        manifest = to_proto(source.buckets).SerializeToString().hex()
        place = {"store_port": STORE.port, "name": f"group-{next(NAMES)}", "rank": 1, "world_size": 2}
        return str(self.do("join", manifest=manifest, layout="flat", **place)[0]["error"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    for member in ranks.members:
        member.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_vl"])
def test_what_arrives_is_what_sglang_s_loader_makes_of_it(
    name: str, ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    alone = len(ranks.members) == 1
    ranks.do("load", folder=str(models[name]))
    for seed, layout in enumerate(("flat", "direct", "direct"), start=1):
        source = Source(models[name], seed, torch.float32 if seed == 3 else torch.bfloat16)
        group, joined = ranks.join(source, layout)
        # Where ranks share matrices, for other types and for a tower's queries, keys and values there is a copy.
        if layout == "direct" and seed != 3 and name != "qwen3_vl":
            assert all((answer["staged"] == 0) == alone for answer in joined), joined
        ranks.tell("receive", name=group.name)
        source.send(group, layout, source.buckets)
        expected = {tensor: checksum(value) for tensor, value in source.tensors.items()}
        for answer in ranks.answers():
            assert answer["touched"]
            assert answer["checksums"] == expected
        file = tmp_path / f"{seed}.safetensors"
        save_file({tensor: value.bfloat16() for tensor, value in source.tensors.items()}, file)
        assert [answer["different"] for answer in ranks.do("compare", file=str(file))] == [[]] * len(joined)
        assert not any(answer["unusable"] for answer in ranks.do("leave", name=group.name))
        group.abort()


def test_each_version_says_whether_it_changes_a_tower(ranks: Ranks, models: dict[str, Path]) -> None:
    """By one value of it, in the same group as the version before or in another one."""
    ranks.do("load", folder=str(models["qwen3_vl"]))
    source = Source(models["qwen3_vl"], 1)
    language, tower = "model.language_model.norm.weight", "model.visual.blocks.0.attn.qkv.bias"
    found = []
    for layout in ("flat", "direct"):
        group, _ = ranks.join(source, layout)
        for changed in (language, tower, None):
            if changed is not None:
                source.tensors[changed][-1] += 1.0
            ranks.tell("receive", name=group.name, checksum=False)
            source.send(group, layout, source.buckets)
            answers = ranks.answers()
            assert not any(answer["checksums"] for answer in answers)
            found.append({answer["towers_changed"] for answer in answers})
        ranks.do("leave", name=group.name)
        group.abort()
    assert found == [{True}, {True}, {False}, {False}, {True}, {False}]


def test_the_commit_does_not_wait_for_the_last_bucket(ranks: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    folder = models["qwen3"]
    ranks.do("load", folder=str(folder))
    source = Source(folder, 1)
    assert len(source.buckets) > 4
    group, joined = ranks.join(source, "flat")
    ranks.tell("receive", name=group.name, committed=str(tmp_path / "committed"))
    source.send(group, "flat", source.buckets[:-1])
    wait_until(lambda: len(list(tmp_path.iterdir())) == len(joined), "all ranks have committed")
    source.send(group, "flat", source.buckets[-1:])
    assert all("error" not in answer for answer in ranks.answers())
    group.abort()


def test_ranks_that_may_have_committed_alone_are_unusable(ranks: Ranks, models: dict[str, Path]) -> None:
    folder = models["qwen3"]
    ranks.do("load", folder=str(folder))
    group, joined = ranks.join(Source(folder, 1, in_one=True), "flat")
    ranks.tell("receive", name=group.name, refuse=True)  # before anything has come
    assert all("refused" in answer["error"] for answer in ranks.answers())
    several = len(joined) > 1
    assert [answer["unusable"] for answer in ranks.do("leave", name=group.name)] == [several] * len(joined)
    group.abort()


def test_what_does_not_fit_is_named_and_what_breaks_is_told(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = models["qwen3"]
    ranks.do("load", folder=str(folder))
    # A source that goes away in the middle leaves a model that nobody may use.
    source = Source(folder, 1)
    group, _ = ranks.join(source, "direct")
    ranks.tell("receive", name=group.name)
    source.send(group, "direct", source.buckets[:2])
    group.abort()
    assert all("WeightGroupError" in answer["error"] for answer in ranks.answers())
    assert all(answer["unusable"] for answer in ranks.do("leave", name=group.name))
    group, _ = ranks.join(source, "direct")  # the next version heals it
    ranks.tell("receive", name=group.name)
    source.send(group, "direct", source.buckets)
    assert all("error" not in answer for answer in ranks.answers())
    assert not any(answer["unusable"] for answer in ranks.do("leave", name=group.name))

    # A loader that computes is called with what came.
    ranks.do("load", folder=str(folder))
    ranks.do("double", parameter="model.norm.weight")
    group, _ = ranks.join(source, "direct")
    ranks.tell("receive", name=group.name)
    source.send(group, "direct", source.buckets)
    assert all("error" not in answer for answer in ranks.answers())
    save_file(source.tensors, tmp_path / "sent.safetensors")  # its loader doubles here, too
    assert all(not answer["different"] for answer in ranks.do("compare", file=str(tmp_path / "sent.safetensors")))
    ranks.do("load", folder=str(folder))
    if len(ranks.members) > 1:
        return
    q_proj, down_proj = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
    extra = TensorSpec("model.layers.1.self_attn.x", torch.bfloat16, (4,))
    changes: list[tuple[Callable[[Source], object], str]] = [
        (lambda s: s.specs.pop(-1), "model.norm.weight: the manifest does not have this tensor"),
        (lambda s: s.specs.append(extra), "self_attn.x: the model has no such tensor"),
        (lambda s: s.specs.append(s.specs[-1]), "model.norm.weight: the manifest has parts of it twice"),
        (lambda s: resize(s, q_proj, (96, 64)), "q_proj.weight: the shape .* but the model uses only a part"),
        (lambda s: resize(s, down_proj, (64, 120)), "down_proj.weight: the manifest does not have .* all of it"),
        (lambda s: resize(s, "model.norm.weight", (63,)), "model.norm.weight: .*refuses the shape"),
    ]
    for change, complaint in changes:
        source = Source(folder, 1)
        change(source)
        error = ranks.refuse(source)
        assert error.startswith("ManifestMismatch"), error
        assert re.search(complaint, error), error
    assert (
        "model.layers.0.mlp.down_proj stores its weights by Fp8LinearMethod"
        in ranks.do("quantise", module="model.layers.0.mlp.down_proj")[0]["error"]
    )


def resize(source: Source, name: str, shape: tuple[int, ...]) -> None:
    """Give a tensor of the manifest another shape."""
    source.specs = [TensorSpec(s.name, s.dtype, shape) if s.name == name else s for s in source.specs]
