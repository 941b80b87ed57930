"""`relaxd config`: show a configuration, and check it against itself, the model and the data."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from relaxd.board import message_problem, size_problems, stages_for
from relaxd.cli.options import DEFAULT_STATE, PASS_ON, WordsArgument, load_words, new_console
from relaxd.cli.output import show
from relaxd.cli.preparing.doctor_command import PREFLIGHT_SECONDS, print_finding, scope_of
from relaxd.cli.preparing.first_steps import prepare_model
from relaxd.cli.preparing.reward_command import check_reward
from relaxd.client import CliError
from relaxd.config import FrozenModelConfig, ReplicaSizes, RunConfig, TrainerConfig
from relaxd.config.algorithm import OwnConfig
from relaxd.config.load_toml import ConfigError, Problem
from relaxd.config.write_toml import dump_changes, dump_explained
from relaxd.data.curriculum.run_curriculum import own_problems
from relaxd.data.dataset import load_data
from relaxd.data.templating import JUDGE_OVERRIDE, chat_template_text, load_chat_template
from relaxd.engines import ENGINES, MODEL_KINDS, EngineCapabilities, list_engines
from relaxd.evaluation.set_checks import context_problems, environment_problems, set_problems
from relaxd.local.placement import machine_problems
from relaxd.local.programs import ALGORITHM_TRIAL, run_program
from relaxd.models import DataError
from relaxd.models.folders import frozen_models, resolve_model, routed_expert_bytes
from relaxd.models.layouts import Layout, problems
from relaxd.models.model_contradictions import weights_contradiction
from relaxd.models.shape import SEEING, decoder_config, read_shape, sees
from relaxd.models.vocabulary import check_vocabularies
from relaxd.replica.gpus import visible_gpus
from relaxd.roles import TEACHER
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.text import byte_amount, parse_json
from relaxd.tools.doctor.checks import examine
from relaxd.tools.fitting.fit import budget_problem, written

TRIAL_SECONDS = 90.0
"""Maximum time for loading torch and trying a user's own algorithm, in seconds."""


def check(config: RunConfig, *, call_reward: bool = True, first_look: bool = False) -> list[Problem]:
    """Return all problems that would make a run fail. Reads the model's folder and the data; starts no service.

    Call `check_algorithm` first: this function and `machine_problems` need the algorithm's columns.
    With `first_look`, reads only some prompts, because a coordinator reads all of the data next. With `call_reward`,
    calls the reward once; environment variables and import path must be those of the services.
    """
    problems = [Problem(setting, message) for setting, message in environment_problems(config)]
    problems += _check_sizes(config)
    try:
        folder = resolve_model(config.model.path, weights=False)
    except DataError as error:
        return [*problems, Problem(error.field, error.message)]
    if not (folder / "config.json").is_file():
        return [*problems, Problem("model.path", f"= {str(folder)!r} is no model folder: it has no config.json")]
    if config.roles.critic.model:
        try:
            resolve_model(config.roles.critic.model)
        except DataError as error:
            problems.append(Problem("roles.critic.model", error.message))
    problems += _check_model(config, folder)
    problems += _check_frozen_models(config)
    if config.roles.judge.has_replicas:
        problems += _check_judge(config)
    if config.trainer.checkpoint.max_bytes and (problem := budget_problem(config)):
        problems.append(Problem("trainer.checkpoint.max_bytes", problem))
    problems += [Problem(setting, message) for setting, message in context_problems(config, folder)]
    expert_bytes = routed_expert_bytes(folder) if config.rollout.return_routed_experts else 0
    problems += [Problem(one.setting, one.message) for one in size_problems(config, expert_bytes=expert_bytes)]
    if of_message := message_problem(config, MAX_MESSAGE_BYTES):
        problems.append(Problem(of_message.setting, of_message.message))
    try:
        data = load_data(config, first_look=first_look)
    except DataError as error:
        return [*problems, Problem(error.field, error.message)]
    own = own_problems(config, data.train)
    problems += [Problem(field, message) for field, message in (*set_problems(config, data.evaluation), *own)]
    return problems + (check_reward(config, data.train.prompt(0)) if call_reward else [])


def check_algorithm(config: RunConfig) -> list[Problem]:
    """Check that stages provide the algorithm's columns, and try a user's own algorithm in a separate process."""
    try:
        if isinstance(config.algorithm, OwnConfig):
            text = config.algorithm.model_dump_json()
            if problem := run_program(ALGORITHM_TRIAL, [], seconds=TRIAL_SECONDS, text=text)["problem"]:
                return [Problem("", problem)]
        stages_for(config)
    except (CliError, ValueError) as error:
        return [Problem("", str(error))]
    return []


def _check_sizes(config: RunConfig) -> Iterator[Problem]:
    trainer, rollout = config.trainer, config.rollout
    if trainer.groups_per_step % trainer.data_parallel:
        yield Problem(
            "trainer.groups_per_step",
            f"= {trainer.groups_per_step} does not divide among {trainer.data_parallel} data-parallel ranks "
            f"(ranks {trainer.ranks} / (tensor x pipeline x context parallel)): use a multiple",
        )
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    rows = {"trainer": config.micro_batch_tokens}
    rows |= {own.section: own.micro_batch_tokens or longest for own in _frozen(config).values()}
    if (critic := config.roles.critic).placement == "service":
        rows[critic.section] = critic.micro_batch_tokens or longest
    if config.has_privileged_teacher and ENGINES[config.roles.teacher.engine].in_ranks:
        yield from _check_privileged(config)
    for section, tokens in rows.items():
        if longest > tokens:
            limits = f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}"
            yield Problem(f"{section}.micro_batch_tokens", f"= {tokens} is too small for one sample: {limits}")
    for section, optimizer in (("trainer", trainer.optimizer), (critic.section, critic.optimizer)):
        if optimizer.warmup_steps >= config.run.steps and optimizer.warmup_steps:
            problem = f"= {optimizer.warmup_steps}: set it to at most {config.run.steps - 1}, run.steps less one"
            yield Problem(f"{section}.optimizer.warmup_steps", problem)
        if optimizer.min_lr > optimizer.lr:
            yield Problem(f"{section}.optimizer.min_lr", f"= {optimizer.min_lr} is above lr = {optimizer.lr}")


def _check_privileged(config: RunConfig) -> Iterator[Problem]:
    """Check that a micro-batch has room for a sample with the teacher's prompt."""
    teacher, longest = config.roles.teacher, config.teacher_prompt_tokens + config.rollout.max_new_tokens
    section = teacher.section if teacher.placement == "service" and teacher.micro_batch_tokens else "trainer"
    tokens = teacher.micro_batch_tokens or config.micro_batch_tokens
    if tokens < longest:
        yield Problem(
            f"{section}.micro_batch_tokens",
            f"= {tokens} is too small for one sample with the teacher's prompt: roles.teacher.max_prompt_tokens + "
            f"rollout.max_new_tokens = {longest}",
        )


def _check_model(config: RunConfig, folder: Path) -> Iterator[Problem]:
    file = folder / "config.json"
    try:
        model = decoder_config(parse_json(file.read_text()))
    except (OSError, ValueError, KeyError) as error:
        yield Problem("model.path", f"= {str(folder)!r} is no model folder: {file}: {error}")
        return
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    context = model.get("max_position_embeddings")
    if isinstance(context, int) and longest > context:
        problem = f"+ data.max_prompt_tokens = {longest}, but the model's context has only {context} tokens"
        yield Problem("rollout.max_new_tokens", problem)
    size = model.get("vocab_size")
    if isinstance(size, int) and (beyond := [token for token in config.rollout.stop_token_ids if token >= size]):
        yield Problem("rollout.stop_token_ids", f"has {beyond[0]}, but the model's tokens are 0 to {size - 1}")
    if config.has_media and not sees(model):
        wrong = f"is set, but models of type {model.get('model_type')!r} take no media in the trainer"
        yield Problem(config.media_setting, f"{wrong}: {', '.join(SEEING)} do")
    yield from _check_engine(config, str(model.get("model_type")))
    replay, returned = config.trainer.routing_replay, config.rollout.return_routed_experts
    for setting, value, asked in (
        ("trainer.routing_replay", f'"{replay}"', replay != "none"),
        ("rollout.return_routed_experts", "true", returned),
    ):
        if asked and not model.get("num_experts_per_tok"):
            yield Problem(setting, f"= {value}, but the model ({model.get('model_type')}) has no experts")
    if (critic := config.roles.critic).placement == "service":
        yield from _check_division("model.path", folder, critic, config.trainer.attention)
    yield from _check_division("model.path", folder, config.trainer, config.trainer.attention)


def _check_engine(config: RunConfig, model_type: str) -> Iterator[Problem]:
    """Check that the rollout engine supports a type of model, and the run's media with that model."""
    engine = ENGINES[config.rollout.engine]
    yield from _check_type("rollout", engine, model_type)
    if model_type in SEEING and model_type not in engine.refused_models:
        for kind in config.media_kinds:
            if engine.takes(kind) and not engine.takes(kind, model_type):
                yield Problem("rollout.engine", config.engine_problem(kind, model_type))


def _check_type(section: str, engine: EngineCapabilities, model_type: str) -> Iterator[Problem]:
    """Check that an engine supports a type of model; `section` of the configuration chooses the engine."""
    if model_type in engine.refused_models:
        able = list_engines(section, lambda one: model_type not in one.refused_models)
        what = f'= "{engine.name}", which isn\'t known to run models of type {model_type!r} as the trainer does'
        yield Problem(f"{section}.engine", f"{what}: {able} does")


def _check_frozen_models(config: RunConfig) -> Iterator[Problem]:
    """Check the models of reference and teacher, if the run has such models."""
    for role, own in _frozen(config).items():
        try:
            folders = frozen_models(config, role, weights=False)
            check_vocabularies(config, role)
        except DataError as error:
            yield Problem(error.field, error.message)
            continue
        for setting, name in own.settings.items():
            try:
                model = decoder_config(parse_json((folders[name] / "config.json").read_text()))
            except (OSError, ValueError, KeyError) as error:
                yield Problem(setting, f"= {name!r} is no model folder: {error}")
                continue
            model_type = str(model.get("model_type"))
            if lacking := [kind for kind in config.media_kinds if kind not in MODEL_KINDS.get(model_type, ())]:
                taken = ", ".join(MODEL_KINDS.get(model_type, ())) or "none"
                wrong = f"takes no {lacking[0]}, which the run has ({config.media_setting})"
                yield Problem(setting, f"= {name!r} {wrong}: media of type {model_type!r} are {taken}")
            if role == TEACHER:
                yield from _check_candidates(config, model)
            if role == TEACHER and not ENGINES[config.roles.teacher.engine].in_ranks:
                yield from _check_teacher_engine(config, model)
                continue
            sizes = config.trainer if own.placement == "trainer" else own
            yield from _check_division(setting, folders[name], sizes, config.trainer.attention)


def _check_teacher_engine(config: RunConfig, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that a teacher's engine supports the model's type, its division among GPUs, and the longest sample."""
    teacher = config.roles.teacher
    yield from _check_type(teacher.section, ENGINES[teacher.engine], str(model.get("model_type")))
    heads, context = model.get("num_attention_heads"), model.get("max_position_embeddings")
    if isinstance(heads, int) and heads % teacher.tensor_parallel:
        problem = f"= {teacher.tensor_parallel} does not divide the model's num_attention_heads = {heads}"
        yield Problem(f"{teacher.section}.tensor_parallel", problem)
    setting = f"{teacher.section}.model"
    if isinstance(given := teacher.sglang.get("context_length"), int):
        setting, context = f"{teacher.section}.sglang.context_length", given
    longest = config.teacher_prompt_tokens + config.rollout.max_new_tokens
    if isinstance(context, int) and longest > context:
        prompts = f"{teacher.section}.max_prompt_tokens" if config.has_privileged_teacher else "data.max_prompt_tokens"
        problem = f"has a context of {context} tokens, but {prompts} + rollout.max_new_tokens = {longest}"
        yield Problem(setting, problem)


def _check_candidates(config: RunConfig, teacher: Mapping[str, Any]) -> Iterator[Problem]:
    """Check that algorithm.distill_top_k isn't above the size of the teacher's vocabulary."""
    top_k, size = getattr(config.algorithm, "distill_top_k", 0), teacher.get("vocab_size")
    if isinstance(size, int) and top_k > size:
        yield Problem("algorithm.distill_top_k", f"= {top_k}, but the teacher has only {size} tokens")


def _check_judge(config: RunConfig) -> Iterator[Problem]:
    """Check the folder of the judge's model, and that a reply fits into its context.

    Any model that its engine can load will do: nothing compares a judge's log-probs with the trainer's.
    """
    judge = config.roles.judge
    try:
        folder = resolve_model(judge.model, weights=False, setting="roles.judge.model")
        model = parse_json((folder / "config.json").read_text())
    except DataError as error:
        yield Problem(error.field, error.message)
        return
    except (OSError, ValueError) as error:
        yield Problem("roles.judge.model", f"= {judge.model!r} is no model folder: {error}")
        return
    try:
        if judge.chat_template is not None:
            load_chat_template(folder, chat_template_text(judge.chat_template, JUDGE_OVERRIDE))
    except DataError as error:
        yield Problem(JUDGE_OVERRIDE, error.message)
        return
    context = model.get("max_position_embeddings")
    if isinstance(context, int) and judge.max_new_tokens >= context:
        limit = f"the judge's context has only {context} tokens, the question's included"
        yield Problem("roles.judge.max_new_tokens", f"= {judge.max_new_tokens}, but {limit}")


def _frozen(config: RunConfig) -> dict[str, FrozenModelConfig]:
    """Return by role the configuration sections of the frozen models (reference, teacher) that the run has."""
    return {role: config.roles.frozen[role] for role in config.frozen_roles()}


def _check_division(setting: str, folder: Path, sizes: TrainerConfig | ReplicaSizes, kernel: str) -> Iterator[Problem]:
    """Check that the trainer supports a model, and that the model can be divided among the ranks of a section.

    Args:
        setting: the setting that names the model.
        folder: the model's folder.
        sizes: the section with the sizes of the division.
        kernel: `trainer.attention`.
    """
    section = "trainer" if isinstance(sizes, TrainerConfig) else sizes.section
    try:
        shape = read_shape(folder, setting)
    except DataError as error:
        yield Problem(error.field, error.message)
        return
    if contradiction := weights_contradiction(folder, shape.tied):
        yield Problem(setting, contradiction)
        return
    layout = Layout.of_trainer(sizes) if isinstance(sizes, TrainerConfig) else Layout.of_replica(sizes)
    found = problems(layout, shape)
    yield from (Problem(f"{section}.{field}", wrong) for field, wrong in found)
    if not found and kernel == "cudnn" and layout.division(shape).gathering > 1:
        smaller = (replace(layout, context=size) for size in range(1, layout.context))
        dividing = [one.context for one in smaller if one.division(shape).gathering == 1]
        yield Problem(
            f"{section}.context_parallel",
            f"is {layout.context}, among which the model's {shape.heads} query heads don't divide, as "
            f'trainer.attention = "cudnn" needs; sizes that do: {", ".join(map(str, dividing))}',
        )


config_app = typer.Typer(help="Show or check a configuration.", no_args_is_help=True)


@config_app.command("show", context_settings=PASS_ON)
def config_show(
    words: WordsArgument,
    diff: Annotated[bool, typer.Option("--diff", help="Only what differs from the defaults.")] = False,
) -> None:
    """Print every setting with its meaning, as TOML."""
    _, config = load_words(words)
    show(dump_changes(config) if diff else dump_explained(config), end="")


@config_app.command("check", context_settings=PASS_ON)
def config_check(words: WordsArgument) -> None:
    """Check a configuration with its model, data and reward, and then this machine. Starts no service.

    Fetches a model of `relaxd model list` first, as `relaxd run` does.
    """
    path, config = load_words(words)
    if problems := check_algorithm(config):
        raise ConfigError(problems)
    prepare_model(config, lambda text: show(text, flush=True))
    if problems := check(config) + machine_problems(config, {}, len(visible_gpus())):
        raise ConfigError(problems)
    show(f"{path} is valid, with its model, data and reward")
    show(_disk(config))
    scope = scope_of(DEFAULT_STATE, config, os.environ.get("RELAXD_COORDINATOR"), PREFLIGHT_SECONDS)
    findings = list(examine(scope, "config"))
    unfit = any(finding.level == "problem" for finding in findings)
    show("this machine isn't ready for it:" if unfit else "this machine is ready for it" + ", but:" * bool(findings))
    for finding in findings:
        print_finding(finding, new_console())
    if unfit:
        raise typer.Exit(1)


def _disk(config: RunConfig) -> str:
    """Return a sentence on how much a run will write to disk."""
    try:
        found = written(config)
    except DataError as error:
        return f"what it will write is not known: {error}"
    parts = "; ".join(f"{name}: {byte_amount(size)}" for name, size in found.items())
    return f"the run's folder will take about {byte_amount(sum(found.values()))} ({parts})"
