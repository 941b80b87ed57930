"""The configuration of a run: a single TOML file. A run trains one model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from relaxd.best_checkpoint import metric_problem
from relaxd.config.agent import AgentConfig
from relaxd.config.algorithm import AlgorithmConfig, GRPOConfig
from relaxd.config.contradictions import contradictions
from relaxd.config.data import DataConfig
from relaxd.config.evaluation import EvalConfig
from relaxd.config.operation import (
    AlertsConfig,
    BoardConfig,
    HealthConfig,
    RehearsalConfig,
    TrackingConfig,
    WeightsConfig,
)
from relaxd.config.reward import RewardConfig
from relaxd.config.role_settings import AutoscaleConfig, PlacementConfig, RolesConfig
from relaxd.config.rollout import RolloutConfig
from relaxd.config.section import Section
from relaxd.config.trainer import TrainerConfig
from relaxd.engines import ENGINES, list_engines
from relaxd.run_folder import HELD_OUT

MICRO_BATCH_TOKENS = 4096
"""Minimum of the default of trainer.micro_batch_tokens, in tokens."""


class StopEarlyConfig(Section):
    """End the run once evaluations no longer improve (docs/evaluation.md)."""

    section: ClassVar[str] = "run.stop_early"

    metric: str = ""
    """The metric that must improve, as trainer.checkpoint.keep_best: "eval.SET.METRIC", with "-" before it if lower is
    better. Empty: the run takes all its steps."""
    patience: int = Field(default=3, ge=1)
    """Number of consecutive evaluations without an improvement after which the run ends."""
    min_delta: float = Field(default=0.0, ge=0)
    """Minimum improvement of the metric over its best value so far."""

    def problems(self) -> Iterator[str]:
        if not self.metric:
            yield from self.unused(("patience", "min_delta"), "run.stop_early.metric is empty: set it")


class RunSection(Section):
    """Steps, seed and folder of the run, and sharing of its devices."""

    section: ClassVar[str] = "run"

    steps: int = Field(ge=1)
    """Number of steps, each of which makes one version of the weights."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts' order, of sampling and of the trainer."""
    folder: Path = Path("runs")
    """Folder in which each run creates a folder named by its id."""
    colocate: bool = False
    """Share the devices between trainer and engines, which take turns: the engines release their memory while the
    trainer trains, and the trainer moves its state to host memory while the engines generate (trainer.offload).
    Needs board.max_staleness = 0."""
    switch_timeout_seconds: float = Field(default=120.0, gt=0)
    """With colocate: seconds after which a request to sleep or wake up is repeated."""
    stop_early: StopEarlyConfig = StopEarlyConfig()
    """End the run once evaluations no longer improve."""

    def problems(self) -> Iterator[str]:
        if not self.colocate:
            yield from self.unused(("switch_timeout_seconds",), "run.colocate is false: set true")


class ModelConfig(Section):
    """The model to train."""

    path: str
    """Hugging Face folder, name of a model of `relaxd model fetch`, or a hub name."""
    chat_template: str | None = None
    """Jinja chat template to use instead of the model's own: its text, or the path of its file, relative to the folder
    in which relaxd is called. A run keeps the text, and the exported model has it, too."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as { enable_thinking = false }."""


class TelemetryConfig(Section):
    """Traces and sample records."""

    traces: Literal["otlp", "file"] = "otlp"
    """Destination of traces. otlp: OTEL_EXPORTER_OTLP_ENDPOINT, if that is set. file: also the run's folder, so that
    `relaxd trace` shows them."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of groups that are traced."""
    samples_per_step: int = Field(default=8, ge=0)
    """Number of samples of each step to keep for `relaxd samples`, in Redis and in the run's samples.jsonl."""
    all_samples: bool = False
    """Keep all samples of each step as well, in one compressed file per step in the run's folder samples/."""
    all_samples_steps: int = Field(default=0, ge=0)
    """Number of newest steps whose sample files all_samples keeps; 0: all steps."""


class RunConfig(Section):
    """The configuration of a run. Services get it from the coordinator when they register."""

    run: RunSection
    """Steps, seed and folder of the run, and sharing of its devices."""
    model: ModelConfig
    """Settings of the model to train."""
    data: DataConfig
    """Settings of the source of prompts."""
    reward: RewardConfig
    """Settings of rewards, which score answers."""
    rollout: RolloutConfig = RolloutConfig()
    """Settings of the generation of answers."""
    agent: AgentConfig = AgentConfig()
    """Settings of conversations with an environment."""
    algorithm: AlgorithmConfig = GRPOConfig()
    """Settings of the algorithm: advantage and loss."""
    trainer: TrainerConfig = TrainerConfig()
    """Settings of the trainer."""
    board: BoardConfig = BoardConfig()
    """Settings of the sample board."""
    weights: WeightsConfig = WeightsConfig()
    """Settings of weight synchronisation."""
    roles: RolesConfig = RolesConfig()
    """Settings of roles that only some runs need."""
    placement: PlacementConfig = PlacementConfig()
    """Number of replicas of each role."""
    autoscale: AutoscaleConfig = AutoscaleConfig()
    """Automatic adjustment of the number of rollout replicas."""
    health: HealthConfig = HealthConfig()
    """Detection and recovery of dead or stuck replicas."""
    rehearsal: RehearsalConfig = RehearsalConfig()
    """Speeds and lengths that a rehearsal assumes."""
    eval: EvalConfig = EvalConfig()
    """Settings of evaluations."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Settings of traces and sample records."""
    tracking: TrackingConfig = TrackingConfig()
    """Trackers, such as TensorBoard and W&B."""
    alerts: AlertsConfig = AlertsConfig()
    """Alarms, and notifications of them."""

    def trace_folder(self, run_folder: str) -> Path | None:
        """Return the run's folder if the run's processes write traces into it, else None."""
        return Path(run_folder) if self.telemetry.traces == "file" else None

    def frozen_roles(self, placement: Literal["trainer", "service"] | None = None) -> list[str]:
        """Return the roles of the run's frozen models that run in `placement`; None: of all its frozen models."""
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
        """Return the roles whose frozen models take over the trained model's weights after this step."""
        every = {role: self.roles.frozen[role].refresh_every for role in self.frozen_roles()}
        return tuple(role for role, steps in every.items() if steps and step % steps == 0)

    @property
    def has_privileged_teacher(self) -> bool:
        """True if the run has a teacher whose prompts have a part that the student doesn't see."""
        return "teacher" in self.frozen_roles() and bool(self.roles.teacher.privileged_key)

    @property
    def student_candidates_problem(self) -> str:
        """Reason why the run's teacher can't score the tokens that the student finds likeliest; "" if it can."""
        teacher = self.roles.teacher
        if teacher.placement == "trainer":
            if not teacher.privileged_key:
                return ""
            return (
                "roles.teacher.privileged_key is set, so the trainer's teacher has rows with other prompts than the "
                'student\'s: set roles.teacher.placement = "service", to which the engine says what it finds likeliest'
            )
        if not ENGINES[teacher.engine].takes_candidates:
            able = list_engines("roles.teacher", lambda engine: engine.takes_candidates)
            return (
                f'roles.teacher.engine is "{teacher.engine}", which takes one list of tokens for all places of an '
                f'answer, not others in each: use {able}, or roles.teacher.placement = "trainer"'
            )
        if not ENGINES[self.rollout.engine].gives_likeliest:
            able = list_engines("rollout", lambda engine: engine.gives_likeliest)
            return (
                f'rollout.engine is "{self.rollout.engine}", which doesn\'t say what it finds likeliest: use {able}, '
                'or roles.teacher.placement = "trainer"'
            )
        if self.agent.is_there:
            return (
                f"{self.agent.shown}, and conversations don't keep yet what the engine "
                'finds likeliest: use roles.teacher.placement = "trainer"'
            )
        return ""

    @property
    def teacher_engine(self) -> RolloutConfig:
        """Settings of a teacher's SGLang engine, in the form of [rollout].

        The engine never decodes, so it needs no CUDA graphs, whose capture takes most of a start.
        """
        teacher = self.roles.teacher
        return RolloutConfig(
            engine=teacher.engine,
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
        """Maximum length of a teacher's prompt, in tokens."""
        return self.roles.teacher.max_prompt_tokens or self.data.max_prompt_tokens

    @property
    def has_media(self) -> bool:
        """True if the run's prompts or conversations may have images, videos or sounds."""
        return bool(self.media_kinds)

    @property
    def media_kinds(self) -> tuple[str, ...]:
        """Kinds of media that the run's prompts or conversations may have, such as "image"."""
        return tuple(dict.fromkeys((*self.data.media_keys, *self.agent.media)))

    @property
    def media_setting(self) -> str:
        """Name of the setting that lets the run have media."""
        return "data.media_keys" if self.data.media_keys else "agent.media"

    @property
    def media_problem(self) -> tuple[str, str] | None:
        """Name of the setting that rules out the run's media, and the reason. None if the run can have its media, or
        has no media."""
        if not self.has_media:
            return None
        for kind in self.media_kinds:
            if not ENGINES[self.rollout.engine].takes(kind):
                return "rollout.engine", self.engine_problem(kind)
        return None

    def engine_problem(self, kind: str, model_type: str | None = None) -> str:
        """Return why the rollout engine can't take media of this kind. `model_type` is the type of the run's model;
        None: a model of any type."""
        able = list_engines("rollout", lambda one: one.takes(kind, model_type))
        of_model = "" if model_type is None else f" with a model of type {model_type!r}"
        what = f'= "{self.rollout.engine}", which takes no {kind}{of_model} ({self.media_setting})'
        return f"{what}: {able or 'no engine'} does"

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum tokens of a micro-batch of the trainer: the setting, or else enough for the longest sample."""
        longest = max(self.data.max_prompt_tokens, self.teacher_prompt_tokens) + self.rollout.max_new_tokens
        return self.trainer.micro_batch_tokens or max(MICRO_BATCH_TOKENS, longest)

    @property
    def published_prompt_tokens(self) -> int:
        """Maximum number of tokens published for a prompt: the student's, and the teacher's if it has its own."""
        return self.data.max_prompt_tokens + (self.teacher_prompt_tokens if self.has_privileged_teacher else 0)

    def problems(self) -> Iterator[str]:
        return contradictions(self)

    def metric_problem(self, text: str) -> str:
        """Return why the run's evaluations lack the metric that trainer.checkpoint.keep_best names; "" if they have
        it."""
        sizes = {one.name: (one.samples_per_prompt, one.sizes) for one in self.eval.sets}
        if self.eval.prompts:
            sizes[HELD_OUT] = (1, (1,))
        return metric_problem(text, sizes)
