"""The configuration of a run: one TOML file, one model."""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from relaxd.config.algorithm import AlgorithmConfig
from relaxd.config.base import Section
from relaxd.config.health import HealthConfig
from relaxd.config.moe import MoEConfig
from relaxd.config.reasoning_gym import ReasoningGymConfig


class RunSection(Section):
    """The run as a whole."""

    steps: int = Field(ge=1)
    """Optimizer steps to do."""
    seed: int = Field(default=0, ge=0)
    """Seeds the order of prompts, sampling and the trainer."""
    folder: Path = Path("runs")
    """Where runs leave their files; each run makes a folder of its own name in it."""
    colocate: bool = False
    """Trainer and engines share their devices and take turns: the engines sleep, their memory released, while the
    trainer trains, and the trainer keeps its weights, gradients and optimizer state in the host's memory while the
    engines generate. Needs board.max_staleness = 0."""
    switch_timeout_seconds: float = Field(default=120.0, gt=0)
    """With colocate: an engine or a trainer that takes longer to sleep or to wake up is asked again."""


class ModelConfig(Section):
    """The model to train."""

    path: str
    """A Hugging Face folder, the name of a model that `relaxd model fetch` knows, or a hub name."""
    chat_template: str | None = None
    """Jinja chat template to use instead of the model's own."""


class DataConfig(Section):
    """Where prompts come from."""

    source: Literal["addition", "jsonl", "reasoning_gym"]
    """addition: procedural sums. jsonl: a file with a JSON object per line. reasoning_gym: a task of that package."""
    path: Path | None = None
    """The file of a jsonl source. Each line has "prompt" (text, or a list of chat messages) and may have "answer"
    and anything else, which the reward gets as metadata."""
    eval_path: Path | None = None
    """The held-out file of a jsonl source; without it no evaluation happens."""
    digits: int = Field(default=2, ge=1, le=6)
    """Digits of each number of the addition source."""
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    """The task of the reasoning_gym source."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt."""
    overlong: Literal["error", "skip"] = "error"
    """What to do with a longer prompt: refuse to start, naming it, or skip it and count it."""
    shuffle: bool = True
    """Shuffle prompts anew in each epoch, seeded by run.seed."""

    @model_validator(mode="after")
    def _path_fits_source(self) -> Self:
        if self.source == "jsonl" and self.path is None:
            raise ValueError('data.path is missing: source = "jsonl" needs the path of a file')
        if self.source == "reasoning_gym" and not self.reasoning_gym.task:
            raise ValueError(
                'data.reasoning_gym.task is missing: source = "reasoning_gym" needs the name of a task, such as '
                '"spell_backward"'
            )
        return self


class RolloutConfig(Section):
    """How answers are generated."""

    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples in a group (n)."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs are those under this temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 is off."""
    engine: Literal["transformers", "sglang", "sglang_external"] = "transformers"
    """The inference engine. transformers runs on a CPU; sglang is for GPUs; sglang_external is a server that runs
    already, whose URL each rollout replica is given (docs/engines.md)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the engine's weights."""
    max_running_samples: int = Field(default=64, ge=1)
    """Samples that the engine works on at once."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0 means all cores."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share each layer's matrices (sglang; sglang_external: as the servers were started)."""
    memory_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the GPU's memory for weights and key-value cache; 0 lets SGLang decide (sglang)."""
    return_routed_experts: bool = False
    """Keep the experts that each token was sent to, as column routed_experts (sglang, mixture-of-experts models)."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang's own options, by the names that its ServerArgs has, such as attention_backend = "triton"."""

    @model_validator(mode="after")
    def _engine_has(self) -> Self:
        only_sglang = {
            "transformers": ("tensor_parallel", "memory_fraction", "return_routed_experts", "sglang"),
            "sglang_external": ("memory_fraction", "return_routed_experts", "sglang"),
        }
        for name in only_sglang.get(self.engine, ()):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(
                    f'rollout.{name} is for rollout.engine = "sglang", but rollout.engine is "{self.engine}"'
                )
        return self


class RewardConfig(Section):
    """How answers are judged."""

    name: str
    """Name of a bundled reward (`grpcurl ... Reward/ListRewards` lists them), or "package.module:function"."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """A reward that takes longer for one sample is killed; the sample fails and its group is dropped."""
    workers: int = Field(default=2, ge=1)
    """Processes per reward replica."""
    environment: tuple[str, ...] = ()
    """Variables of the reward service's environment that rewards get, such as ["OPENAI_API_KEY"], on top of those that
    every program needs (PATH, PYTHONPATH, HOME, LANG ...)."""

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
            if name.startswith("RELAXD_"):
                raise ValueError(f"{name} is relaxd's own: rewards don't get its settings and secrets")
        return names


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays over run.steps after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Clip the global gradient norm to this; 0 is off."""
    cpu_offload: bool = False
    """Keep the optimizer's state and main weights in the host's memory, and update them there."""


class CheckpointConfig(Section):
    """Checkpoints of the trainer (docs/reliability.md)."""

    every: int = Field(default=50, ge=0)
    """Steps between two checkpoints; 0 takes one only when asked. A trainer that comes back loads the newest one and
    repeats the steps after it."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep; with two or more, one that is found damaged costs nothing but time."""
    keep_step_files: Literal["until_checkpoint", "always"] = "until_checkpoint"
    """until_checkpoint: remove a step's file once `keep` checkpoints after it are on the disk. always: keep all, so
    that `relaxd replay` can repeat any step."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """A checkpoint that isn't on the disk by then is given up; training goes on."""


class TrainerConfig(Section):
    """How the model is trained."""

    groups_per_step: int = Field(default=8, ge=1)
    """Groups in one optimizer step."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens in one packed micro-batch. A prompt that its samples share counts once, as long as all samples with
    their prompts have at most twice as many tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the model's weights and activations; bfloat16 keeps float32 main weights."""
    ranks: int = Field(default=1, ge=1)
    """Processes of the Megatron world on this node."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that share the layers."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each micro-batch's tokens, and within attention its heads."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What a layer computes again in the backward pass instead of keeping it. selective: norms, rotated heads and the
    first half of the MLP or experts, but not attention: about a twentieth more work for a third of the memory. full:
    everything, from the layer's input: a third more work for a twentieth of the memory."""
    recompute_layers: int = Field(default=0, ge=0)
    """Recompute in the first so many layers of each pipeline stage only; the others keep everything. 0 means all."""
    attention: Literal["auto", "cudnn", "varlen"] = "auto"
    """Attention kernels on GPUs in bfloat16. cudnn: cuDNN's, for packed sequences (needs the package
    nvidia-cudnn-frontend and an H100 or newer). varlen: torch's variable-length kernel, with FlashAttention 3 where
    that is installed. auto: cudnn where it works, else varlen."""
    moe: MoEConfig = MoEConfig()
    """Mixture-of-experts models."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0 means all cores, divided by ranks."""
    collective_timeout_seconds: float = Field(default=120.0, gt=0)
    """A training collective that takes longer fails. Ranks don't wait for files in a collective."""
    disk_stall_seconds: float = Field(default=300.0, gt=0)
    """Ranks wait for each other's reading and writing of files for as long as bytes get done. A rank that gets nothing
    done for this long fails the trainer."""
    max_skipped_updates: int = Field(default=8, ge=0)
    """Skip at most this many updates in a row whose loss or gradient isn't finite. One more fails the trainer, with the
    groups of these steps in the error. 0 fails at the first one."""

    @model_validator(mode="after")
    def _ranks_divide(self) -> Self:
        model_ranks = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if self.ranks % model_ranks:
            raise ValueError(
                f"trainer.ranks is {self.ranks}: it must be a multiple of tensor_parallel x pipeline_parallel x "
                f"context_parallel = {model_ranks}"
            )
        return self

    @model_validator(mode="after")
    def _offload_fits(self) -> Self:
        if self.optimizer.cpu_offload and self.dtype != "bfloat16":
            raise ValueError(
                f'trainer.optimizer.cpu_offload needs trainer.dtype = "bfloat16", but it is "{self.dtype}": only then '
                "are there main weights beside those that the model computes with"
            )
        return self

    @property
    def data_parallel(self) -> int:
        """Ranks that work on different groups."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)


class BoardConfig(Section):
    """The sample board: staleness, leases, limits."""

    max_staleness: int = Field(default=1, ge=0)
    """Most versions between the weights that wrote a token and those that train on it. 0 is strictly on-policy."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Publish this many times the groups that a step needs."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """A group whose holder hasn't renewed its hold for this long is given to another replica."""
    max_deliveries: int = Field(default=5, ge=1)
    """A group delivered more often is poison: dropped, counted, kept for inspection."""
    max_retries: int = Field(default=2, ge=0)
    """How often the prompt of a group that was dropped as too old is published again."""
    max_consecutive_drops: int = Field(default=0, ge=0)
    """More groups that fail in a row than this, without a trained step between them, pause the run with the reason. 0
    means as many as two steps train, and at least 64. Groups that the algorithm filters are no failures."""
    max_filtered_steps: int = Field(default=50, ge=0)
    """When the algorithm has filtered as many groups in a row as this many steps train (all rewards were equal, say),
    without a trained step between them, the run pauses: the task is too easy or too hard. 0 never pauses."""
    high_water_bytes: int = Field(default=0, ge=0)
    """Bytes that open groups may take in Redis; beyond, only groups that the open step needs are published. 0 means
    four fifths of Redis's maxmemory, or a fifth of its machine's memory where it has none."""
    max_group_bytes: int = Field(default=256 << 20, ge=1 << 10, le=512 << 20)
    """Most bytes that a prompt, or what one stage makes of a group, may take in Redis. One that takes more fails."""


class WeightsConfig(Section):
    """Weight synchronisation."""

    transport: Literal["gloo", "nccl", "cuda_ipc"] = "gloo"
    """How weights travel: gloo between CPUs, nccl between GPUs, cuda_ipc where trainer and engine share GPUs
    (run.colocate)."""
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Tensors are sent in buckets of this size: one travels while the next one is gathered."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """A broadcast that takes longer is aborted and repeated without whoever is late."""
    connect_timeout_seconds: float = Field(default=10.0, gt=0)
    """A weight group that isn't connected by then is given up."""
    verify: Literal["first", "always", "never"] = "first"
    """When a checksum of every tensor is compared between trainer and engine: at an engine's first synchronisation
    with a trainer, always or never. An engine with other values than were sent serves nothing and is synchronised
    again."""
    pause: Literal["in_place", "retract", "abort", "drain"] = "in_place"
    """What happens to running requests during a synchronisation: in_place keeps them and their key-value cache,
    retract keeps their tokens and computes the cache anew under the new weights (sglang), abort ends them, drain
    waits for them."""


class EvalConfig(Section):
    """Evaluation on held-out prompts, greedy."""

    prompts: int = Field(default=0, ge=0)
    """Held-out prompts to answer before the first and after the last step; 0 evaluates never."""
    interval: int = Field(default=0, ge=0)
    """Evaluate also after every so many steps, while training goes on, with the weights that the engines have then
    and get meanwhile; 0 is off."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Longest answer; 0 means rollout.max_new_tokens."""
    stall_seconds: float = Field(default=300.0, gt=0)
    """A prompt is asked of another engine when its own has generated nothing for this long, and the evaluation given up
    when there is none for as long. An answer as a whole may take any time."""


class TelemetryConfig(Section):
    """Traces and what is kept to look at."""

    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of groups that are traced."""
    samples_per_step: int = Field(default=8, ge=0)
    """Samples of each step that `relaxd samples` can show."""


class RunConfig(Section):
    """Everything about a run. Services get it from the coordinator when they register."""

    run: RunSection
    """The run as a whole."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """Where prompts come from."""
    reward: RewardConfig
    """How answers are judged."""
    rollout: RolloutConfig = RolloutConfig()
    """How answers are generated."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage and loss."""
    trainer: TrainerConfig = TrainerConfig()
    """How the model is trained."""
    board: BoardConfig = BoardConfig()
    """The sample board."""
    weights: WeightsConfig = WeightsConfig()
    """Weight synchronisation."""
    health: HealthConfig = HealthConfig()
    """Restarting what is dead or stuck."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces and samples."""

    @model_validator(mode="after")
    def _can_take_turns(self) -> Self:
        if not self.run.colocate:
            if self.weights.transport == "cuda_ipc":
                raise ValueError(
                    'weights.transport is "cuda_ipc", which is for a trainer and engines on the same GPUs: set '
                    'run.colocate = true, or use "nccl"'
                )
            return self
        wrong = None
        if self.board.max_staleness != 0:
            wrong = f"board.max_staleness is {self.board.max_staleness}: set 0, since each step waits for its groups"
        elif self.board.oversample != 1.0:
            wrong = f"board.oversample is {self.board.oversample}: set 1.0, since exactly a step's groups are generated"
        elif self.rollout.engine == "sglang_external":
            wrong = 'rollout.engine is "sglang_external", whose servers cannot be put to sleep: use "sglang"'
        elif self.weights.transport == "nccl":
            wrong = (
                'weights.transport is "nccl", which cannot connect two processes on one GPU: use "cuda_ipc", or "gloo" '
                "on a CPU"
            )
        elif self.trainer.ranks % self.rollout.tensor_parallel:
            wrong = (
                f"trainer.ranks is {self.trainer.ranks}: it must be a multiple of rollout.tensor_parallel = "
                f"{self.rollout.tensor_parallel}, so that every GPU has a rank and an engine"
            )
        if wrong:
            raise ValueError(f"run.colocate is true, but {wrong}")
        return self

    @model_validator(mode="after")
    def _engine_can_pause(self) -> Self:
        if self.weights.pause == "retract" and self.rollout.engine == "transformers":
            raise ValueError(
                'weights.pause is "retract", which rollout.engine = "transformers" cannot: use "in_place", "abort" or '
                '"drain", or rollout.engine = "sglang"'
            )
        return self

    @model_validator(mode="after")
    def _one_rank_sends(self) -> Self:
        if self.rollout.engine == "sglang_external" and self.trainer.pipeline_parallel > 1:
            raise ValueError(
                f"trainer.pipeline_parallel is {self.trainer.pipeline_parallel}: with rollout.engine = "
                '"sglang_external" it must be 1, because such servers receive weights from one rank only'
            )
        return self
