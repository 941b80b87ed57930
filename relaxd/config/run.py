"""The configuration of a run: one TOML file, one model."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from relaxd.config.algorithm import AlgorithmConfig, GRPOConfig, OwnConfig
from relaxd.config.base import Section, refuse_unused
from relaxd.config.evaluation import EvalConfig
from relaxd.config.health import HealthConfig
from relaxd.config.moe import MoEConfig
from relaxd.config.optimizer import OptimizerConfig
from relaxd.config.prompts.data import DataConfig
from relaxd.config.rehearsal import RehearsalConfig
from relaxd.config.reward import RewardConfig
from relaxd.config.roles import CriticConfig, RolesConfig
from relaxd.redis_client import parse as parse_redis_url
from relaxd.redis_client import where

LARGE_COLUMN_BYTES = 64 << 10
"""Default of board.large_column_bytes."""
FEWEST_PORTS = 2
"""Ports on which a trainer listens besides its service's: its ranks' and the weight group's rendezvous."""
JUDGE_REWARDS = ("judge", "judge_pairs", "boxed_judge")
"""Bundled rewards that ask the judge."""


class RunSection(Section):
    """The run as a whole."""

    steps: int = Field(ge=1)
    """Number of steps, each of which makes one version of the weights."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts' order, of sampling and of the trainer."""
    folder: Path = Path("runs")
    """Folder in which each run creates a folder named by its id."""
    colocate: bool = False
    """Share the devices between trainer and engines, which take turns: the engines release their memory while the
    trainer trains, and the trainer moves weights, gradients and optimizer state to host memory while the engines
    generate. Needs board.max_staleness = 0."""
    switch_timeout_seconds: float = Field(default=120.0, gt=0)
    """With colocate: repeat a request to sleep or wake up that takes longer."""

    @model_validator(mode="after")
    def _turns_are_taken(self) -> Self:
        if not self.colocate:
            refuse_unused(self, "run", ("switch_timeout_seconds",), "run.colocate is false: set true")
        return self


class ModelConfig(Section):
    """The model to train."""

    path: str
    """A Hugging Face folder, the name of a model that `relaxd model fetch` knows, or a hub name."""
    chat_template: str | None = None
    """Jinja chat template to use instead of the model's own."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as { enable_thinking = false }."""


class PartialConfig(Section):
    """What becomes of unfinished answers when their engine goes (docs/partial-rollout.md)."""

    enabled: bool = False
    """Keep them on the board, and let another engine continue them. Otherwise they are generated again from their
    beginning."""
    save_seconds: float = Field(default=30.0, gt=0)
    """Save unfinished answers this often, for replicas that die without notice. One that is drained or removed saves
    them in any case."""
    save_tokens: int = Field(default=1024, ge=1)
    """Don't save a group's answers before one of them has this many tokens that aren't saved."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Generate a group again if a token that would be trained is more versions than this older than the engine's
    weights; by default board.max_staleness."""
    mask_off_policy: bool = False
    """Don't train on kept tokens that older weights wrote than those of the engine that continues the answer."""


class RolloutConfig(Section):
    """Generation of answers."""

    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples in a group (n)."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum length of an answer, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. Log-probs are computed under it, too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 turns it off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest tokens; 0 turns it off."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, such as ["</answer>"]. Its text ends before the string, its tokens with it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer, which keeps them; empty means the model's own end tokens."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum length of an answer, in tokens: before that many, no end token is sampled."""
    engine: Literal["transformers", "sglang", "sglang_external", "scripted"] = "transformers"
    """Inference engine. transformers: on CPUs. sglang: on GPUs. sglang_external: an SGLang server that runs already,
    whose URL each rollout replica gets (docs/engines.md). scripted: none, and no trainer either; `relaxd rehearse`
    sets it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the engine's weights."""
    max_running_samples: int = Field(default=64, ge=1)
    """Maximum number of samples in progress per engine."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0 means all cores."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share each layer's matrices (sglang; for sglang_external, as the servers were started)."""
    memory_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of GPU memory for weights and key-value cache, or of what the gpu_share of judge and teacher leave of it; 0
    lets SGLang decide (sglang)."""
    return_routed_experts: bool = False
    """Store each token's experts in the column routed_experts (sglang, mixture-of-experts models)."""
    partial: PartialConfig = PartialConfig()
    """Unfinished answers of engines that go."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang's own options, named as in its ServerArgs, such as attention_backend = "triton"."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"rollout.min_new_tokens is {self.min_new_tokens}: rollout.max_new_tokens is only {self.max_new_tokens}"
            )
        if "" in self.stop:
            raise ValueError("rollout.stop has an empty string, which would end every answer at once")
        if wrong := [token for token in self.stop_token_ids if token < 0]:
            raise ValueError(f"rollout.stop_token_ids has {wrong[0]}: token ids are not negative")
        return self

    @model_validator(mode="after")
    def _partial_fits(self) -> Self:
        if not self.partial.enabled:
            if self.partial != PartialConfig():
                raise ValueError("rollout.partial is set, but rollout.partial.enabled is false: set it to true")
        elif self.return_routed_experts:
            raise ValueError(
                "rollout.partial.enabled and rollout.return_routed_experts are both true: the experts of tokens that "
                "another engine wrote aren't known, so set one of them to false"
            )
        return self

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


class CheckpointConfig(Section):
    """Checkpoints of the trainer (docs/reliability.md)."""

    every: int = Field(default=50, ge=0)
    """Steps between checkpoints. One more is saved when the run ends or is stopped, and at Ctrl-C and `relaxd down`. 0
    saves them only on request. A restarted trainer loads the newest one and repeats the steps after it."""
    replay_seconds: float = Field(default=1800.0, ge=0)
    """Also save one once the steps after the last one have taken this much work, waits not included, which a restart
    would repeat. 0: only `every` counts."""
    replay_bytes: int = Field(default=100_000_000_000, ge=0)
    """Also save one once the files of the steps after the last one take this much of the disk. They are kept as long
    as `keep` checkpoints need them, so (`keep` + 1) times as much is needed. 0: only `every` counts."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. With two or more, a run survives a damaged one. Those that `relaxd
    checkpoint` took are never removed."""
    max_bytes: int = Field(default=0, ge=0)
    """Most bytes of checkpoints on disk, with the one that is being written: the oldest ones are removed earlier
    than `keep` says, but for those that `relaxd checkpoint` took, and never the newest. At least two checkpoints. Those
    of a critic service may take as much besides. 0: no limit."""
    keep_step_files: Literal["until_checkpoint", "always"] = "until_checkpoint"
    """until_checkpoint: remove a step's file once `keep` checkpoints after it are on disk. always: keep all, so that
    `relaxd replay` can repeat any step."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """Abandon a checkpoint that is not on disk after this time; training continues."""


class TrainerConfig(Section):
    """Training of the model."""

    groups_per_step: int = Field(default=8, ge=1)
    """Groups in one step."""
    mini_batches: int = Field(default=1, ge=1)
    """Divide a step's groups into this many mini-batches, with one optimizer update each. A step is one version of the
    weights whatever its number of updates is."""
    epochs: int = Field(default=1, ge=1)
    """Number of times that a step trains on each of its mini-batches. With several updates a step, set
    algorithm.old_logprobs = "current", so that ratios are those to the weights at the step's beginning."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Maximum tokens of a packed micro-batch. A prompt that its samples share counts once, as long as all samples with
    their prompts have at most twice as many tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of weights and activations. With bfloat16, the optimizer keeps float32 main weights."""
    fp32_lm_head: bool = False
    """With dtype = "bfloat16": compute logits in float32 from the model's last hidden states, instead of rounding them
    to bfloat16, so that log-probs are closer to those of an engine that does the same (docs/mismatch.md). Log-probs of
    references and teachers, too."""
    ranks: int = Field(default=1, ge=1)
    """Processes of the Megatron world on this node."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that share the layers."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage, which add up to the model's; empty: equally many. The last stage also computes the
    logits, which for a large vocabulary take as long as several layers: give it fewer (docs/performance.md)."""
    pipeline_chunks: int = Field(default=1, ge=1)
    """Chunks of layers of each pipeline stage (Megatron's virtual pipeline, with its interleaved schedule). With v of
    them a micro-batch goes v times through all stages, each time through a v-th of their layers. Stages then wait only
    a v-th as long for the pipeline to fill and drain, but exchange v times as much, and hold activations of more
    micro-batches. For steps with few micro-batches (docs/performance.md)."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each micro-batch's tokens, and its query heads within attention. Where heads don't divide among
    them, each attends from its own tokens to the keys of all (docs/architecture.md)."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share the experts."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass instead of storing them. selective: norms, rotated heads and the
    first half of the MLP or experts, but not attention: about a twentieth more work for a third of the memory. full:
    the whole layer from its input: a third more work for a twentieth of the memory."""
    recompute_layers: int = Field(default=0, ge=0)
    """Number of layers to recompute, from the first of each pipeline stage; 0 means all."""
    activation_offload_bytes: int = Field(default=0, ge=0)
    """Pinned host memory in which each rank keeps what `recompute` leaves of the layers' activations, instead of on its
    GPU; 0: none. It is copied while the layers compute. What has no room stays on the GPU. It pays for long rows, whose
    layers take longer than the copies: with recompute = "full" for more tokens, with "selective" for less work."""
    overlap_grad_reduce: bool = False
    """Where ranks share parameters, as in data parallelism: add up their gradients during the backward pass of an
    update's last micro-batch, in buckets of 40 million parameters or more, instead of afterwards. The sums are the
    same. With several buckets each rank updates other parameters, so that the gradient norm is rounded differently.
    For ranks on several machines; over NVLink it was no faster."""
    shard_gradients: bool = False
    """Where ranks share parameters, as in data parallelism: keep on each rank only its shard of the accumulated
    gradients (ZeRO stage 2), and a few buckets of 40 million parameters or more during a backward pass. Gradients are
    then added up over ranks in each micro-batch instead of once an update, in another order of sums. With
    overlap_grad_reduce while others are computed (docs/fit.md). Not with pipeline_chunks."""
    attention: Literal["auto", "cudnn", "varlen"] = "auto"
    """Attention kernels on GPUs in bfloat16. cudnn: cuDNN's, for packed sequences (needs the package
    nvidia-cudnn-frontend and an H100 or newer). varlen: torch's variable-length kernel, with FlashAttention 3 if
    installed. auto: cudnn if it works, else varlen; varlen also for prompts so long that it pays to compute their
    queries once for all samples (docs/architecture.md)."""
    moe: MoEConfig = MoEConfig()
    """Mixture-of-experts models."""
    routing_replay: Literal["none", "rollout", "trainer"] = "none"
    """Experts of the tokens in a mixture-of-experts model (docs/mismatch.md). none: the trainer's routers choose.
    rollout: those that the engine chose; needs rollout.return_routed_experts. trainer: those that the trainer chose at
    the beginning of a step of several updates, in all of them. The gates' weights are always the trainer's own."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0 divides all cores among the ranks."""
    collective_timeout_seconds: float = Field(default=120.0, gt=0)
    """Deadline of each collective in training. It does not cover reading and writing files."""
    disk_stall_seconds: float = Field(default=300.0, gt=0)
    """While ranks wait for each other's file I/O, a rank that makes no progress for this long fails the trainer."""
    max_skipped_updates: int = Field(default=8, ge=0)
    """Maximum consecutive updates to skip because loss or gradient is not finite. One more fails the trainer; the error
    lists the groups of these steps. 0 fails at the first one."""

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
    def _what_is_set_counts(self) -> Self:
        if self.recompute == "none":
            reason = 'trainer.recompute is "none": set "selective" or "full"'
            refuse_unused(self, "trainer", ("recompute_layers",), reason)
        if self.dtype == "float32":
            reason = 'trainer.dtype is "float32", in which logits are computed anyway: remove it, or set "bfloat16"'
            refuse_unused(self, "trainer", ("fp32_lm_head",), reason)
        return self

    @model_validator(mode="after")
    def _stages_have_layers(self) -> Self:
        counts = self.pipeline_layers
        if counts and (len(counts) != self.pipeline_parallel or min(counts) < 1):
            raise ValueError(
                f"trainer.pipeline_layers is {list(counts)}: it must have a number of at least 1 for each of the "
                f"trainer.pipeline_parallel = {self.pipeline_parallel} stages, or be empty"
            )
        if self.pipeline_chunks > 1 and self.pipeline_parallel == 1:
            raise ValueError(
                f"trainer.pipeline_chunks is {self.pipeline_chunks}, but trainer.pipeline_parallel is 1: without a "
                "pipeline set 1"
            )
        if self.pipeline_chunks > 1 and self.shard_gradients:
            raise ValueError(
                f"trainer.shard_gradients is true, but trainer.pipeline_chunks is {self.pipeline_chunks}: chunks of "
                "different micro-batches go backward in turn, which sharded gradients can't follow: set only one"
            )
        if self.pipeline_chunks > 1 and counts:
            raise ValueError(
                f"trainer.pipeline_chunks is {self.pipeline_chunks}, with which stages have equally many layers, but "
                f"trainer.pipeline_layers is {list(counts)}: set only one of them"
            )
        return self

    @model_validator(mode="after")
    def _groups_fill_mini_batches(self) -> Self:
        if self.mini_batches > self.groups_per_step:
            raise ValueError(
                f"trainer.mini_batches is {self.mini_batches}: it must be at most trainer.groups_per_step = "
                f"{self.groups_per_step}, because a group isn't divided"
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

    @model_validator(mode="after")
    def _routing_is_repeated(self) -> Self:
        if self.routing_replay == "trainer" and self.updates_per_step == 1:
            raise ValueError(
                'trainer.routing_replay is "trainer", but a step has one update, whose routing is the first: set '
                '"none", or several updates with trainer.mini_batches or trainer.epochs'
            )
        return self

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates in a step."""
        return self.mini_batches * self.epochs

    @property
    def data_parallel(self) -> int:
        """Number of ranks that work on different groups."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)


class BoardConfig(Section):
    """The sample board: staleness, leases, limits."""

    max_staleness: int = Field(default=1, ge=0)
    """Maximum versions between the weights that generated a token and those that train on it. 0 is strictly
    on-policy."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Publish this many times the groups that a step needs."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Redeliver a group whose holder has not renewed its lease for this long."""
    max_deliveries: int = Field(default=5, ge=1)
    """Maximum deliveries of a group to a stage. Then it is poison: dropped, counted and recorded for inspection."""
    max_retries: int = Field(default=2, ge=0)
    """Maximum times to publish the prompt of a stale group again."""
    max_consecutive_drops: int = Field(default=0, ge=0)
    """Pause the run when more groups than this fail without a trained step in between. 0 means two steps' groups, but
    at least 64. Groups that the algorithm filters do not count."""
    max_filtered_steps: int = Field(default=50, ge=0)
    """Pause the run when the algorithm filters this many steps' groups without a trained step in between, for example
    because all rewards are equal: the task is too easy or too hard. 0 never pauses."""
    high_water_bytes: int = Field(default=0, ge=0)
    """Maximum bytes of open groups in Redis; above, only groups that the open step needs are published. 0 means four
    fifths of Redis's maxmemory, or a fifth of its machine's memory if it has none."""
    max_group_bytes: int = Field(default=256 << 20, ge=1 << 10, le=16 << 30)
    """Maximum bytes in Redis of a prompt, or of one stage's columns of a group. A larger one fails."""
    large_column_bytes: int = Field(default=LARGE_COLUMN_BYTES, ge=1, le=1 << 20)
    """Write a column of at least so many bytes apart from the script that commits it: no script handles its bytes, and
    it is on a data node, if there are any."""
    data_urls: tuple[str, ...] = Field(default=(), max_length=64)
    """Redis servers for large columns, such as ["redis://data-1:6379/0", "redis://data-2:6379/0"]; empty: they are on
    the board's Redis, or node of a cluster. User, password and certificates are those of the board's Redis."""

    @field_validator("data_urls")
    @classmethod
    def _data_nodes_differ(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if urlsplit(url).password:
                raise ValueError("a URL has a password, which the run's records would show: leave it out")
            if parse_redis_url(url).nodes:
                raise ValueError(f"{where(url)} can't be a data node: name servers, each with a URL of its own")
        places = [where(url) for url in urls]
        twice = [place for place, times in Counter(places).items() if times > 1]
        if twice:
            raise ValueError(f"{twice[0]} is named twice: each data node must be a server of its own")
        return urls


class WeightsConfig(Section):
    """Weight synchronisation."""

    transport: Literal["gloo", "nccl", "cuda_ipc"] = "gloo"
    """gloo: between CPUs. nccl: between GPUs. cuda_ipc: between trainer and engines that share GPUs (run.colocate)."""
    interval: int = Field(default=1, ge=1)
    """Send new weights to the engines after every so many steps, and after the last one. An engine that joins gets the
    newest ones, and all others with it. At most board.max_staleness + 1, or steps would lack groups that are fresh
    enough."""
    ports: str = Field(default="", pattern=r"^(\d{1,5}-\d{1,5})?$")
    """Ports on which the trainer's ranks and the weight group meet, such as "29500-29599"; empty: any free ones. gloo
    and NCCL choose the ports of the connections between ranks themselves (docs/deploy.md)."""
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of the buckets in which tensors are sent: one is sent while the next is gathered."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Abort a broadcast that takes longer, and repeat it without the late engines."""
    connect_timeout_seconds: float = Field(default=10.0, gt=0)
    """Deadline for connecting a weight group."""
    verify: Literal["first", "always", "never"] = "first"
    """Compare a checksum of every tensor between trainer and engine: at an engine's first synchronisation with a
    trainer, always or never. An engine whose values differ does not serve and is synchronised again."""
    pause: Literal["in_place", "retract", "abort", "drain"] = "in_place"
    """Running requests during a synchronisation: in_place keeps them and their key-value cache, retract keeps their
    tokens and recomputes the cache under the new weights (sglang), abort ends them, drain waits for them."""

    @property
    def port_range(self) -> range | None:
        """The ports to listen on; None: any."""
        if not self.ports:
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _ports_suffice(self) -> Self:
        ports = self.port_range
        if ports is None:
            return self
        if not 1024 <= ports.start < ports.stop <= 65536:
            raise ValueError(f'weights.ports is "{self.ports}": it must be FIRST-LAST, from 1024 to 65535')
        if len(ports) < FEWEST_PORTS:
            raise ValueError(
                f'weights.ports is "{self.ports}", which are {len(ports)}: a trainer needs {FEWEST_PORTS}, one for its '
                "ranks and one for the weight group; give it some more, for a trainer that takes its place"
            )
        return self


class TelemetryConfig(Section):
    """Traces and sample records."""

    traces: Literal["otlp", "file"] = "otlp"
    """otlp: send traces to OTEL_EXPORTER_OTLP_ENDPOINT, if that is set. file: also write them into the run's folder, so
    that `relaxd trace` shows them."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of groups to trace."""
    samples_per_step: int = Field(default=8, ge=0)
    """Samples of each step to keep for `relaxd samples`, in Redis and in the run's samples.jsonl."""


class RunConfig(Section):
    """The configuration of a run. Services get it from the coordinator when they register."""

    run: RunSection
    """The run as a whole."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """The source of prompts."""
    reward: RewardConfig
    """Scoring of answers."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of answers."""
    algorithm: AlgorithmConfig = GRPOConfig()
    """Advantage and loss."""
    trainer: TrainerConfig = TrainerConfig()
    """Training of the model."""
    board: BoardConfig = BoardConfig()
    """The sample board."""
    weights: WeightsConfig = WeightsConfig()
    """Weight synchronisation."""
    roles: RolesConfig = RolesConfig()
    """Roles that only some runs need."""
    health: HealthConfig = HealthConfig()
    """Detection and recovery of dead or stuck replicas."""
    rehearsal: RehearsalConfig = RehearsalConfig()
    """What a rehearsal assumes."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces and samples."""

    def trace_folder(self, run_folder: str) -> Path | None:
        """Return the run's folder if its processes write traces there, else None."""
        return Path(run_folder) if self.telemetry.traces == "file" else None

    def frozen_roles(self, placement: Literal["trainer", "service"] | None = None) -> list[str]:
        """Return the roles of the frozen models that the run has, in this place or in any."""
        has = {
            "reference": self.algorithm.needs_reference,
            "teacher": self.algorithm.needs_teacher and bool(self.roles.teacher.settings),
        }
        return [
            role
            for role, own in self.roles.frozen.items()
            if has[role] and (placement is None or own.placement == placement)
        ]

    def refreshed_after(self, step: int) -> tuple[str, ...]:
        """Return the roles whose models take over the trained model's weights after a step."""
        every = {role: self.roles.frozen[role].refresh_every for role in self.frozen_roles()}
        return tuple(role for role, steps in every.items() if steps and step % steps == 0)

    @property
    def has_privileged_teacher(self) -> bool:
        """Whether the run has a teacher whose prompts have more than the student's."""
        return "teacher" in self.frozen_roles() and bool(self.roles.teacher.privileged_key)

    @property
    def student_candidates_problem(self) -> str:
        """Why the teacher can't be asked about the student's likeliest tokens, or ""; the run has a teacher."""
        teacher, engine = self.roles.teacher, self.rollout.engine
        if teacher.placement == "trainer":
            if not teacher.privileged_key:
                return ""
            return (
                "roles.teacher.privileged_key is set, so the trainer's teacher has rows with other prompts than the "
                'student\'s: set roles.teacher.placement = "service", to which the engine says what it finds likeliest'
            )
        if teacher.engine != "megatron":
            return (
                f'roles.teacher.engine is "{teacher.engine}", which takes one list of tokens for all places of an '
                'answer, not others in each: use "megatron", or roles.teacher.placement = "trainer"'
            )
        if engine not in ("transformers", "sglang"):
            return (
                f'rollout.engine is "{engine}", which doesn\'t say what it finds likeliest: use "sglang" or '
                '"transformers", or roles.teacher.placement = "trainer"'
            )
        return ""

    @property
    def teacher_engine(self) -> RolloutConfig:
        """The settings of the teacher's engine (roles.teacher.engine = "sglang"), under the names of [rollout].

        It never decodes, so it has no CUDA graphs, whose capture is most of a start.
        """
        teacher = self.roles.teacher
        return RolloutConfig(
            engine="sglang",
            dtype=self.trainer.dtype,
            temperature=self.rollout.temperature,
            max_running_samples=128,
            threads=teacher.threads,
            tensor_parallel=teacher.tensor_parallel,
            memory_fraction=teacher.memory_fraction,
            sglang={
                "disable_cuda_graph": True,
                "enable_fp32_lm_head": self.trainer.fp32_lm_head,
                **teacher.sglang,
            },
        )

    @property
    def teacher_prompt_tokens(self) -> int:
        """Maximum length of a prompt of the teacher."""
        return self.roles.teacher.max_prompt_tokens or self.data.max_prompt_tokens

    @property
    def published_prompt_tokens(self) -> int:
        """Most tokens that are published of a prompt: the student's, and the teacher's if it has prompts of its own."""
        return self.data.max_prompt_tokens + (self.teacher_prompt_tokens if self.has_privileged_teacher else 0)

    @model_validator(mode="after")
    def _refreshed_begin_with_the_initial_model(self) -> Self:
        for role, own in self.roles.frozen.items():
            if own.refresh_every and role not in self.frozen_roles():
                raise ValueError(
                    f"{own.section}.refresh_every is {own.refresh_every}, but the run has no {role}: remove it, or set "
                    f"{'algorithm.kl_coef' if role == 'reference' else f'{own.section}.model'}"
                )
            others = [name for name in own.settings.values() if name not in ("", self.model.path)]
            if own.refresh_every and others:
                raise ValueError(
                    f'{own.section}.refresh_every is {own.refresh_every}, but {own.section}.model is "{others[0]}": '
                    f'a model that takes over the trained one\'s weights begins as it does; set "{self.model.path}"'
                )
        return self

    @model_validator(mode="after")
    def _reference_is_needed(self) -> Self:
        if self.roles.reference.placement == "service" and not self.algorithm.needs_reference:
            raise ValueError(
                'roles.reference.placement is "service", but algorithm.kl_coef is 0, which needs no reference: set '
                'kl_coef > 0, or placement = "trainer"'
            )
        return self

    @model_validator(mode="after")
    def _reference_model_is_needed(self) -> Self:
        if self.roles.reference.model and not self.algorithm.needs_reference:
            raise ValueError(
                f'roles.reference.model is "{self.roles.reference.model}", but algorithm.kl_coef is 0, which needs no '
                "reference: set kl_coef > 0, or remove the model"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_needed(self) -> Self:
        algorithm, models = self.algorithm, self.roles.teacher.settings
        if isinstance(algorithm, OwnConfig):
            return self
        if self.roles.teacher.privileged_key and not models:
            raise ValueError(
                f'roles.teacher.privileged_key is "{self.roles.teacher.privileged_key}", but no teacher is there to '
                f'see it: remove it, or set roles.teacher.model, which may be model.path, "{self.model.path}"'
            )
        if not models and not algorithm.needs_teacher:
            refuse_unused(
                self.roles.teacher,
                "roles.teacher",
                type(self.roles.teacher).model_fields,
                "the run has no teacher: set roles.teacher.model, and algorithm.distill_coef or distill_loss_coef",
            )
        if models and not algorithm.needs_teacher:
            setting, model = next(iter(models.items()))
            raise ValueError(
                f'{setting} is "{model}", but algorithm.distill_coef and algorithm.distill_loss_coef are 0, '
                "which need no teacher: set one of them, or remove the model"
            )
        if algorithm.distill_candidates != "teacher" and (problem := self.student_candidates_problem):
            raise ValueError(
                f'algorithm.distill_candidates is "{algorithm.distill_candidates}", but {problem}; or use '
                'distill_candidates = "teacher"'
            )
        if algorithm.needs_teacher and not models:
            raise ValueError(
                "roles.teacher.model is empty: set it to the teacher's model, because algorithm.distill_coef is "
                f"{algorithm.distill_coef:g} and algorithm.distill_loss_coef {algorithm.distill_loss_coef:g}"
            )
        return self

    @model_validator(mode="after")
    def _judge_is_there(self) -> Self:
        named = {
            "reward.name": self.reward.name,
            **{f"reward.terms.{number}.name": term.name for number, term in enumerate(self.reward.terms)},
            **{f"reward.choices.{value}": one.name for value, one in self.reward.choices.items()},
            **{f"eval.sets.{number}.reward": one.reward for number, one in enumerate(self.eval.sets)},
        }
        asking = [f'{setting} is "{name}"' for setting, name in named.items() if name in JUDGE_REWARDS]
        if asking and not self.roles.judge.is_there:
            raise ValueError(f"{asking[0]}, but there is no judge: set roles.judge.model")
        return self

    @model_validator(mode="after")
    def _services_are_called(self) -> Self:
        if not self.reward.calls_services and not any(one.reward_address for one in self.eval.sets):
            reason = "no reward is a service at an address: remove it"
            refuse_unused(self.reward, "reward", ("max_in_flight", "outage_seconds"), reason)
        return self

    @model_validator(mode="after")
    def _judge_can_share(self) -> Self:
        judge, engines = self.roles.judge, ("sglang", "transformers") if self.run.colocate else ("sglang",)
        if judge.shares_gpus and (self.rollout.engine not in engines or judge.engine != self.rollout.engine):
            raise ValueError(
                f'roles.judge.gpu_share is {judge.gpu_share:g}, but rollout.engine is "{self.rollout.engine}" and '
                f'roles.judge.engine is "{judge.engine}": on GPUs that they share, both must be "sglang"'
                + (' (or "transformers" on CPUs, to take turns there)' if self.run.colocate else "")
            )
        return self

    @model_validator(mode="after")
    def _teacher_can_share(self) -> Self:
        teacher, judge = self.roles.teacher, self.roles.judge
        if not teacher.shares_gpus:
            return self
        section = f"{teacher.section}.gpu_share is {teacher.gpu_share:g}"
        if self.run.colocate:
            raise ValueError(
                f"{section}, but run.colocate is true, where trainer and engines take turns on their GPUs, and a "
                "teacher takes no turns: give it GPUs of its own, which is 1"
            )
        if self.rollout.engine != "sglang":
            raise ValueError(
                f'{section}, but rollout.engine is "{self.rollout.engine}": only engines that are "sglang" leave a '
                "share of their GPUs free"
            )
        if self.roles.engine_gpu_share <= 0:
            raise ValueError(
                f"{section} and roles.judge.gpu_share {judge.gpu_share:g}, which leaves nothing of a GPU for a "
                "rollout engine: lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _critic_fits(self) -> Self:
        critic = self.roles.critic
        own = isinstance(self.algorithm, OwnConfig)  # says itself what it needs
        if critic != CriticConfig() and not own and not self.algorithm.needs_critic:
            raise ValueError(
                f'roles.critic is set, but algorithm.name is "{self.algorithm.name}", which trains no critic: use '
                '"ppo", or leave roles.critic out'
            )
        if critic.optimizer.cpu_offload and self.trainer.dtype != "bfloat16":
            raise ValueError(
                'roles.critic.optimizer.cpu_offload needs trainer.dtype = "bfloat16", but it is '
                f'"{self.trainer.dtype}": only then are there main weights beside those that the critic computes with'
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Self:
        algorithm, samples = self.algorithm, self.rollout.samples_per_prompt
        who = f'algorithm.name is "{algorithm.name}"'
        if samples < algorithm.min_samples:
            raise ValueError(
                f"{who}, but rollout.samples_per_prompt is {samples}: it compares the samples of a group, so there "
                f"must be at least {algorithm.min_samples}"
            )
        if algorithm.on_policy_only and self.board.max_staleness > 0:
            raise ValueError(
                f"{who}, but board.max_staleness is {self.board.max_staleness}: set 0, because "
                f"{algorithm.on_policy_only}"
            )
        if algorithm.on_policy_only and self.trainer.updates_per_step > 1:
            raise ValueError(
                f"{who}, but a step has {self.trainer.updates_per_step} updates: set trainer.mini_batches = 1 and "
                f"trainer.epochs = 1, because {algorithm.on_policy_only}"
            )
        return self

    @model_validator(mode="after")
    def _shaping_begins(self) -> Self:
        algorithm, longest = self.algorithm, self.rollout.max_new_tokens
        if isinstance(algorithm, OwnConfig) or not algorithm.overlong_buffer:
            return self
        if (begins := algorithm.overlong_limit - algorithm.overlong_buffer) >= longest:
            raise ValueError(
                f"algorithm.overlong_limit is {algorithm.overlong_limit}, so that shaping begins after {begins} "
                f"tokens, but no answer is longer than rollout.max_new_tokens = {longest}: set overlong_limit to that"
            )
        return self

    @model_validator(mode="after")
    def _routing_is_returned(self) -> Self:
        if self.trainer.routing_replay == "rollout" and not self.rollout.return_routed_experts:
            able = self.rollout.engine in ("sglang", "scripted")
            raise ValueError(
                'trainer.routing_replay is "rollout", but '
                + (
                    "rollout.return_routed_experts is false: set true"
                    if able
                    else f'rollout.engine is "{self.rollout.engine}", which doesn\'t return the experts: use "sglang" '
                    "with rollout.return_routed_experts = true"
                )
            )
        return self

    @model_validator(mode="after")
    def _lengths_of_sources_fit(self) -> Self:
        most = self.rollout.max_new_tokens
        for number, source in enumerate(self.data.sources):
            own = source.min_new_tokens
            least = max(1, self.rollout.min_new_tokens if own is None else own)
            if source.max_new_tokens and not least <= source.max_new_tokens <= most:
                setting = "rollout.min_new_tokens" if own is None else "its min_new_tokens"
                raise ValueError(
                    f"data.sources.{number}.max_new_tokens is {source.max_new_tokens}: it must be {least} "
                    f"({setting}) to {most} (rollout.max_new_tokens)"
                )
            if own is not None and own > most:
                raise ValueError(
                    f"data.sources.{number}.min_new_tokens is {own}: rollout.max_new_tokens is only {most}"
                )
        return self

    @model_validator(mode="after")
    def _lengths_of_sets_fit(self) -> Self:
        longest = self.eval.max_new_tokens or self.rollout.max_new_tokens
        if self.eval.prompts and longest < self.rollout.min_new_tokens:
            raise ValueError(
                f"eval.max_new_tokens is {longest}: it must be at least rollout.min_new_tokens = "
                f"{self.rollout.min_new_tokens}"
            )
        for number, one in enumerate(self.eval.sets):
            least = self.rollout.min_new_tokens if one.min_new_tokens is None else one.min_new_tokens
            if (most := one.max_new_tokens or longest) < least:
                raise ValueError(
                    f"eval.sets.{number} has answers of at most {most} and at least {least} tokens: raise "
                    "max_new_tokens, or lower min_new_tokens (by default rollout.min_new_tokens)"
                )
        return self

    @model_validator(mode="after")
    def _can_take_turns(self) -> Self:
        if not self.run.colocate:
            if self.weights.transport == "cuda_ipc":
                raise ValueError(
                    'weights.transport is "cuda_ipc", which needs trainer and engines on the same GPUs: set '
                    'run.colocate = true, or use "nccl"'
                )
            return self
        wrong = None
        if self.board.max_staleness != 0:
            wrong = f"board.max_staleness is {self.board.max_staleness}: set 0, since each step waits for its groups"
        elif self.board.oversample != 1.0:
            wrong = f"board.oversample is {self.board.oversample}: set 1.0, since exactly a step's groups are generated"
        elif self.rollout.engine == "sglang_external":
            wrong = 'rollout.engine is "sglang_external", whose servers cannot sleep: use "sglang"'
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
    def _weights_are_fresh_enough(self) -> Self:
        interval, staleness = self.weights.interval, self.board.max_staleness
        if interval > staleness + 1:
            raise ValueError(
                f"weights.interval is {interval}, but board.max_staleness is {staleness}: the last of {interval} steps "
                f"would need tokens that are {interval - 1} versions old, so that the run would stop before it; set "
                f"weights.interval to at most {staleness + 1}, or board.max_staleness to at least {interval - 1}"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_pause(self) -> Self:
        if self.weights.pause == "retract" and self.rollout.engine == "transformers":
            raise ValueError(
                'weights.pause is "retract", which rollout.engine = "transformers" does not support: use "in_place", '
                '"abort" or "drain", or rollout.engine = "sglang"'
            )
        return self

    @model_validator(mode="after")
    def _one_rank_sends(self) -> Self:
        if self.rollout.engine == "sglang_external" and self.trainer.pipeline_parallel > 1:
            raise ValueError(
                f"trainer.pipeline_parallel is {self.trainer.pipeline_parallel}: with rollout.engine = "
                '"sglang_external" it must be 1, because SGLang servers receive weights from one rank only'
            )
        return self
