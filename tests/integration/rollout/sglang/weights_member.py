"""A tensor-parallel rank of an SGLang model on a CPU, in SGLang's environment, told line by line in JSON what to do."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_loader import get_model
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from relaxd.v1.weights_pb2 import WeightManifest
from relaxd.weights.buckets import ManifestMismatch
from relaxd.weights.weight_group import Rendezvous, WeightGroupError
from services.rollout.engines.sglang import sglang_weights as sglang_weights
from services.rollout.engines.sglang.sglang_weights import SGLangWeights, UnsupportedModel

TIMEOUT = 30.0


class Member:
    """What lines are about."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank, self.size = rank, size
        init_distributed_environment(
            backend="gloo", world_size=size, rank=rank, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}"
        )
        initialize_model_parallel(tensor_model_parallel_size=size, expert_model_parallel_size=size)

    def load(self, folder: str) -> dict[str, Any]:
        """Load a model as the scheduler does."""
        args = ServerArgs(
            model_path=folder, device="cpu", dtype="bfloat16", tp_size=self.size, ep_size=self.size,
            skip_tokenizer_init=True, attention_backend="torch_native", sampling_backend="pytorch",
            grammar_backend="none",
        )  # fmt: skip
        set_global_server_args_for_scheduler(args)
        config = ModelConfig.from_server_args(args)
        initialize_dp_attention(server_args=args, model_config=config)
        self.model: Any = get_model(
            model_config=config, load_config=LoadConfig(load_format="auto"), device_config=DeviceConfig("cpu")
        )
        self.weights = SGLangWeights(self.model, torch.device("cpu"), self.size)
        return {}

    def join(self, rank: int, manifest: str, layout: str, **place: Any) -> dict[str, Any]:
        """Join a group. Over gloo buckets are flat; NCCL's layout is asked for, which gloo can do as well."""
        sglang_weights.broadcast_layout = lambda transport, engine: layout  # type: ignore[assignment,return-value]
        sent = WeightManifest.FromString(bytes.fromhex(manifest))
        self.weights.join(Rendezvous(transport="gloo", **place), rank, sent, TIMEOUT)
        receiver = self.weights._receiver
        assert receiver is not None
        return {"staged": sum(len(staged) for staged in receiver._staged)}

    def receive(self, name: str, committed: str = "", refuse: bool = False, checksum: bool = True) -> dict[str, Any]:
        """Receive a version. Its commit makes the file `committed`, or is refused."""

        def commit() -> None:
            if refuse:
                raise WeightGroupError("refused")
            if committed:
                Path(f"{committed}-{self.rank}").touch()

        before = {parameter: parameter.data_ptr() for parameter in self.model.parameters()}
        result = self.weights.finish(self.weights.begin(name, TIMEOUT), checksum=checksum, commit=commit)
        assert all(parameter.data_ptr() == address for parameter, address in before.items())
        return {
            "checksums": result.checksums,
            "touched": result.touched,
            "towers_changed": result.towers_changed,
        }

    def leave(self, name: str) -> dict[str, Any]:
        """Leave a group."""
        self.weights.leave(name)
        return {"unusable": self.weights.unusable}

    def compare(self, file: str) -> dict[str, Any]:
        """Which parameters are not what SGLang itself makes of these tensors."""
        received = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7.0)
        self.model.load_weights(load_file(file).items())
        loaded = dict(self.model.named_parameters())
        return {"different": [name for name, value in received.items() if not torch.equal(value, loaded[name])]}

    def double(self, parameter: str) -> dict[str, Any]:
        """From now on this parameter's loader does more than copying."""

        def load(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
            parameter.data.copy_(tensor * 2)

        dict(self.model.named_parameters())[parameter].weight_loader = load  # type: ignore[attr-defined]
        return {}

    def quantise(self, module: str) -> dict[str, Any]:
        """Have a module keep its weights in another way."""

        class Fp8LinearMethod:
            pass

        self.model.get_submodule(module).quant_method = Fp8LinearMethod()
        SGLangWeights(self.model, torch.device("cpu"), self.size)
        return {}


def main() -> None:
    """Answer each line with one line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # SGLang prints, too
    torch.set_num_threads(1)
    member = Member(*map(int, sys.argv[1:]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(member, command.pop("do"))(**command)
        except (ManifestMismatch, UnsupportedModel, WeightGroupError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
