"""The configuration of a run: one TOML file, one model."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from relaxd.best_checkpoint import metric_problem
from relaxd.config.agent import AgentConfig, conversation_problem
from relaxd.config.alerts import AlertsConfig
from relaxd.config.algorithm import AlgorithmConfig, GRPOConfig, OwnConfig
from relaxd.config.autoscale import AutoscaleConfig
from relaxd.config.data import DataConfig
from relaxd.config.evaluation import EvalConfig
from relaxd.config.operation import BoardConfig, HealthConfig, RehearsalConfig, WeightsConfig
from relaxd.config.placement import PlacementConfig
from relaxd.config.reward import RewardConfig
from relaxd.config.role_settings import CriticConfig, RolesConfig
from relaxd.config.rollout import RolloutConfig
from relaxd.config.section import Section, refuse_unused
from relaxd.config.tracking import TrackingConfig
from relaxd.config.trainer import TrainerConfig
from relaxd.engines import ENGINES, list_engines
from relaxd.run_folder import HELD_OUT

JUDGE_REWARDS = ("judge", "judge_pairs", "boxed_judge")
"""Bundled rewards that use the judge."""
MICRO_BATCH_TOKENS = 4096
"""Minimum tokens of the trainer's micro-batches, unless they are set."""


class StopEarlyConfig(Section):
    """End the run once evaluations no longer improve (docs/evaluation.md)."""

    metric: str = ""
    """The metric that must improve, as trainer.checkpoint.keep_best: "eval.SET.METRIC", with "-" before it if lower is
    better. Empty: the run takes all its steps."""
    patience: int = Field(default=3, ge=1)
    """Number of consecutive evaluations without an improvement after which the run ends."""
    min_delta: float = Field(default=0.0, ge=0)
    """Minimum improvement over the best value so far."""

    @model_validator(mode="after")
    def _is_on(self) -> Self:
        if not self.metric:
            refuse_unused(self, "run.stop_early", ("patience", "min_delta"), "run.stop_early.metric is empty: set it")
        return self


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
    trainer trains, and the trainer moves its state to host memory while the engines generate (trainer.offload).
    Needs board.max_staleness = 0."""
    switch_timeout_seconds: float = Field(default=120.0, gt=0)
    """With colocate: seconds after which a request to sleep or wake up is repeated."""
    stop_early: StopEarlyConfig = StopEarlyConfig()
    """End the run once evaluations no longer improve."""

    @model_validator(mode="after")
    def _turns_are_taken(self) -> Self:
        if not self.colocate:
            refuse_unused(self, "run", ("switch_timeout_seconds",), "run.colocate is false: set true")
        return self


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
    """otlp: send traces to OTEL_EXPORTER_OTLP_ENDPOINT, if that is set. file: also write them into the run's folder, so
    that `relaxd trace` shows them."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of groups to trace."""
    samples_per_step: int = Field(default=8, ge=0)
    """Samples of each step to keep for `relaxd samples`, in Redis and in the run's samples.jsonl."""
    all_samples: bool = False
    """Keep all samples of each step as well, in one compressed file per step in the run's folder samples/."""
    all_samples_steps: int = Field(default=0, ge=0)
    """Number of newest steps whose files all_samples keeps; 0: all steps."""


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
    agent: AgentConfig = AgentConfig()
    """Conversations with an environment."""
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
    placement: PlacementConfig = PlacementConfig()
    """Replicas of each role."""
    autoscale: AutoscaleConfig = AutoscaleConfig()
    """Number of rollout replicas by need."""
    health: HealthConfig = HealthConfig()
    """Detection and recovery of dead or stuck replicas."""
    rehearsal: RehearsalConfig = RehearsalConfig()
    """Assumptions of a rehearsal."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Traces and samples."""
    tracking: TrackingConfig = TrackingConfig()
    """TensorBoard, W&B and other trackers."""
    alerts: AlertsConfig = AlertsConfig()
    """Alarms, and notifications of them."""

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
        """Return the roles whose models take over the trained weights after a step."""
        every = {role: self.roles.frozen[role].refresh_every for role in self.frozen_roles()}
        return tuple(role for role, steps in every.items() if steps and step % steps == 0)

    @property
    def has_privileged_teacher(self) -> bool:
        """Return True if the run has a teacher that sees more of the prompt than the student."""
        return "teacher" in self.frozen_roles() and bool(self.roles.teacher.privileged_key)

    @property
    def student_candidates_problem(self) -> str:
        """Reason why the teacher can't score the student's likeliest tokens, or ""; the run has a teacher."""
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
        """The settings of the teacher's engine, where it isn't in ranks, under the names of [rollout].

        It never decodes, so it has no CUDA graphs, whose capture is most of a start.
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
        """Maximum length of a prompt of the teacher."""
        return self.roles.teacher.max_prompt_tokens or self.data.max_prompt_tokens

    @property
    def has_media(self) -> bool:
        """True if the run's prompts or conversations may have media."""
        return bool(self.media_kinds)

    @property
    def media_kinds(self) -> tuple[str, ...]:
        """Kinds of media that the run's prompts or conversations may have."""
        return tuple(dict.fromkeys((*self.data.media_keys, *self.agent.media)))

    @property
    def media_setting(self) -> str:
        """The setting by which the run has media."""
        return "data.media_keys" if self.data.media_keys else "agent.media"

    @property
    def media_problem(self) -> tuple[str, str] | None:
        """The setting that rules out the run's media, and why; None if the run can have them, or has none."""
        if not self.has_media:
            return None
        for kind in self.media_kinds:
            if not ENGINES[self.rollout.engine].takes(kind):
                return "rollout.engine", self.engine_problem(kind)
        return None

    def engine_problem(self, kind: str, model_type: str | None = None) -> str:
        """Return why the rollout engine can't have media of a kind, with a type of model or with any."""
        able = list_engines("rollout", lambda one: one.takes(kind, model_type))
        of_model = "" if model_type is None else f" with a model of type {model_type!r}"
        what = f'= "{self.rollout.engine}", which takes no {kind}{of_model} ({self.media_setting})'
        return f"{what}: {able or 'no engine'} does"

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum tokens of the trainer's micro-batches: as set, or else enough for the longest sample."""
        longest = max(self.data.max_prompt_tokens, self.teacher_prompt_tokens) + self.rollout.max_new_tokens
        return self.trainer.micro_batch_tokens or max(MICRO_BATCH_TOKENS, longest)

    @property
    def published_prompt_tokens(self) -> int:
        """Maximum published tokens of a prompt: the student's, and also the teacher's if it has its own prompt."""
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
    def _rewards_open_media_that_are_there(self) -> Self:
        if self.reward.media and not self.has_media:
            raise ValueError(
                "reward.media is true, but the run has none: name a column with media in data.media_keys, set "
                "agent.media, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _limits_have_their_media(self) -> Self:
        kinds = {*self.media_kinds, *(("audio",) if self.data.video_sound else ())}
        for kind, name, names in (
            ("video", "video", ("video_fps", "video_sound", "max_video_frames", "max_video_tokens")),
            ("image", "images", ("min_image_tokens", "max_image_tokens")),
            ("audio", "sound", ("max_audio_seconds",)),
        ):
            if kind not in kinds:
                reason = f"the run has no {name}: name its column in data.media_keys, set agent.media, or leave it out"
                refuse_unused(self.data, "data", names, reason)
        if not self.data.media_keys:
            reason = "no column has media that could be fetched: name one in data.media_keys, or leave it out"
            refuse_unused(self.data, "data", ("media_hosts",), reason)
        if not self.data.media_hosts:
            reason = "no host has media that could be awaited: name it in data.media_hosts, or leave it out"
            refuse_unused(self.data, "data", ("media_wait_seconds",), reason)
        return self

    @model_validator(mode="after")
    def _models_beside_the_trained_one_see(self) -> Self:
        """A critic service and engines that give a teacher's log-probs take no media."""
        if not self.has_media:
            return self
        setting = self.media_setting
        teacher, critic = self.roles.teacher, self.roles.critic
        if self.algorithm.needs_critic and critic.placement == "service":
            raise ValueError(
                f'{critic.section}.placement is "service", but the run has media ({setting}), which only a critic in '
                'the trainer\'s ranks sees: set "trainer"'
            )
        if "teacher" in self.frozen_roles() and not ENGINES[teacher.engine].in_ranks:
            raise ValueError(
                f'{teacher.section}.engine is "{teacher.engine}", but the run has media ({setting}), which this '
                "engine doesn't see as a teacher: leave it out"
            )
        if self.has_privileged_teacher:
            raise ValueError(
                f'roles.teacher.privileged_key is "{self.roles.teacher.privileged_key}", but the run has media '
                f"({setting}), which prompts of the teacher's own can't have: remove one of them"
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
    def _early_stop_is_evaluated(self) -> Self:
        if metric := self.run.stop_early.metric:
            self._check_watched("run.stop_early.metric", metric)
        return self

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> Self:
        setting, checkpoint = "trainer.checkpoint.keep_best", self.trainer.checkpoint
        if not checkpoint.keep_best:
            return self
        self._check_watched(setting, checkpoint.keep_best)
        if not checkpoint.every:
            raise ValueError(
                f'{setting} is "{checkpoint.keep_best}", but trainer.checkpoint.every is 0, which takes checkpoints '
                "only on request: set every, or remove keep_best"
            )
        return self

    def metric_problem(self, text: str) -> str:
        """Return why the run's evaluations lack a metric that trainer.checkpoint.keep_best names, or ""."""
        sizes = {one.name: (one.samples_per_prompt, one.sizes) for one in self.eval.sets}
        if self.eval.prompts:
            sizes[HELD_OUT] = (1, (1,))
        return metric_problem(text, sizes)

    def _check_watched(self, setting: str, text: str) -> None:
        """Check that the run evaluates a metric several times. Raises ValueError."""
        if problem := self.metric_problem(text):
            raise ValueError(f'{setting} is "{text}": {problem}')
        if not self.eval.interval:
            raise ValueError(
                f'{setting} is "{text}", but eval.interval is 0, so that nothing is evaluated during training: set '
                "eval.interval"
            )

    @model_validator(mode="after")
    def _services_are_called(self) -> Self:
        if not self.reward.calls_services and not any(one.reward_address for one in self.eval.sets):
            reason = "no reward is a service at an address: remove it"
            refuse_unused(self.reward, "reward", ("max_in_flight", "outage_seconds"), reason)
        return self

    @model_validator(mode="after")
    def _judge_can_share(self) -> Self:
        judge, engine = self.roles.judge, ENGINES[self.rollout.engine]
        able = engine.sleeps if self.run.colocate else engine.shares_gpus
        if judge.shares_gpus and (not able or judge.engine != engine.name):
            both = list_engines("roles.judge", lambda one: one.shares_gpus)
            on_cpus = list_engines("roles.judge", lambda one: one.sleeps and not one.needs_gpus)
            raise ValueError(
                f'roles.judge.gpu_share is {judge.gpu_share:g}, but rollout.engine is "{engine.name}" and '
                f'roles.judge.engine is "{judge.engine}": on GPUs that they share, both must be {both}'
                + (f" (or {on_cpus} on CPUs, to take turns there)" if self.run.colocate else "")
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
        if not ENGINES[self.rollout.engine].shares_gpus:
            able = list_engines("rollout", lambda engine: engine.shares_gpus)
            raise ValueError(
                f'{section}, but rollout.engine is "{self.rollout.engine}": only engines that are {able} leave a '
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
                f"{who}, but rollout.samples_per_prompt is {samples}: its baseline is made of the group's other "
                f"rewards, so there must be at least {algorithm.min_samples}; for one sample a prompt use "
                '"reinforce_plus_plus" or "ppo"'
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
            engine, setting = ENGINES[self.rollout.engine], "return_routed_experts"
            able = list_engines("rollout", lambda one: setting in one.settings["rollout"])
            raise ValueError(
                'trainer.routing_replay is "rollout", but '
                + (
                    f"rollout.{setting} is false: set true"
                    if setting in engine.settings["rollout"]
                    else f'rollout.engine is "{engine.name}", which doesn\'t return the experts: use {able} '
                    f"with rollout.{setting} = true"
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
            refuse_unused(self.trainer, "trainer", ("offload",), "run.colocate is false: set true")
            return self
        wrong = None
        if self.board.max_staleness != 0:
            wrong = f"board.max_staleness is {self.board.max_staleness}: set 0, since each step waits for its groups"
        elif self.board.oversample != 1.0:
            wrong = f"board.oversample is {self.board.oversample}: set 1.0, since exactly a step's groups are generated"
        elif not ENGINES[self.rollout.engine].sleeps:
            able = list_engines("rollout", lambda engine: engine.sleeps)
            wrong = f'rollout.engine is "{self.rollout.engine}", which cannot sleep: use {able}'
        elif self.weights.transport == "nccl":
            wrong = (
                'weights.transport is "nccl", which cannot connect two processes on one GPU: use "cuda_ipc", or "gloo" '
                "on a CPU"
            )
        elif self.autoscale.mode != "off":
            mode = self.autoscale.mode
            wrong = f'autoscale.mode is "{mode}": set "off", since all engines are on GPUs of the trainer'
        elif self.trainer.hosts > 1:
            wrong = f"trainer.hosts is {self.trainer.hosts}: set 1, since the trainer takes turns on its own host only"
        elif self.trainer.ranks % self.rollout.tensor_parallel:
            wrong = (
                f"trainer.ranks is {self.trainer.ranks}: it must be a multiple of rollout.tensor_parallel = "
                f"{self.rollout.tensor_parallel}, so that every GPU has a rank and an engine"
            )
        if wrong:
            raise ValueError(f"run.colocate is true, but {wrong}")
        return self

    @model_validator(mode="after")
    def _conversations_fit(self) -> Self:
        if self.agent.is_there and (problem := conversation_problem(self)):
            raise ValueError(f"{self.agent.shown}, but {problem}")
        for number, one in enumerate(self.eval.sets):
            setting = "environment" if one.environment else "environment_settings"
            if not self.agent.is_there and getattr(one, setting):
                raise ValueError(
                    f"eval.sets.{number}.{setting} is set, but agent.environment is empty, so that the run has no "
                    f"conversations: set agent.environment, or remove eval.sets.{number}.{setting}"
                )
            of_run = one.environment or self.agent.environment
            if self.agent.is_there and not of_run and one.environment_settings is not None:
                raise ValueError(
                    f"eval.sets.{number}.environment_settings is set, but {self.agent.shown}, which has none: remove "
                    f"it, or name an environment in eval.sets.{number}.environment"
                )
            if self.agent.is_service and not one.environment and one.environment_settings:
                raise ValueError(
                    f"eval.sets.{number}.environment_settings is set, but agent.environment is "
                    f'"{self.agent.environment}", a service that runs already: remove it, or name another environment '
                    f"in eval.sets.{number}.environment"
                )
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
        pause, engine = self.weights.pause, ENGINES[self.rollout.engine]
        if pause not in engine.pauses:
            able = list_engines("rollout", lambda one: pause in one.pauses)
            modes = ", ".join(f'"{mode}"' for mode in engine.pauses)
            raise ValueError(
                f'weights.pause is "{pause}", which rollout.engine = "{engine.name}" does not support: use {modes}, '
                f"or rollout.engine = {able}"
            )
        return self

    @model_validator(mode="after")
    def _hosts_have_a_model(self) -> Self:
        if self.trainer.hosts > 1 and not ENGINES[self.rollout.engine].has_model:
            raise ValueError(
                f'trainer.hosts is {self.trainer.hosts}, but rollout.engine is "{self.rollout.engine}", with which the '
                "trainer has no model to divide: set 1"
            )
        return self

    @model_validator(mode="after")
    def _stock_servers_only_receive(self) -> Self:
        engine = ENGINES[self.rollout.engine]
        if engine.stock_weight_group and self.trainer.pipeline_parallel > 1:
            raise ValueError(
                f"trainer.pipeline_parallel is {self.trainer.pipeline_parallel}: with rollout.engine = "
                f'"{engine.name}" it must be 1, because SGLang servers receive weights from one rank only'
            )
        if engine.stock_weight_group and self.weights.transport == "gloo_chain":
            raise ValueError(
                f'weights.transport is "gloo_chain", but with rollout.engine = "{engine.name}" SGLang servers pass no '
                'weights on: use "gloo"'
            )
        return self
