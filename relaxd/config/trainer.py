"""[trainer]: training, its optimizer and its checkpoints."""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from relaxd.config.section import Section


class MoEConfig(Section):
    """Training of the routers of mixture-of-experts models. Dense models ignore this section."""

    aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss (Switch Transformers, arXiv 2101.03961, equations 4 to 6), which is 1 under an
    even load. Added to the loss for each layer and micro-batch, in proportion to the micro-batch's share of the step. 0
    turns it off, as is usual in RL."""
    z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the router's z-loss (ST-MoE, arXiv 2202.08906, equation 5), which keeps its logits small. Added like
    the load-balancing loss. 0 turns it off."""
    freeze_router: bool = False
    """Don't train the routers: they keep their pretrained weights. Tokens may still change experts as other weights
    change."""


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    section: ClassVar[str] = "trainer.optimizer"

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of the trained model."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of its decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Form of the learning rate's decay over run.steps after the warm-up. All updates of a step have the same rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps of linear warm-up of the learning rate, however many updates a step has."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment (beta1)."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment (beta2)."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Epsilon of AdamW, which is added to the denominator of an update."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm, above which gradients are clipped; 0 turns clipping off."""
    moments: Literal["float32", "bfloat16", "float8"] = "float32"
    """Element type in which AdamW keeps its two moments. bfloat16: 4 bytes for each parameter instead of 8, and a
    slower update, which still computes in float32 and rounds stochastically (docs/fit.md). float8: 3 bytes, because
    only the first moment is in float8, with a scale for each 32 elements; the second is in bfloat16. A checkpoint of
    another type is converted."""
    cpu_offload: bool = False
    """Keep and update the optimizer's state and main weights in host memory."""

    def problems(self) -> Iterator[str]:
        if self.schedule == "constant":
            yield from self.unused(("min_lr",), f'{self.section}.schedule is "constant": set another one')
        if self.cpu_offload and self.moments != "float32":
            yield (
                f'{self.section}.moments is "{self.moments}", but {self.section}.cpu_offload is true: moments in the '
                'host\'s memory are "float32"; set one of the two'
            )

    @property
    def moment_bytes(self) -> float:
        """Size of a parameter's two AdamW moments in memory, with their scales, in bytes."""
        return {"float32": 8, "bfloat16": 4, "float8": 3 + 1 / 32}[self.moments]

    @property
    def saved_moment_bytes(self) -> int:
        """Size of a parameter's two AdamW moments in a checkpoint, in bytes. float8 is written there as bfloat16."""
        return 8 if self.moments == "float32" else 4


class CheckpointConfig(Section):
    """Checkpoints of the trainer (docs/reliability.md)."""

    every: int = Field(default=50, ge=0)
    """Number of steps between checkpoints. Another checkpoint is saved when the run ends or is stopped, and at Ctrl-C
    and `relaxd down`. 0 saves checkpoints only on request. A restarted trainer loads the newest checkpoint and repeats
    the steps after it."""
    replay_seconds: float = Field(default=1800.0, ge=0)
    """Also save a checkpoint once the steps since the last one took this many seconds of work, which a restart would
    repeat; waits don't count. 0: off."""
    replay_bytes: int = Field(default=100_000_000_000, ge=0)
    """Also save a checkpoint once the step files since the last one take this many bytes. The step files of `keep`
    checkpoints are kept, so the disk needs (`keep` + 1) times as much. 0: off."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. With two or more, a run survives a damaged checkpoint. Checkpoints that
    `relaxd checkpoint` took are never removed."""
    max_bytes: int = Field(default=0, ge=0)
    """Maximum size of all checkpoints on disk, in bytes, including an unfinished one; must fit at least two
    checkpoints, three with `keep_best`. The oldest ones are then removed earlier than `keep` says, except the newest
    and those that `relaxd checkpoint` took. The checkpoints of a critic service may take as much again. 0: no limit."""
    moments: bool = True
    """Save AdamW's moments, two thirds of a checkpoint. Without them a restart from the newest checkpoint begins with
    zero moments, so the repeated steps don't give the same bits (docs/reliability.md)."""
    keep_best: str = ""
    """Also keep the checkpoint with the best result of evaluations: "eval.SET.METRIC", such as "eval.held_out.reward"
    or "eval.math500.pass_at_1"; with "-" before it the lowest value is the best. Each evaluation during training then
    takes a checkpoint of the version that it evaluates. `relaxd export RUN OUT --best` exports it. Empty: none."""
    keep_step_files: Literal["until_checkpoint", "always"] = "until_checkpoint"
    """Retention of step files. until_checkpoint: remove a step's file once `keep` checkpoints after it are on disk.
    always: keep all, so that `relaxd replay` can repeat any step."""
    export_every: int = Field(default=0, ge=0)
    """Number of steps between exports of the model as a Hugging Face folder, models/step-N in the run's folder. The
    next step waits meanwhile. Exports are never removed. 0: export only when the run ends."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """Seconds after which an unfinished checkpoint is abandoned; training continues."""


class ProfileConfig(Section):
    """Recording of steps with torch's profiler (docs/profiling.md). The call `Profile` records steps during a run."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of the steps to record, each in a file for Perfetto in the run's folder profiles/."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Trainer ranks whose steps are recorded."""
    stacks: bool = False
    """Record the lines of Python that call each operation: files become several times as large."""
    memory: bool = False
    """Record every allocation of GPU memory of the recorded ranks, from the start on. Write a snapshot after each of
    the recorded steps, and when memory runs out. Costs a few microseconds for each allocation. CPUs have none."""


_EYES, _EARS = r"(model|thinker)\.visual\.", r"thinker\.audio_tower\."
_TO_LANGUAGE = r"((model|thinker)\.visual\.(merger|merger_list|deepstack_merger_list)|thinker\.audio_tower\.proj[12])\."
PARTS = {
    "vision": f"^(?!{_TO_LANGUAGE}){_EYES}",
    "audio": f"^(?!{_TO_LANGUAGE}){_EARS}",
    "projection": f"^{_TO_LANGUAGE}",
    "language": f"^(?!{_EYES}|{_EARS})",
}
"""Name patterns of a model's parts in Hugging Face's format, by the short names used in `freeze` and `train_only`."""


def _pattern(text: str) -> str:
    try:
        re.compile(PARTS.get(text, text))
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


NamePattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]
"""Pattern of tensor names: a regular expression, or the name of a part of the model (a key of `PARTS`)."""


class TrainerConfig(Section):
    """Training of the model: steps, parallelism, kernels, optimizer and checkpoints."""

    section: ClassVar[str] = "trainer"

    groups_per_step: int = Field(default=8, ge=1)
    """Number of groups in a step."""
    mini_batches: int = Field(default=1, ge=1)
    """Number of mini-batches that a step's groups are divided into, with an optimizer update each. A step makes one
    version of the weights with any number of updates."""
    epochs: int = Field(default=1, ge=1)
    """Number of times that a step trains on each of its mini-batches. With several updates a step, set
    algorithm.old_logprobs = "current", so that ratios are relative to the weights at the step's beginning."""
    micro_batch_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of a packed micro-batch. A prompt that its samples share counts once, as long as all samples with
    their prompts have at most twice as many tokens. 0: enough for the longest sample, data.max_prompt_tokens +
    rollout.max_new_tokens, and at least 4,096."""
    reset_moments_every: int = Field(default=0, ge=0)
    """Interval, in steps, at which the policy's AdamW is reset: zero moments, and bias correction as in a first update.
    The learning-rate schedule continues. 0: never."""
    reset_moments_after: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of further steps after which AdamW is reset in the same way. `relaxd resume RUN --from-step N
    --reset-moments` adds a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of weights and activations. With bfloat16, the optimizer keeps float32 main weights."""
    fp32_lm_head: bool = False
    """With dtype = "bfloat16": compute logits in float32 from the model's last hidden states, instead of rounding them
    to bfloat16, so that log-probs are closer to those of an engine that does the same (docs/mismatch.md). This also
    applies to log-probs of references and teachers."""
    ranks: int = Field(default=1, ge=1)
    """Number of the trainer's processes (Megatron's world size), on all hosts together."""
    hosts: int = Field(default=1, ge=1)
    """Number of hosts, which divide the ranks evenly: the trainer's own, and one for each replica of the role `ranks`
    (docs/deploy.md). Tensor-parallel ranks stay within a host."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share each layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share the layers, in pipeline stages."""
    pipeline_layers: tuple[int, ...] = ()
    """Number of layers of each pipeline stage, which add up to the model's; empty: divided evenly. The last stage also
    computes the logits, which for a large vocabulary take as long as several layers: give it fewer
    (docs/performance.md)."""
    pipeline_chunks: int = Field(default=1, ge=1)
    """Number of chunks of layers of each pipeline stage (Megatron's virtual pipeline, with its interleaved schedule).
    With v chunks a micro-batch passes v times through all stages, each time through 1/v of their layers. Stages then
    wait only 1/v as long for the pipeline to fill and drain, but exchange v times as much data and hold activations of
    more micro-batches. Useful for steps with few micro-batches (docs/performance.md)."""
    context_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share each micro-batch's tokens and, within attention, its query heads. If the number of
    heads isn't divisible by these ranks, each rank attends from its own tokens to the keys of all tokens
    (docs/architecture.md)."""
    expert_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share the experts."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass instead of storing them. selective: norms, rotated heads and the
    first half of the MLP or experts, but not attention: about 5 % more work, a third of the memory. full: the whole
    layer from its input: a third more work, about 5 % of the memory."""
    recompute_layers: int = Field(default=0, ge=0)
    """Number of layers whose activations are recomputed, from the first of each pipeline stage; 0 means all."""
    activation_offload_bytes: int = Field(default=0, ge=0)
    """Bytes of pinned host memory to which each rank offloads the activations that `recompute` doesn't discard; 0:
    none. Activations are copied while the layers compute; those that don't fit stay on the GPU. It pays off for long
    rows, whose layers take longer than the copies: recompute = "full" then fits more tokens, "selective" saves work."""
    offload: bool = True
    """With run.colocate: move weights and optimizer state to the host's memory while the engines generate. false: keep
    them on the GPU, if they fit beside the engine (`relaxd fit`), so that turns take less time. Gradients are freed in
    either case."""
    overlap_grad_reduce: bool = False
    """For ranks that share parameters, as in data parallelism: sum their gradients during the backward pass of an
    update's last micro-batch, in buckets of 40 million parameters or more, instead of afterwards. The sums are the
    same, but with several buckets the parameters are divided differently among ranks, so the gradient norm is rounded
    differently. For ranks on several machines; over NVLink it was no faster."""
    shard_gradients: bool = False
    """Shard gradients among ranks that share parameters, as in data parallelism: each rank keeps only its shard of the
    accumulated gradients (ZeRO stage 2), and during a backward pass a few buckets of 40 million parameters or more.
    Gradients are then summed over ranks after each micro-batch instead of once per update, in a different order. With
    overlap_grad_reduce the sums overlap the backward pass (docs/fit.md). Not with pipeline_chunks."""
    attention: Literal["auto", "cudnn", "varlen"] = "auto"
    """Attention kernels on GPUs in bfloat16. cudnn: cuDNN's, for packed sequences (needs the package
    nvidia-cudnn-frontend and an H100 or newer). varlen: torch's variable-length kernel, with FlashAttention 3 if
    installed. auto: cudnn if it works, else varlen; auto also uses varlen for prompts so long that computing their
    queries once for all samples pays (docs/architecture.md)."""
    freeze: tuple[NamePattern, ...] = ("vision", "audio", "projection")
    """Tensors that are not trained: regular expressions, found anywhere in Hugging Face's names, or names of parts.
    vision: the vision tower without its projection. audio: the tower for sound without its projection. projection: the
    towers' last layers, which map to the language model. language: the rest. A text model has only `language`
    (docs/media.md)."""
    train_only: tuple[NamePattern, ...] = ()
    """Tensors that are trained, in the forms of `freeze`; all others are not. `freeze` must then not be set."""
    moe: MoEConfig = MoEConfig()
    """Settings of the routers of mixture-of-experts models."""
    routing_replay: Literal["none", "rollout", "trainer"] = "none"
    """Choice of each token's experts in a mixture-of-experts model (docs/mismatch.md). none: the trainer's routers
    choose. rollout: the experts that the engine chose; needs rollout.return_routed_experts. trainer: in all updates of
    a step, the experts that the trainer chose at the step's beginning. The gates' weights are always the trainer's own.
    """
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of AdamW and its learning-rate schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Settings of the trainer's checkpoints."""
    profile: ProfileConfig = ProfileConfig()
    """Steps and ranks to record with torch's profiler."""
    threads: int = Field(default=0, ge=0)
    """Number of CPU threads of each rank; 0 divides all cores among the ranks."""
    collective_timeout_seconds: float = Field(default=120.0, gt=0)
    """Deadline of each collective in training, in seconds. It does not cover reading and writing files."""
    disk_stall_seconds: float = Field(default=300.0, gt=0)
    """Seconds that ranks wait for another rank's file I/O without any progress before they fail the trainer."""
    max_skipped_updates: int = Field(default=8, ge=0)
    """Maximum number of consecutive updates that are skipped because loss or gradient is not finite. One more such
    update fails the trainer; the error lists the groups of these steps. 0 fails at the first one."""

    def problems(self) -> Iterator[str]:
        model_ranks = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if self.ranks % model_ranks:
            yield (
                f"trainer.ranks is {self.ranks}: it must be a multiple of tensor_parallel x pipeline_parallel x "
                f"context_parallel = {model_ranks}"
            )
        if not self.profile.ranks or max(self.profile.ranks) >= self.ranks:
            yield (
                f"trainer.profile.ranks is {list(self.profile.ranks)}: it must list ranks from 0 to "
                f"trainer.ranks - 1 = {self.ranks - 1}"
            )
        if self.ranks % self.hosts:
            yield (
                f"trainer.ranks is {self.ranks}: it must be a multiple of trainer.hosts = {self.hosts}, because each "
                "host has equally many"
            )
        if self.ranks_per_host % self.tensor_parallel:
            yield (
                f"trainer.tensor_parallel is {self.tensor_parallel}, but each of the trainer.hosts = {self.hosts} "
                f"hosts has {self.ranks_per_host} ranks: it must divide them, because the ranks that share a layer's "
                "matrices stay within a host"
            )
        if self.recompute == "none":
            reason = 'trainer.recompute is "none": set "selective" or "full"'
            yield from self.unused(("recompute_layers",), reason)
        if self.dtype == "float32":
            reason = 'trainer.dtype is "float32", in which logits are computed anyway: remove it, or set "bfloat16"'
            yield from self.unused(("fp32_lm_head",), reason)
        if self.train_only:
            yield from self.unused(("freeze",), f"trainer.train_only is {list(self.train_only)}: set only one")
        counts = self.pipeline_layers
        if counts and (len(counts) != self.pipeline_parallel or min(counts) < 1):
            yield (
                f"trainer.pipeline_layers is {list(counts)}: it must have a number of at least 1 for each of the "
                f"trainer.pipeline_parallel = {self.pipeline_parallel} stages, or be empty"
            )
        if self.pipeline_chunks > 1 and self.pipeline_parallel == 1:
            yield (
                f"trainer.pipeline_chunks is {self.pipeline_chunks}, but trainer.pipeline_parallel is 1: without a "
                "pipeline set 1"
            )
        if self.pipeline_chunks > 1 and self.shard_gradients:
            yield (
                f"trainer.shard_gradients is true, but trainer.pipeline_chunks is {self.pipeline_chunks}: chunks of "
                "different micro-batches go backward in turn, which sharded gradients can't follow: set only one"
            )
        if self.pipeline_chunks > 1 and counts:
            yield (
                f"trainer.pipeline_chunks is {self.pipeline_chunks}, with which stages have equally many layers, but "
                f"trainer.pipeline_layers is {list(counts)}: set only one of them"
            )
        if self.mini_batches > self.groups_per_step:
            yield (
                f"trainer.mini_batches is {self.mini_batches}: it must be at most trainer.groups_per_step = "
                f"{self.groups_per_step}, because a group isn't divided"
            )
        if self.optimizer.cpu_offload and self.dtype != "bfloat16":
            yield (
                f'trainer.optimizer.cpu_offload needs trainer.dtype = "bfloat16", but it is "{self.dtype}": only then '
                "are there main weights beside those that the model computes with"
            )
        if self.routing_replay == "trainer" and self.updates_per_step == 1:
            yield (
                'trainer.routing_replay is "trainer", but a step has one update, whose routing is the first: set '
                '"none", or several updates with trainer.mini_batches or trainer.epochs'
            )

    def trains(self, name: str) -> bool:
        """Return True if the trainer trains this tensor. `name` is the tensor's name in Hugging Face's files."""
        patterns = self.train_only or self.freeze
        found = any(re.search(PARTS.get(pattern, pattern), name) for pattern in patterns)
        return found == bool(self.train_only)

    def trains_towers(self, *, hears: bool) -> bool:
        """Return True if a vision or sound tower, or its projection, is trained. `hears`: the model takes sound,
        too."""
        if not hears:
            return any(map(self.trains, ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.weight")))
        names = ("visual.blocks.0.attn.qkv", "visual.merger.ln_q", "audio_tower.layers.0.fc1", "audio_tower.proj1")
        return any(self.trains(f"thinker.{name}.weight") for name in names)

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates in a step."""
        return self.mini_batches * self.epochs

    def resets_moments(self, step: int) -> bool:
        """Return True if the policy's optimizer is reset after this step."""
        every = self.reset_moments_every
        return step in self.reset_moments_after or (every > 0 and step > 0 and step % every == 0)

    @property
    def ranks_per_host(self) -> int:
        """Number of the trainer's ranks on each host."""
        return self.ranks // self.hosts

    @property
    def data_parallel(self) -> int:
        """Data-parallel size: number of sets of ranks that work on different groups."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)
