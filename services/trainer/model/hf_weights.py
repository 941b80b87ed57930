"""Weights in Hugging Face's format: loading a folder, gathering full tensors, writing a folder; and copies of weights
for broadcasts.
"""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from relaxd.data.templating import MORE_TEMPLATES
from relaxd.models.layouts import Layout
from relaxd.models.model_contradictions import weights_contradiction
from relaxd.weights.buckets import TensorSpec
from services.trainer.batch.disk_files import errors_of_the_system
from services.trainer.megatron.channels import all_gather
from services.trainer.megatron.disk_work import DiskRefused, DiskWorkFailed
from services.trainer.megatron.world import GatherGroups, World
from services.trainer.model.architecture import Architecture, ModelError, ModelFileError
from services.trainer.model.family import Replicated, views_of
from services.trainer.model.parameter_entries import ALONE, HFTensor, ParameterEntry, entries

MAX_FILE_BYTES = 4 << 30
"""Size in bytes at which a new safetensors file begins. A layer's experts stay in one file."""

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json", ".onnx")


@dataclass(frozen=True)
class HFTensorSpec(TensorSpec):
    """An exported tensor, as broadcasts send it: name, dtype, shape and pipeline stage."""

    stage: int
    """Pipeline stage that holds the tensor."""


def hf_tensor_specs(shape: Architecture, dtype: torch.dtype, layout: Layout = ALONE) -> list[HFTensorSpec]:
    """List the exported tensors of all pipeline stages, in the order of `gather_hf_tensors`."""
    return [
        HFTensorSpec(part.name, dtype, part.whole_shape, stage)
        for stage in range(layout.pipeline)
        for entry in entries(shape, stage, layout)
        if entry.exported
        for parts in entry.parts
        for part in parts
        if part.is_last
    ]


class HFFolder:
    """Reads tensors from the safetensors files of a model folder. Files are opened when needed."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self._folder = folder
        self._files: dict[str, safe_open] = {}
        if index.exists():
            self._file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.exists():
            self._file_of = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise ModelFileError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")

    def read(self, wanted: HFTensor) -> Tensor:
        """Read a tensor, or one slice of a stacked tensor, which may be stored transposed.

        Raises:
            ModelError: the tensor is missing, or it has another shape.
            ModelFileError: its file can't be read.
        """
        name, shape = wanted.name, wanted.whole_shape
        if name not in self._file_of:
            raise ModelError(f"{self._folder} has no tensor {name}, which config.json's architecture needs")
        file = self._open(self._file_of[name])
        stored = file.get_slice(name)
        found = tuple(stored.get_shape())
        is_transposed = wanted.stack > 0 and found != shape and found == (wanted.stack, *wanted.shape[::-1])
        if found != shape and not is_transposed:
            raise ModelError(f"{self._folder}: {name} is {list(found)}, but config.json makes it {list(shape)}")
        tensor: Tensor = stored[wanted.index] if wanted.stack else file.get_tensor(name)
        return tensor.T if is_transposed else tensor

    def _open(self, file: str) -> safe_open:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, "pt")
            except (OSError, ValueError) as error:
                raise ModelFileError(f"{self._folder / file} can't be read: {error}") from error
        return self._files[file]


ROUNDING = "rounding"
"""Attribute of a bfloat16 parameter with its rounding error, in bfloat16: the float32 weight minus the parameter."""


@torch.no_grad()
def load_hf(
    model: torch.nn.Module,
    folder: Path,
    shape: Architecture,
    world: World,
    *,
    without: Collection[str] = (),
    keep_rounding: bool = False,
) -> None:
    """Load this rank's part of a model folder, one tensor at a time. All ranks call it together.

    Args:
        model: this rank's stage.
        folder: the folder.
        shape: the model's architecture.
        world: this rank's place in the world.
        without: suffixes of parameter names to skip, which only the folder or only the model has.
        keep_rounding: set the attribute ROUNDING, for the optimizer, on bfloat16 parameters read from float32 weights.

    Raises:
        ModelError: the folder lacks tensors of the architecture, or its output layer contradicts config.json.
        ModelFileError: a file can't be read.
        DiskWorkFailed, DiskStalled: another rank failed to load its part.
    """
    with world.disk.all_ranks(f"reading {folder}") as progress:
        source = HFFolder(folder)
        if problem := weights_contradiction(folder, shape.tied_embeddings and not without):
            raise ModelError(problem)
        parameters = dict(model.named_parameters())
        missing = {name for name in parameters if not name.endswith(tuple(without))}
        for entry in entries(shape, world.pp_rank, world.layout):
            if entry.megatron.endswith(tuple(without)):
                continue
            mine = entry.parts[world.ep_rank if entry.expert else 0]
            dense, expert = (world.tp_rank, world.tp_size), (world.etp_rank, world.etp_size)
            rank, size = expert if entry.expert else dense
            tensors = [source.read(part) for part in mine]
            parameter = parameters[entry.megatron]
            part = entry.of(parameter)
            exact = entry.layout.shard(tensors, rank, size, shape)
            part.copy_(exact)
            if keep_rounding and exact.dtype is torch.float32 and part.dtype is torch.bfloat16:
                if not hasattr(parameter, ROUNDING):
                    setattr(parameter, ROUNDING, torch.zeros_like(parameter, requires_grad=False))
                entry.of(getattr(parameter, ROUNDING)).copy_(exact.to(part.device) - part)
            missing.discard(entry.megatron)
            progress(part.nbytes)
        if missing:
            raise AssertionError(f"no rule of the mapping loads {sorted(missing)}")


class ExportedParameter:
    """A parameter of this rank, or one expert's slice of it, with the Hugging Face tensors that it holds."""

    def __init__(self, entry: ParameterEntry, parameter: Tensor) -> None:
        self.entry = entry
        self.parameter = parameter
        self._views: list[tuple[HFTensor, Tensor]] = []
        """Hugging Face tensors as views of the parameter. Created once: creating views for each broadcast takes longer
        than the GPU needs to send them."""

    @property
    def part(self) -> Tensor:
        """View of the parameter, or of one expert's slice of it."""
        return self.entry.of(self.parameter.detach())

    def tensors(self, shards: Sequence[Tensor], number: int, shape: Architecture) -> list[tuple[HFTensor, Tensor]]:
        """Merge shards into Hugging Face tensors. `number`: the shards' expert-parallel rank; 0 if not an expert."""
        parts = self.entry.parts[number]
        merged = self.entry.layout.merge(shards, [part.shape for part in parts], shape)
        return list(zip(parts, merged, strict=True))

    def own_tensors(self, shape: Architecture) -> list[tuple[HFTensor, Tensor]]:
        """Return the Hugging Face tensors of a parameter that this rank has whole."""
        memory = self.parameter.untyped_storage().data_ptr()
        if not self._views or self._views[0][1].untyped_storage().data_ptr() != memory:
            parts = self.entry.parts[0]
            views = views_of(self.entry.layout, self.part, [part.shape for part in parts], shape)
            if not views:
                return self.tensors([self.part], 0, shape)
            self._views = list(zip(parts, views, strict=True))
        return [(part, one if one.shape == part.shape else one.reshape(part.shape)) for part, one in self._views]


def exported_parameters(model: torch.nn.Module, shape: Architecture, world: World) -> list[ExportedParameter]:
    """List this rank's exported parameters for `gather_hf_tensors`. The list is valid for the model's lifetime."""
    parameters = dict(model.named_parameters())
    return [
        ExportedParameter(entry, parameters[entry.megatron])
        for entry in entries(shape, world.pp_rank, world.layout)
        if entry.exported
    ]


def gather_hf_tensors(
    exported: Sequence[ExportedParameter], shape: Architecture, world: World, groups: GatherGroups
) -> Iterator[tuple[str, Tensor]]:
    """Gather the weights of this pipeline stage on its source rank, one tensor at a time.

    All ranks of the first data-parallel replica call it together; other ranks do nothing. Only source ranks yield
    tensors. Pass `world.gather_in_training` as `groups` in the training thread, `world.gather` in a thread beside it
    while the weights don't change. A yielded tensor may be a view of the parameter: don't modify it. On a GPU
    everything is enqueued on the current stream, without synchronizing.

    Yields:
        (Hugging Face name, full tensor) in the order of `hf_tensor_specs`, on the source rank.
    """
    stacks: dict[str, Tensor] = {}
    for part, tensor in _gathered(exported, shape, world, groups):
        if part.stack:
            if part.name not in stacks:
                stacks[part.name] = tensor.new_empty(part.whole_shape)
            stacks[part.name][part.index] = tensor
        if part.is_last:
            yield part.name, stacks.pop(part.name, tensor)


def _gathered(
    exported: Sequence[ExportedParameter], shape: Architecture, world: World, groups: GatherGroups
) -> Iterator[tuple[HFTensor, Tensor]]:
    """Gather tensors like `gather_hf_tensors`, but yield stacked tensors slice by slice."""
    for parameter in exported:
        entry = parameter.entry
        group = groups.experts if entry.expert else groups.dense
        if group is None:
            continue
        if entry.layout is Replicated or group.size() == 1:
            if groups.source:
                yield from parameter.own_tensors(shape)
            continue
        part = parameter.part
        shards = [torch.empty_like(part) for _ in range(group.size())] if groups.source else []
        dist.gather(part, shards or None, group=group, group_dst=0)
        if not groups.source:
            continue
        each = world.etp_size if entry.expert else len(shards)
        for number in range(len(entry.parts)):
            yield from parameter.tensors(shards[number * each : (number + 1) * each], number, shape)


def save_hf(
    model: torch.nn.Module,
    folder: Path,
    original: Path,
    shape: Architecture,
    world: World,
    chat_template: str | None = None,
) -> None:
    """Write the model as a Hugging Face folder that transformers loads. All ranks call it together.

    The files go to a temporary folder, which is renamed at the end, so `folder` is never incomplete. Ranks gather the
    tensors of one file after another, and wait outside of collectives while the source ranks write.

    Args:
        model: this rank's stage.
        folder: the target on shared storage; an existing folder is replaced.
        original: the model's original folder, from which config, tokenizer and other small files are copied.
        shape: the model's architecture.
        world: this rank's place in the world.
        chat_template: the run's template, if it isn't the original's.

    Raises:
        DiskRefused: a rank can't write its part; raised on all ranks. No partial files are left; an old folder stays.
        DiskWorkFailed, DiskStalled: another rank is gone, or stuck.
    """
    partial = folder.with_name(folder.name + ".partial")
    try:
        what = f"writing {folder}"
        with world.disk.all_ranks(what):
            if world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        dtype = next(model.parameters()).dtype
        parameters = exported_parameters(model, shape, world)
        numbers = [_file_numbers(shape, stage, world, dtype) for stage in range(world.pp_size)]
        written: dict[str, str] = {}
        total = 0
        for number in range(max(map(max, numbers)) + 1):
            file = [pair for pair, one in zip(parameters, numbers[world.pp_rank], strict=True) if one == number]
            gathered = gather_hf_tensors(file, shape, world, world.gather_in_training)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in gathered}
            with world.disk.all_ranks(what) as progress:
                if tensors:
                    name = f"model-{world.pp_rank:03d}-{number:05d}.safetensors"
                    with errors_of_the_system(partial / name):
                        save_file(tensors, partial / name, metadata={"format": "pt"})
                    written |= dict.fromkeys(tensors, name)
                    size = sum(tensor.nbytes for tensor in tensors.values())
                    total += size
                    progress(size)
        all_written: list[tuple[dict[str, str], int]] = all_gather((written, total))
        with world.disk.all_ranks(what):
            if world.rank == 0:
                weight_map = {name: file for files, _ in all_written for name, file in files.items()}
                _write_index(partial, weight_map, sum(size for _, size in all_written))
                copy_small_files(original, partial, dtype, chat_template)
                old = folder.with_name(folder.name + ".old")
                shutil.rmtree(old, ignore_errors=True)
                if folder.exists():
                    os.replace(folder, old)
                os.replace(partial, folder)
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, DiskWorkFailed) as error:
        with world.disk.all_ranks(f"giving up {folder}"):
            pass  # until no rank writes
        with world.disk.all_ranks(f"removing {partial}"):
            if world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        raise DiskRefused(f"{folder} was not written: {error}") from error


def _file_numbers(shape: Architecture, stage: int, world: World, dtype: torch.dtype) -> list[int]:
    """Assign each of a stage's exported parameters to a file of about MAX_FILE_BYTES. Return the file numbers, from 0.

    A layer's experts, which may be one tensor, are in one file.
    """
    numbers, number, size = [], 0, 0
    for entry in entries(shape, stage, world.layout):
        if entry.exported:
            if size >= MAX_FILE_BYTES and not entry.expert:
                number, size = number + 1, 0
            numbers.append(number)
            size += sum(math.prod(part.shape) for parts in entry.parts for part in parts) * dtype.itemsize
    return numbers


def _write_index(folder: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    files = sorted(set(weight_map.values()))
    if len(files) == 1:
        os.replace(folder / files[0], folder / "model.safetensors")
        return
    final = {file: f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i, file in enumerate(files)}
    for file in files:
        os.replace(folder / file, folder / final[file])
    index = {"metadata": {"total_size": total_bytes}, "weight_map": {k: final[v] for k, v in weight_map.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def copy_small_files(original: Path, folder: Path, dtype: torch.dtype, chat_template: str | None = None) -> None:
    """Copy a model folder's files except weights. Set the dtype in config.json, and the chat template if given."""
    for path in sorted(original.iterdir()):
        if path.is_file() and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((original / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if "enable_audio_output" in config:  # of Qwen3-Omni only the thinker is written
        config["enable_audio_output"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if chat_template is not None:  # for all prompts, also those with tools
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    elif (original / MORE_TEMPLATES).is_dir():
        shutil.copytree(original / MORE_TEMPLATES, folder / MORE_TEMPLATES, dirs_exist_ok=True)


class KeptWeights:
    """Host copies of the weights that this rank gathers or sends, allocated once, in pinned memory if it has a GPU."""

    def __init__(self, exported: Sequence[ExportedParameter], world: World) -> None:
        """Allocate the host copies. `exported`: the parameters to copy."""
        self._device = world.device
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Pairs of parameter and copy, by the parameter's `id()`. Experts of a layer share a parameter."""
        self.exported: list[ExportedParameter] = []
        """Exported parameters that read the copies, for `gather_hf_tensors`."""
        for one in exported:
            if (world.gather.experts if one.entry.expert else world.gather.dense) is None:
                continue  # `gather_hf_tensors` skips it on this rank
            source = one.parameter
            if id(source) not in self._copies:
                copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._device.type == "cuda")
                self._copies[id(source)] = (source, copy)
            self.exported.append(_KeptParameter(one.entry, self._copies[id(source)][1], self._device))

    def copy(self) -> None:
        """Copy the current weights, and wait until they are copied."""
        for source, copy in self._copies.values():
            copy.copy_(source.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class _KeptParameter(ExportedParameter):
    """A parameter's copy on the host, or one expert's slice of it. Sending moves it to the device."""

    def __init__(self, entry: ParameterEntry, copy: Tensor, device: torch.device) -> None:
        super().__init__(entry, copy)
        self._device = device

    @property
    def part(self) -> Tensor:
        return self.entry.of(self.parameter).to(self._device, non_blocking=True)

    def own_tensors(self, shape: Architecture) -> list[tuple[HFTensor, Tensor]]:
        return self.tensors([self.part], 0, shape)
