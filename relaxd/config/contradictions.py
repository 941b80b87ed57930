"""Contradictions between settings of different sections. Each is a sentence that names the settings and says what to
do."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relaxd.config.algorithm import OwnConfig
from relaxd.config.role_settings import CriticConfig
from relaxd.engines import ENGINES, list_engines

if TYPE_CHECKING:
    from relaxd.config.run import RunConfig

JUDGE_REWARDS = ("judge", "judge_pairs", "boxed_judge")
"""Names of the bundled rewards that use the judge model."""


def contradictions(config: "RunConfig") -> Iterator[str]:
    """Yield a sentence for every contradiction between the configuration's sections."""
    for rules in (
        _of_refreshed_models,
        _of_media,
        _of_reference,
        _of_teacher,
        _of_rewards,
        _of_evaluations,
        _of_shared_gpus,
        _of_critic,
        _of_algorithm,
        _of_lengths,
        _of_colocation,
        _of_conversations,
        _of_engine_and_weights,
    ):
        yield from rules(config)


def _of_refreshed_models(config: "RunConfig") -> Iterator[str]:
    for role, own in config.roles.frozen.items():
        if not own.refresh_every:
            continue
        refreshed = f"{own.section}.refresh_every is {own.refresh_every}, but"
        if role not in config.frozen_roles():
            needs = "algorithm.kl_coef" if role == "reference" else f"{own.section}.model"
            yield f"{refreshed} the run has no {role}: remove it, or set {needs}"
        if others := [name for name in own.settings.values() if name not in ("", config.model.path)]:
            yield (
                f'{refreshed} {own.section}.model is "{others[0]}": a model that takes over the trained one\'s weights '
                f'begins as it does; set "{config.model.path}"'
            )


def _of_media(config: "RunConfig") -> Iterator[str]:
    data = config.data
    if config.reward.media and not config.has_media:
        yield (
            "reward.media is true, but the run has none: name a column with media in data.media_keys, set agent.media, "
            "or leave it out"
        )
    kinds = {*config.media_kinds, *(("audio",) if data.video_sound else ())}
    for kind, name, names in (
        ("video", "video", ("video_fps", "video_sound", "max_video_frames", "max_video_tokens")),
        ("image", "images", ("min_image_tokens", "max_image_tokens")),
        ("audio", "sound", ("max_audio_seconds",)),
    ):
        if kind not in kinds:
            reason = f"the run has no {name}: name its column in data.media_keys, set agent.media, or leave it out"
            yield from data.unused(names, reason)
    if not data.media_keys:
        reason = "no column has media that could be fetched: name one in data.media_keys, or leave it out"
        yield from data.unused(("media_hosts",), reason)
    if not data.media_hosts:
        reason = "no host has media that could be awaited: name it in data.media_hosts, or leave it out"
        yield from data.unused(("media_wait_seconds",), reason)
    if not config.has_media:
        return
    # A critic service and engines that give a teacher's log-probs take no media.
    teacher, critic, but = config.roles.teacher, config.roles.critic, "but the run has media"
    if config.algorithm.needs_critic and critic.placement == "service":
        yield (
            f'{critic.section}.placement is "service", {but} ({config.media_setting}), which only a critic in the '
            'trainer\'s ranks sees: set "trainer"'
        )
    if "teacher" in config.frozen_roles() and not ENGINES[teacher.engine].in_ranks:
        yield (
            f'{teacher.section}.engine is "{teacher.engine}", {but} ({config.media_setting}), which this engine '
            "doesn't see as a teacher: leave it out"
        )
    if config.has_privileged_teacher:
        yield (
            f'{teacher.section}.privileged_key is "{teacher.privileged_key}", {but} ({config.media_setting}), which '
            "prompts of the teacher's own can't have: remove one of them"
        )


def _of_reference(config: "RunConfig") -> Iterator[str]:
    if config.algorithm.needs_reference:
        return
    but, reference = "but algorithm.kl_coef is 0, which needs no reference: set kl_coef > 0, or", config.roles.reference
    if reference.placement == "service":
        yield f'roles.reference.placement is "service", {but} placement = "trainer"'
    if reference.model:
        yield f'roles.reference.model is "{reference.model}", {but} remove the model'


def _of_teacher(config: "RunConfig") -> Iterator[str]:
    algorithm, teacher, models = config.algorithm, config.roles.teacher, config.roles.teacher.settings
    if isinstance(algorithm, OwnConfig):
        return
    if teacher.privileged_key and not models:
        yield (
            f'roles.teacher.privileged_key is "{teacher.privileged_key}", but no teacher is there to see it: remove '
            f'it, or set roles.teacher.model, which may be model.path, "{config.model.path}"'
        )
    if not models and not algorithm.needs_teacher:
        reason = "the run has no teacher: set roles.teacher.model, and algorithm.distill_coef or distill_loss_coef"
        yield from teacher.unused(type(teacher).model_fields, reason)
    if models and not algorithm.needs_teacher:
        setting, model = next(iter(models.items()))
        yield (
            f'{setting} is "{model}", but algorithm.distill_coef and algorithm.distill_loss_coef are 0, '
            "which need no teacher: set one of them, or remove the model"
        )
    if algorithm.distill_candidates != "teacher" and (problem := config.student_candidates_problem):
        yield (
            f'algorithm.distill_candidates is "{algorithm.distill_candidates}", but {problem}; or use '
            'distill_candidates = "teacher"'
        )
    if algorithm.needs_teacher and not models:
        yield (
            "roles.teacher.model is empty: set it to the teacher's model, because algorithm.distill_coef is "
            f"{algorithm.distill_coef:g} and algorithm.distill_loss_coef {algorithm.distill_loss_coef:g}"
        )


def _of_rewards(config: "RunConfig") -> Iterator[str]:
    reward, sets = config.reward, config.eval.sets
    named = {
        "reward.name": reward.name,
        **{f"reward.terms.{number}.name": term.name for number, term in enumerate(reward.terms)},
        **{f"reward.choices.{value}": one.name for value, one in reward.choices.items()},
        **{f"eval.sets.{number}.reward": one.reward for number, one in enumerate(sets)},
    }
    asking = [f'{setting} is "{name}"' for setting, name in named.items() if name in JUDGE_REWARDS]
    if asking and not config.roles.judge.is_there:
        yield f"{asking[0]}, but there is no judge: set roles.judge.model"
    if not reward.calls_services and not any(one.reward_address for one in sets):
        reason = "no reward is a service at an address: remove it"
        yield from reward.unused(("max_in_flight", "outage_seconds"), reason)


def _of_evaluations(config: "RunConfig") -> Iterator[str]:
    checkpoint = config.trainer.checkpoint
    watched = {"run.stop_early.metric": config.run.stop_early.metric, _BEST: checkpoint.keep_best}
    for setting, metric in watched.items():
        if metric and (problem := config.metric_problem(metric)):
            yield f'{setting} is "{metric}": {problem}'
        if metric and not config.eval.interval:
            yield (
                f'{setting} is "{metric}", but eval.interval is 0, so that nothing is evaluated during training: set '
                "eval.interval"
            )
    if checkpoint.keep_best and not checkpoint.every:
        yield (
            f'{_BEST} is "{checkpoint.keep_best}", but trainer.checkpoint.every is 0, which takes checkpoints only on '
            "request: set every, or remove keep_best"
        )


_BEST = "trainer.checkpoint.keep_best"


def _of_shared_gpus(config: "RunConfig") -> Iterator[str]:
    judge, teacher, engine = config.roles.judge, config.roles.teacher, ENGINES[config.rollout.engine]
    able = engine.sleeps if config.run.colocate else engine.shares_gpus
    if judge.shares_gpus and (not able or judge.engine != engine.name):
        both = list_engines("roles.judge", lambda one: one.shares_gpus)
        on_cpus = list_engines("roles.judge", lambda one: one.sleeps and not one.needs_gpus)
        yield (
            f'roles.judge.gpu_share is {judge.gpu_share:g}, but rollout.engine is "{engine.name}" and '
            f'roles.judge.engine is "{judge.engine}": on GPUs that they share, both must be {both}'
            + (f" (or {on_cpus} on CPUs, to take turns there)" if config.run.colocate else "")
        )
    if not teacher.shares_gpus:
        return
    share = f"{teacher.section}.gpu_share is {teacher.gpu_share:g}"
    if config.run.colocate:
        yield (
            f"{share}, but run.colocate is true, where trainer and engines take turns on their GPUs, and a teacher "
            "takes no turns: give it GPUs of its own, which is 1"
        )
    if not engine.shares_gpus:
        sharing = list_engines("rollout", lambda one: one.shares_gpus)
        yield (
            f'{share}, but rollout.engine is "{engine.name}": only engines that are {sharing} leave a share of their '
            "GPUs free"
        )
    if config.roles.engine_gpu_share <= 0:
        yield (
            f"{share} and roles.judge.gpu_share {judge.gpu_share:g}, which leaves nothing of a GPU for a rollout "
            "engine: lower one of them"
        )


def _of_critic(config: "RunConfig") -> Iterator[str]:
    critic, algorithm = config.roles.critic, config.algorithm
    says_itself = isinstance(algorithm, OwnConfig)
    if critic != CriticConfig() and not says_itself and not algorithm.needs_critic:
        yield (
            f'roles.critic is set, but algorithm.name is "{algorithm.name}", which trains no critic: use "ppo", or '
            "leave roles.critic out"
        )
    if critic.optimizer.cpu_offload and config.trainer.dtype != "bfloat16":
        yield (
            'roles.critic.optimizer.cpu_offload needs trainer.dtype = "bfloat16", but it is '
            f'"{config.trainer.dtype}": only then are there main weights beside those that the critic computes with'
        )


def _of_algorithm(config: "RunConfig") -> Iterator[str]:
    algorithm, samples, longest = config.algorithm, config.rollout.samples_per_prompt, config.rollout.max_new_tokens
    named, why = f'algorithm.name is "{algorithm.name}"', algorithm.on_policy_only
    if samples < algorithm.min_samples:
        yield (
            f"{named}, but rollout.samples_per_prompt is {samples}: its baseline is made of the group's other rewards, "
            f"so there must be at least {algorithm.min_samples}; for one sample a prompt use "
            '"reinforce_plus_plus" or "ppo"'
        )
    if why and config.board.max_staleness > 0:
        yield f"{named}, but board.max_staleness is {config.board.max_staleness}: set 0, because {why}"
    if why and config.trainer.updates_per_step > 1:
        yield (
            f"{named}, but a step has {config.trainer.updates_per_step} updates: set trainer.mini_batches = 1 and "
            f"trainer.epochs = 1, because {why}"
        )
    if isinstance(algorithm, OwnConfig) or not algorithm.overlong_buffer:
        return
    if (begins := algorithm.overlong_limit - algorithm.overlong_buffer) >= longest:
        yield (
            f"algorithm.overlong_limit is {algorithm.overlong_limit}, so that shaping begins after {begins} tokens, "
            f"but no answer is longer than rollout.max_new_tokens = {longest}: set overlong_limit to that"
        )


def _of_lengths(config: "RunConfig") -> Iterator[str]:
    shortest, longest = config.rollout.min_new_tokens, config.rollout.max_new_tokens
    for number, source in enumerate(config.data.sources):
        own = source.min_new_tokens
        least = max(1, shortest if own is None else own)
        if source.max_new_tokens and not least <= source.max_new_tokens <= longest:
            setting = "rollout.min_new_tokens" if own is None else "its min_new_tokens"
            yield (
                f"data.sources.{number}.max_new_tokens is {source.max_new_tokens}: it must be {least} "
                f"({setting}) to {longest} (rollout.max_new_tokens)"
            )
        if own is not None and own > longest:
            yield f"data.sources.{number}.min_new_tokens is {own}: rollout.max_new_tokens is only {longest}"
    of_sets = config.eval.max_new_tokens or longest
    if config.eval.prompts and of_sets < shortest:
        yield f"eval.max_new_tokens is {of_sets}: it must be at least rollout.min_new_tokens = {shortest}"
    for number, one in enumerate(config.eval.sets):
        least = shortest if one.min_new_tokens is None else one.min_new_tokens
        if (most := one.max_new_tokens or of_sets) < least:
            yield (
                f"eval.sets.{number} has answers of at most {most} and at least {least} tokens: raise max_new_tokens, "
                "or lower min_new_tokens (by default rollout.min_new_tokens)"
            )


def _of_colocation(config: "RunConfig") -> Iterator[str]:
    board, trainer, transport = config.board, config.trainer, config.weights.transport
    if not config.run.colocate:
        if transport == "cuda_ipc":
            yield (
                'weights.transport is "cuda_ipc", which needs trainer and engines on the same GPUs: set '
                'run.colocate = true, or use "nccl"'
            )
        yield from trainer.unused(("offload",), "run.colocate is false: set true")
        return
    but = "run.colocate is true, but"
    if board.max_staleness != 0:
        yield f"{but} board.max_staleness is {board.max_staleness}: set 0, since each step waits for its groups"
    if board.oversample != 1.0:
        yield f"{but} board.oversample is {board.oversample}: set 1.0, since exactly a step's groups are generated"
    if not ENGINES[config.rollout.engine].sleeps:
        able = list_engines("rollout", lambda engine: engine.sleeps)
        yield f'{but} rollout.engine is "{config.rollout.engine}", which cannot sleep: use {able}'
    if transport == "nccl":
        yield (
            f'{but} weights.transport is "nccl", which cannot connect two processes on one GPU: use "cuda_ipc", or '
            '"gloo" on a CPU'
        )
    if (mode := config.autoscale.mode) != "off":
        yield f'{but} autoscale.mode is "{mode}": set "off", since all engines are on GPUs of the trainer'
    if trainer.hosts > 1:
        yield f"{but} trainer.hosts is {trainer.hosts}: set 1, since the trainer takes turns on its own host only"
    if trainer.ranks % config.rollout.tensor_parallel:
        yield (
            f"{but} trainer.ranks is {trainer.ranks}: it must be a multiple of rollout.tensor_parallel = "
            f"{config.rollout.tensor_parallel}, so that every GPU has a rank and an engine"
        )


def _of_conversations(config: "RunConfig") -> Iterator[str]:
    agent = config.agent
    if agent.is_there and (problem := _conversation_problem(config)):
        yield f"{agent.shown}, but {problem}"
    for number, one in enumerate(config.eval.sets):
        place = f"eval.sets.{number}.environment"
        setting = place if one.environment else f"{place}_settings"
        if not agent.is_there and (one.environment or one.environment_settings):
            yield (
                f"{setting} is set, but agent.environment is empty, so that the run has no conversations: set "
                f"agent.environment, or remove {setting}"
            )
        if agent.is_there and not (one.environment or agent.environment) and one.environment_settings is not None:
            yield (f"{setting} is set, but {agent.shown}, which has none: remove it, or name an environment in {place}")
        if agent.is_service and not one.environment and one.environment_settings:
            yield (
                f'{setting} is set, but agent.environment is "{agent.environment}", a service that runs already: '
                f"remove it, or name another environment in {place}"
            )


def _conversation_problem(config: "RunConfig") -> str:
    """Return the reason why a run's samples can't be conversations; "" if they can."""
    longest = config.rollout.max_new_tokens
    if config.agent.credit != "sample" and config.reward.name != "environment":
        return (
            f'agent.credit is "{config.agent.credit}", but reward.name is "{config.reward.name}", which scores whole '
            'conversations; set "environment", which pays the rewards of each player and step'
        )
    if config.rollout.partial.enabled:
        return "rollout.partial.enabled is true: unfinished conversations can't be kept yet; set false"
    if config.rollout.return_routed_experts:
        return "rollout.return_routed_experts is true: the experts of conversations can't be returned yet; set false"
    if config.has_privileged_teacher:
        return (
            f'roles.teacher.privileged_key is "{config.roles.teacher.privileged_key}": conversations may begin with '
            "prompts of their own, in whose place the teacher's can't be put; remove it"
        )
    if config.agent.turn_tokens > longest:
        return (
            f"agent.turn_tokens is {config.agent.turn_tokens}: it must be at most rollout.max_new_tokens = {longest}, "
            "which is for a whole conversation"
        )
    return ""


def _of_engine_and_weights(config: "RunConfig") -> Iterator[str]:
    engine, trainer, weights = ENGINES[config.rollout.engine], config.trainer, config.weights
    if trainer.routing_replay == "rollout" and not config.rollout.return_routed_experts:
        setting = "return_routed_experts"
        able = list_engines("rollout", lambda one: setting in one.settings["rollout"])
        missing = f'rollout.engine is "{engine.name}", which doesn\'t return the experts: use {able} with '
        if setting in engine.settings["rollout"]:
            yield f'trainer.routing_replay is "rollout", but rollout.{setting} is false: set true'
        else:
            yield f'trainer.routing_replay is "rollout", but {missing}rollout.{setting} = true'
    interval, staleness = weights.interval, config.board.max_staleness
    if interval > staleness + 1:
        yield (
            f"weights.interval is {interval}, but board.max_staleness is {staleness}: the last of {interval} steps "
            f"would need tokens that are {interval - 1} versions old, so that the run would stop before it; set "
            f"weights.interval to at most {staleness + 1}, or board.max_staleness to at least {interval - 1}"
        )
    if weights.pause not in engine.pauses:
        able = list_engines("rollout", lambda one: weights.pause in one.pauses)
        modes = ", ".join(f'"{mode}"' for mode in engine.pauses)
        yield (
            f'weights.pause is "{weights.pause}", which rollout.engine = "{engine.name}" does not support: use '
            f"{modes}, or rollout.engine = {able}"
        )
    if trainer.hosts > 1 and not engine.has_model:
        yield (
            f'trainer.hosts is {trainer.hosts}, but rollout.engine is "{engine.name}", with which the trainer has no '
            "model to divide: set 1"
        )
    if engine.stock_weight_group and trainer.pipeline_parallel > 1:
        yield (
            f"trainer.pipeline_parallel is {trainer.pipeline_parallel}: with rollout.engine = "
            f'"{engine.name}" it must be 1, because SGLang servers receive weights from one rank only'
        )
    if engine.stock_weight_group and weights.transport == "gloo_chain":
        yield (
            f'weights.transport is "gloo_chain", but with rollout.engine = "{engine.name}" SGLang servers pass no '
            'weights on: use "gloo"'
        )
