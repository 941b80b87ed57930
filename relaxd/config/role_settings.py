"""[placement], [autoscale] and [roles]: replicas of each role, and settings of the roles that only some runs need."""

import difflib
from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, field_validator

from relaxd.config.section import Section
from relaxd.config.trainer import OptimizerConfig
from relaxd.engines import ENGINES, JudgeEngineName, TeacherEngineName, list_engines


class ReplicaSizes(Section):
    """Sizes of the replicas of a role whose model has separate ranks, with the trainer's dtype and kernels."""

    tensor_parallel: int = Field(default=1, ge=1)
    """Number of ranks of a replica that share each layer's matrices."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of ranks of a replica that share the layers."""
    context_parallel: int = Field(default=1, ge=1)
    """Number of ranks of a replica that share each micro-batch's tokens and, within attention, the heads."""
    expert_parallel: int = Field(default=1, ge=1)
    """Number of ranks of a replica that share the experts."""
    micro_batch_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of a replica's packed micro-batch; 0 means trainer.micro_batch_tokens."""
    threads: int = Field(default=0, ge=0)
    """Number of CPU threads of each rank of a replica; 0 divides all cores among the ranks."""

    @property
    def ranks(self) -> int:
        """Number of ranks of a replica. All ranks of a replica work on the same groups; different replicas work on
        different groups."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    def problems(self) -> Iterator[str]:
        sharing = self.tensor_parallel * self.context_parallel
        if sharing % self.expert_parallel:
            yield (
                f"{self.section}.expert_parallel is {self.expert_parallel}: it must divide tensor_parallel x "
                f"context_parallel = {sharing}"
            )


IN_TRAINER = '"trainer", whose ranks have the sizes of [trainer]: set "service"'
SIZES = tuple(ReplicaSizes.model_fields)
"""Names of the settings for separate replicas. They don't apply to a model in the trainer's ranks."""


class FrozenModelConfig(ReplicaSizes):
    """A frozen model that computes log-probs of the policy's tokens, with the trainer's dtype and kernels."""

    model: str = ""
    """Model: a Hugging Face folder, the name of a fetched model, or a hub name. Empty: the initial model."""
    placement: Literal["trainer", "service"] = "service"
    """Where the model runs. trainer: in the trainer's ranks, beside the trained model. service: in separate
    replicas."""
    refresh_every: int = Field(default=0, ge=0)
    """Interval, in steps, at which the model takes over the trained model's weights; 0: never. The ledger records each
    takeover. The model must be the initial model. A teacher also needs placement = "trainer"."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.placement == "trainer":
            yield from self.unused(SIZES, f"{self.section}.placement is {IN_TRAINER}")

    @property
    def settings(self) -> dict[str, str]:
        """Models of the role, by the name of the setting that gives the model; "" is the initial model."""
        return {f"{self.section}.model": self.model}


class ReferenceConfig(FrozenModelConfig):
    """The reference model of the KL term, frozen. It has the trainer's dtype and kernels."""

    section: ClassVar[str] = "roles.reference"

    model: str = ""
    """Reference model: a Hugging Face folder, the name of a fetched model, or a hub name. Any supported architecture
    and size, with the vocabulary of the trained model. Empty: the initial model."""
    placement: Literal["trainer", "service"] = "trainer"
    """Where the reference model runs. trainer: in the trainer's ranks, beside the trained model. service: in separate
    reference replicas, which write the column ref_logprobs; the trainer then keeps no reference. The settings of sizes
    and threads are for these replicas."""


class TeacherModel(Section):
    """A teacher in roles.teacher.models, where each source of prompts may have its own teacher."""

    model: str = Field(min_length=1)
    """Model of this teacher, in the forms of roles.teacher.model."""
    sources: tuple[str, ...] = Field(min_length=1)
    """Sources whose prompts this model teaches: values of metadata.data_source, such as the name of a source in
    data.sources."""


class TeacherConfig(FrozenModelConfig):
    """The teacher of on-policy distillation. It has the trainer's dtype, and its kernels unless engine is "sglang"."""

    section: ClassVar[str] = "roles.teacher"

    model: str = ""
    """Teacher model: a Hugging Face folder, the name of a fetched model, or a hub name. Any supported architecture and
    size, with the vocabulary of the trained model. With models: the teacher of all sources that no table in models
    lists."""
    models: tuple[TeacherModel, ...] = ()
    """Several teachers, each in a table [[roles.teacher.models]] with model and sources. Every replica, or the
    trainer's ranks, holds all of them. Prompts of sources that no table lists get the teacher `model`; if `model` is
    empty, such prompts are refused."""
    privileged_key: str = ""
    """Part of a prompt that only the teacher sees: "answer", or a column of the metadata such as "solution". The
    teacher may then be the trained model itself. Empty: the teacher sees what the student sees."""
    privileged_template: str = (
        "{prompt}\n\nA reference solution, which you must neither quote nor mention:\n{privileged}\n\n"
        "Now solve the problem in your own words."
    )
    """With privileged_key: text that replaces the prompt's last message that isn't the assistant's. {prompt} stands for
    the student's text, {privileged} for the part that only the teacher sees."""
    max_prompt_tokens: int = Field(default=0, ge=0)
    """Maximum length of the teacher's prompts, in tokens, with privileged_key; 0 means data.max_prompt_tokens."""
    placement: Literal["trainer", "service"] = "service"
    """Where the teacher runs. service: in separate teacher replicas, which write columns. trainer: in the trainer's
    ranks, beside the trained model. The settings of sizes and threads are for the replicas."""
    engine: TeacherEngineName = "megatron"
    """Processes that hold the teacher's model. megatron: ranks like the trainer's. sglang: an SGLang engine with the
    trainer's dtype on tensor_parallel GPUs, which prefills each answer; it holds one model."""
    max_tokens_in_flight: int = Field(default=131_072, ge=1)
    """Maximum number of tokens in a teacher's engine at a time, prompts included; a longer answer is sent alone
    (sglang)."""
    gpu_share: float = Field(default=1.0, gt=0, le=1)
    """Share of its GPUs' memory that a teacher replica uses; 1 means whole GPUs. Below 1, rollout engines and a judge
    may use the same GPUs, and every rollout engine of the run leaves this share free. Must be 1 with run.colocate
    (sglang)."""
    memory_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of GPU memory, or of gpu_share, for the teacher's weights and key-value cache; 0 lets SGLang decide
    (sglang)."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang's own options, like rollout.sglang, such as chunked_prefill_size = 4096 (sglang)."""

    @property
    def settings(self) -> dict[str, str]:
        several = {f"{self.section}.models.{index}.model": one.model for index, one in enumerate(self.models)}
        return ({f"{self.section}.model": self.model} if self.model else {}) | several

    @property
    def shares_gpus(self) -> bool:
        """True if teacher replicas may share GPUs with rollout engines."""
        return self.gpu_share < 1

    def model_of(self, source: object) -> str:
        """Return the name of the model that teaches the prompts of a source; "" if no model does. None stands for
        prompts without a source."""
        return next((one.model for one in self.models if source in one.sources), self.model)

    def without(self, source: object, what: str) -> str:
        """Return the error message for prompts that have no teacher. `source` is their source, `what` names them, for
        example by their place."""
        listed = ", ".join(name for one in self.models for name in one.sources)
        of = "no source (metadata.data_source)" if source is None else f'the source "{source}"'
        return (
            f"list {listed}, but {what} is of {of}: list it, or set {self.section}.model to the teacher of all other "
            "prompts"
        )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        listed = [source for one in self.models for source in one.sources]
        if twice := sorted({source for source in listed if listed.count(source) > 1}):
            yield f'{self.section}.models list the source "{twice[0]}" twice: a prompt has one teacher'
        if self.models and self.refresh_every:
            yield (
                f"{self.section}.refresh_every is {self.refresh_every}, but {self.section}.models are several "
                "teachers, and one takes over the trained model's weights: remove it, or use model"
            )
        if self.refresh_every and self.placement != "trainer":
            yield (
                f'{self.section}.refresh_every is {self.refresh_every}, but {self.section}.placement is "service", '
                'which gets no weights of the trainer: set "trainer"'
            )
        if not self.privileged_key:
            reason = "without privileged_key the teacher sees the student's prompts: remove it"
            yield from self.unused(("privileged_template", "max_prompt_tokens"), reason)
        for part in ("{prompt}", "{privileged}"):
            if self.privileged_key and part not in self.privileged_template:
                yield f"{self.section}.privileged_template has no {part}, for which it is filled in"

        yield from self.of_other_engines(self.engine)
        if ENGINES[self.engine].in_ranks:
            return
        others = list_engines(self.section, lambda engine: engine.in_ranks)
        if self.placement == "trainer":
            yield (
                f'{self.section}.engine is "{self.engine}", but {self.section}.placement is "trainer", where the model '
                f'is in the trainer\'s ranks: set placement = "service", or engine = {others}'
            )
        if self.models:
            yield (
                f'{self.section}.engine is "{self.engine}", but {self.section}.models are several teachers, and an '
                f"engine holds one model: use model alone, or engine = {others}"
            )


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic, and the critic's learning-rate schedule."""

    section: ClassVar[str] = "roles.critic.optimizer"

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic, usually higher than the policy's, so that the critic keeps up."""


class CriticConfig(ReplicaSizes):
    """The critic of algorithm.name = "ppo": a model like the trained one, with one value instead of logits. It has the
    trainer's dtype and kernels."""

    section: ClassVar[str] = "roles.critic"

    placement: Literal["trainer", "service"] = "trainer"
    """Where the critic runs. trainer: in the trainer's ranks, with their sizes, beside the trained model. service: in
    one separate critic replica, which writes the column values and trains on each step once it is committed
    (docs/critic.md). The settings of sizes and threads are for this replica."""
    max_value_staleness: int = Field(default=1, ge=0)
    """With placement = "service": maximum staleness of values, in steps: how many of the earlier steps the critic may
    not yet have trained on when it computes a step's values. Groups with older values are valued again. 0: the critic
    must have trained on all earlier steps."""
    model: str = ""
    """Initial model of the critic: folder or name of a model with the architecture of model.path; empty: model.path.
    The value head starts with zeros."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW and learning-rate schedule of the critic."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.placement == "trainer":
            yield from self.unused(SIZES, f"{self.section}.placement is {IN_TRAINER}")
            reason = 'roles.critic.placement is "trainer", where values are never stale: remove it, or set "service"'
            yield from self.unused(("max_value_staleness",), reason)


class JudgeConfig(Section):
    """The judge: a frozen model that answers rewards' questions about samples (docs/judge.md)."""

    section: ClassVar[str] = "roles.judge"

    model: str = ""
    """Judge model, for replicas of the role judge: a Hugging Face folder, the name of a fetched model, or a hub name.
    With an address: the model's name on that server. Empty: there is no judge."""
    address: str = ""
    """Instead of judge replicas: base URL of a server that speaks OpenAI's chat completions, such as "https://host/v1".
    Its key is in the reward service's RELAXD_JUDGE_KEY, or in the file that RELAXD_JUDGE_KEY_FILE names."""
    chat_template: str | None = None
    """Jinja chat template to use instead of the model's own: its text, or the path of its file."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as { enable_thinking = false }. With an address, they are sent as
    chat_template_kwargs."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Maximum length of a judge's reply, in tokens."""
    temperature: float = Field(default=0.1, ge=0)
    """Sampling temperature of the judge; 0 is greedy. Raise it if you ask for several votes."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling (top-p) of the judge's replies; 1 turns it off."""
    top_k: int = Field(default=0, ge=0)
    """Sample the judge's replies from the k likeliest tokens; 0 turns it off."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """Seconds that the judge may take to reply to a question. After that, the question's sample fails. This time
    doesn't count towards reward.timeout_seconds."""
    outage_seconds: float = Field(default=600.0, ge=0)
    """Seconds that questions wait for an unreachable judge before their samples fail."""
    max_in_flight: int = Field(default=64, ge=1)
    """Maximum number of a reward replica's questions that wait for the judge's reply."""
    questions_per_second: float = Field(default=0.0, ge=0)
    """Maximum number of judge questions that a reward replica sends per second, at even intervals; 0.5: 30 a minute, 0:
    no limit."""
    engine: JudgeEngineName = "transformers"
    """Inference engine of a judge replica. transformers: on CPUs. sglang: on GPUs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the judge's weights."""
    max_running_samples: int = Field(default=64, ge=1)
    """Maximum number of replies in progress per judge replica; further questions wait in the replica."""
    threads: int = Field(default=0, ge=0)
    """Number of CPU threads of a judge replica; 0 means all cores."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs of a judge replica, which share each layer's matrices (sglang)."""
    gpu_share: float = Field(default=1.0, gt=0, le=1)
    """Share of its GPUs' memory that a judge replica uses; 1 means whole GPUs. Below 1, rollout engines and a teacher
    may use the same GPUs, and every rollout engine of the run leaves this share free. With run.colocate the judge then
    sleeps whenever the engines do."""
    memory_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of GPU memory, or of gpu_share, for the judge's weights and key-value cache; 0 lets SGLang decide
    (sglang)."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """SGLang's own options, like rollout.sglang, such as context_length = 8192."""

    @property
    def is_there(self) -> bool:
        """True if the run has a judge."""
        return bool(self.model)

    @property
    def has_replicas(self) -> bool:
        """True if the judge runs in replicas of this run."""
        return bool(self.model) and not self.address

    @property
    def shares_gpus(self) -> bool:
        """True if judge replicas may share GPUs with rollout engines. In a colocated run the judge then sleeps whenever
        the engines do."""
        return self.gpu_share < 1

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if not address:
            return address
        try:
            parts = urlsplit(address)
            found = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that isn't a number
            found = False
        if not found:
            raise ValueError(f'{address!r} must be a base URL, such as "https://host/v1"')
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(
                "it has more than host and path, which logs would show: leave credentials and parameters out; the key "
                "is RELAXD_JUDGE_KEY in the reward service's environment"
            )
        if parts.path.rstrip("/").endswith("/completions"):
            raise ValueError(f"{address!r} must be the base URL, without /chat/completions")
        return address.rstrip("/")

    def problems(self) -> Iterator[str]:
        given = set(self.changed(type(self).model_fields))
        if not self.model and given:
            yield (
                f"roles.judge.{min(given)} is set, but roles.judge.model is empty: name the judge's model"
                + (", as the server at the address knows it" if self.address else "")
            )
        for_replicas = {"chat_template", "gpu_share", *ENGINE_SETTINGS} & given
        if self.address and for_replicas:
            yield (
                f"roles.judge.{min(for_replicas)} is for a judge's replicas, but roles.judge.address is "
                f'"{self.address}": leave one of them out'
            )
        yield from self.of_other_engines(self.engine)


ENGINE_SETTINGS = ("engine", "dtype", "max_running_samples", "threads", "tensor_parallel", "memory_fraction", "sglang")
"""Names of the settings of a judge replica's inference engine. [rollout] has settings of the same names."""


class RolesConfig(Section):
    """Settings of the roles that only some runs need: reference, teacher, critic and judge."""

    reference: ReferenceConfig = ReferenceConfig()
    """Settings of the reference model of the KL term."""
    teacher: TeacherConfig = TeacherConfig()
    """Settings of the teacher of on-policy distillation."""
    critic: CriticConfig = CriticConfig()
    """Settings of the critic, whose values PPO needs."""
    judge: JudgeConfig = JudgeConfig()
    """Settings of the judge that answers rewards' questions."""

    @property
    def engine_gpu_share(self) -> float:
        """Share of each GPU's memory that a rollout engine may use: what judge and teacher on the same GPUs leave
        free."""
        return 1.0 - sum(own.gpu_share for own in (self.judge, self.teacher) if own.shares_gpus)

    @property
    def frozen(self) -> dict[str, FrozenModelConfig]:
        """Sections of the configuration for frozen models, by the role that holds the model."""
        return {"reference": self.reference, "teacher": self.teacher}

    @property
    def sizes(self) -> dict[str, ReferenceConfig | TeacherConfig | CriticConfig]:
        """Sections of the configuration for roles that hold a model in separate ranks, by role."""
        return {"reference": self.reference, "teacher": self.teacher, "critic": self.critic}


PLACED = ("ranks", "rollout", "reward", "advantage", "reference", "teacher", "critic", "judge", "agent")
"""Roles that [placement] may list: all except coordinator and trainer, which every run has once."""


class PlacementConfig(Section):
    """Number of replicas or GPUs of each role that commands start for the run, in two tables (docs/placement.md)."""

    replicas: dict[str, PositiveInt] = Field(default_factory=dict)
    """Number of replicas of each role, such as { rollout = 2, reward = 4 }. Any other role has one replica if the run
    needs it."""
    gpus: dict[str, PositiveInt] = Field(default_factory=dict)
    """Instead of replicas: number of GPUs of all replicas of a role together, such as { rollout = 4 }. It must be a
    multiple of a replica's GPUs, such as rollout.tensor_parallel."""

    def problems(self) -> Iterator[str]:
        for setting, numbers in (("replicas", self.replicas), ("gpus", self.gpus)):
            for role, number in numbers.items():
                given = f"placement.{setting}.{role} is {number}"
                if role == "trainer":
                    yield f"{given}, but there is one trainer, whose GPUs are trainer.ranks: set that"
                if role not in PLACED:
                    close = difflib.get_close_matches(role, PLACED, n=1)
                    hint = f"; did you mean {close[0]}?" if close else ""
                    yield f"{given}, but the roles that can be placed are {', '.join(PLACED)}{hint}"
        if both := [role for role in self.replicas if role in self.gpus]:
            role = both[0]
            yield (
                f"placement.replicas.{role} is {self.replicas[role]} and placement.gpus.{role} is {self.gpus[role]}: "
                "give one of them, the other follows from the GPUs of a replica"
            )


class AutoscaleConfig(Section):
    """The autoscaler of rollout replicas (docs/scaling.md)."""

    mode: Literal["off", "dry_run", "on"] = "off"
    """Mode of the autoscaler. "on": the coordinator adds rollout replicas while the trainer waits for engines that are
    busy, and removes replicas while they are idle. "dry_run": the coordinator only says what it would do. `relaxd
    autoscale` changes the mode during the run."""
    min_replicas: PositiveInt = 1
    """Minimum number of rollout replicas. Only replicas that were scaled out are ever removed."""
    max_replicas: PositiveInt = 8
    """Maximum number of rollout replicas."""
    out_seconds: float = Field(default=30.0, ge=1, le=3600)
    """Seconds that a reason to add replicas must last before they are added."""
    in_seconds: float = Field(default=120.0, ge=1, le=3600)
    """Seconds that a reason to remove a replica must last before it is removed."""
    out_cooldown_seconds: float = Field(default=60.0, ge=0)
    """Seconds after replicas were added during which no more replicas are added."""
    in_cooldown_seconds: float = Field(default=300.0, ge=0)
    """Seconds after replicas were added or removed during which no replicas are removed."""

    def problems(self) -> Iterator[str]:
        if self.min_replicas > self.max_replicas:
            yield (
                f"autoscale.min_replicas is {self.min_replicas}, but autoscale.max_replicas is {self.max_replicas}: "
                "it must be at least as large"
            )
