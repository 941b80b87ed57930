"""The table of roles, and roles on the wire: names, of which an unknown one is refused with the nearest."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from relaxd import PROTOCOL_VERSION
from relaxd.board import STAGES, roles_for, stages_for
from relaxd.cli.execute import Where, _engines, _replicas
from relaxd.cli.main import app
from relaxd.cli.preparing.config_command import check
from relaxd.client import CliError
from relaxd.config.load_toml import ConfigError, load
from relaxd.local.stack import make_plan
from relaxd.local.state_folder import StateFolder
from relaxd.roles import REPLICA_ROLES, ROLES, SCALABLE_ROLES
from relaxd.rpc.errors import InvalidArgument
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.scaling_pb2 import ScaleOutRequest
from services.coordinator.api.validation import check_registration, scale_out_spec
from tests.kit.cases import each


def registration(role: str) -> Registration:
    return Registration(replica_id="r-1", role=role, address="host:1", protocol_version=PROTOCOL_VERSION)


def test_an_unknown_role_is_refused_with_the_nearest() -> None:
    check_registration(registration("rollout"))
    for wrong in ("rolout", "ROLE_ROLLOUT"):
        with pytest.raises(InvalidArgument, match="did you mean 'rollout'") as refused:
            check_registration(registration(wrong))
        assert [field for field, _ in refused.value.violations] == ["registration.role"]
    with pytest.raises(InvalidArgument, match="must be one of advantage, agent, critic, judge, ranks, re"):
        check_registration(registration("coordinator"))


def test_a_role_without_replicas_to_add_is_not_scaled() -> None:
    assert scale_out_spec(ScaleOutRequest(replicas=2)).role == "rollout"
    with pytest.raises(InvalidArgument, match="did you mean 'reward'"):
        scale_out_spec(ScaleOutRequest(role="rewards", replicas=2))
    with pytest.raises(
        InvalidArgument, match="is 'trainer': it must be one of advantage, agent, critic, judge, ranks, re"
    ):
        scale_out_spec(ScaleOutRequest(role="trainer", replicas=2))


def test_a_run_has_one_critic() -> None:
    with pytest.raises(InvalidArgument, match="replicas: is 2: a run has at most 1 critic"):
        scale_out_spec(ScaleOutRequest(role="critic", replicas=2))
    assert scale_out_spec(ScaleOutRequest(role="critic", replicas=1)).replicas == 1


RUN = """
run.steps = 1
model.path = "model"
data.source = "addition"
reward.name = "addition"
"""
TEACHER = '\nalgorithm.name = "opd"\nroles.teacher.model = "big"'
JUDGE = '\nroles.judge.model = "big"'
ON_GPU = '\nroles.judge.engine = "sglang"\nroles.judge.gpu_share '
SGLANG = TEACHER + '\nroles.teacher.engine = "sglang"'
CRITIC = '\nalgorithm.name = "ppo"\nroles.critic.placement = "service"'
AGENT = '\nagent.environment = "calculator"'
SERVICE = '\nalgorithm.kl_coef = 0.1\nroles.reference.placement = "service"'


def test_every_role_has_a_module_and_all_but_two_a_stage() -> None:
    for role in ROLES.values():
        for module in {role.module, *role.modules.values()}:
            found = importlib.util.find_spec(module)
            assert found, module
            assert not found.submodule_search_locations or importlib.util.find_spec(f"{module}.__main__"), module
    assert {ROLES[name].stage for name in REPLICA_ROLES} - {""} == set(STAGES)
    assert [name for name in REPLICA_ROLES if not ROLES[name].stage] == ["ranks", "judge"]


def test_a_run_needs_the_roles_of_its_stages() -> None:
    usual = ("trainer", "rollout", "reward", "advantage")
    assert roles_for(load(RUN)) == roles_for(load(RUN + "\nalgorithm.kl_coef = 0.1")) == usual
    assert roles_for(load(RUN + SERVICE)) == (*usual, "reference")
    assert roles_for(load(RUN + TEACHER)) == (*usual, "teacher")
    assert roles_for(load(RUN + JUDGE)) == (*usual, "judge")
    assert roles_for(load(RUN + "\ntrainer.ranks = 2\ntrainer.hosts = 2")) == (usual[0], "ranks", *usual[1:])
    assert roles_for(load(RUN + AGENT)) == (*usual, "agent")
    assert roles_for(load(RUN + '\nalgorithm.name = "ppo"')) == usual
    assert roles_for(load(RUN + CRITIC)) == (*usual, "critic")
    assert roles_for(load(RUN + JUDGE + '\nroles.judge.address = "https://host/v1"')) == usual
    needs = {stage.name: stage.needs for stage in stages_for(load(RUN + SERVICE))}
    assert "ref_logprobs" in needs["train"]
    assert "reference_weights" not in needs["train"]
    refreshed = {stage.name: stage for stage in stages_for(load(RUN + SERVICE + "\nroles.reference.refresh_every = 5"))}
    assert refreshed["reference"].writes == ("ref_logprobs", "reference_weights")
    assert "reference_weights" in refreshed["train"].needs
    assert "ref_logprobs" not in {column for stage in stages_for(load(RUN)) for column in stage.needs}
    of_agent, plain = load(RUN + AGENT), load(RUN)
    for config, role in ((of_agent, "agent"), (plain, "rollout")):
        assert [name for name in ROLES if ROLES[name].works_on("rollout", config)] == [role]
    stages = {stage.name: stage for stage in stages_for(of_agent)}
    assert {"environment_reward", "response_messages"} <= set(stages["rollout"].writes)
    assert {"environment_reward", "response_messages"} <= set(stages["reward"].needs)
    assert {"environment_reward", "turns", "response_messages"} <= set(stages["train"].needs)
    stages = {stage.name: stage for stage in stages_for(load(RUN + CRITIC))}
    assert stages["critic"].writes == ("values", "critic_state")
    assert {"values", "critic_state"} <= set(stages["train"].needs)


def test_what_is_started_follows_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    plan = make_plan(StateFolder(tmp_path), port=0, replicas={"rollout": 2})
    names = [spec.name for spec in plan.services if spec.role in ROLES]
    assert names == ["coordinator", "trainer", "rollout-1", "rollout-2", "reward", "advantage"]
    assert plan.templates.keys() == set(SCALABLE_ROLES)  # also of roles of which none is started
    assert plan.templates["reference"].command[-1] == "services.trainer.reference"
    assert plan.templates["teacher"].command[-1] == "services.trainer.teacher"
    plan = make_plan(StateFolder(tmp_path), port=0, replicas={"reference": 1, "teacher": 2})
    assert {"reference", "teacher-1", "teacher-2"} <= {spec.name for spec in plan.services}
    plan = make_plan(StateFolder(tmp_path), port=0, replicas={"teacher": 1}, engines=_engines(load(RUN + SGLANG)))
    (teacher,) = (spec for spec in plan.services if spec.role == "teacher")
    assert teacher.command[-1] == plan.templates["teacher"].command[-1] == "services.rollout.teacher"
    plan = make_plan(StateFolder(tmp_path), port=0, replicas={"teacher": 1}, engines=_engines(load(RUN + TEACHER)))
    assert plan.templates["teacher"].command[-1] == "services.trainer.teacher"


def test_a_replica_says_which_service_holds_the_model() -> None:
    teacher, ranks, engine = ROLES["teacher"], load(RUN + TEACHER), load(RUN + SGLANG)
    for module, config in (("services.trainer.teacher", ranks), ("services.rollout.teacher", engine)):
        assert not teacher.wrong_module(module, config)
    assert teacher.wrong_module("services.trainer.teacher", engine) == (
        'roles.teacher.engine is "sglang", but this replica is services.trainer.teacher: start '
        "services.rollout.teacher (relaxd up --teacher 1 --teacher-engine sglang)"
    )
    assert 'roles.teacher.engine is "megatron"' in teacher.wrong_module("services.rollout.teacher", ranks)
    assert not ROLES["reference"].wrong_module("services.trainer.reference", load(RUN + SERVICE))


def test_the_engine_of_a_teacher_follows_the_trainer() -> None:
    config = load(
        RUN
        + SGLANG
        + """
trainer.dtype = "bfloat16"
trainer.fp32_lm_head = true
rollout.temperature = 0.7
rollout.engine = "sglang"
roles.teacher.tensor_parallel = 2
roles.teacher.gpu_share = 0.3
roles.teacher.sglang = { disable_cuda_graph = false, chunked_prefill_size = 4096 }
roles.judge.model = "judge"
roles.judge.engine = "sglang"
roles.judge.gpu_share = 0.3
"""
    )
    engine, teacher = config.teacher_engine, ROLES["teacher"]
    assert (engine.engine, engine.dtype, engine.temperature, engine.tensor_parallel) == ("sglang", "bfloat16", 0.7, 2)
    assert engine.sglang == {
        "disable_cuda_graph": False,
        "enable_fp32_lm_head": True,
        "chunked_prefill_size": 4096,
    }
    assert (teacher.gpus(config), teacher.gpu_share(config)) == (2, 0.3)
    assert ROLES["rollout"].gpu_share(config) == pytest.approx(0.4)
    assert ROLES["rollout"].gpu_share(load(RUN + SGLANG)) == 1.0


def test_a_run_starts_what_it_needs(tmp_path: Path) -> None:
    optional = dict.fromkeys(("ranks", "reference", "teacher", "critic", "judge", "agent"), 0)
    where = Where(StateFolder(tmp_path), replicas={"rollout": 2, **optional})
    assert _replicas(where, load(RUN))["reference"] == 0
    needed = {**dict.fromkeys(REPLICA_ROLES, 1), "rollout": 2}
    for role, more in (("reference", SERVICE), ("teacher", TEACHER), ("judge", JUDGE), ("agent", AGENT)):
        assert _replicas(where, load(RUN + more)) == {**needed, **optional, role: 1}


@each(
    ("settings", "problem"),
    [
        ('roles.reference.placement = "service"', "algorithm.kl_coef is 0"),
        ("roles.reference.expert_parallel = 2", "must divide tensor_parallel x context_parallel = 1"),
        ("roles.critic.expert_parallel = 2", "roles.critic.expert_parallel is 2: it must divide"),
        ("roles.teacher.expert_parallel = 2", "roles.teacher.expert_parallel is 2: it must divide"),
        (SGLANG + '\nroles.teacher.placement = "trainer"\nalgorithm.distill_coef = 0', 'placement is "trainer", where'),
        (
            SGLANG + "\nroles.teacher.pipeline_parallel = 2",
            'pipeline_parallel is for roles.teacher.engine = "megatron"',
        ),
        (SGLANG + "\nroles.teacher.micro_batch_tokens = 9", 'micro_batch_tokens is for roles.teacher.engine = "megat'),
        (TEACHER + "\nroles.teacher.gpu_share = 0.5", 'roles.teacher.gpu_share is for roles.teacher.engine = "sglang"'),
        (TEACHER + "\nroles.teacher.sglang = { tp_size = 1 }", 'sglang is for roles.teacher.engine = "sglang"'),
        (
            SGLANG + '\n[[roles.teacher.models]]\nmodel = "other"\nsources = ["code"]',
            "are several teachers, and an engine holds one model",
        ),
        (SGLANG + "\nroles.teacher.gpu_share = 0.5", 'gpu_share is 0.5, but rollout.engine is "transformers"'),
        (
            SGLANG + '\nroles.teacher.gpu_share = 0.5\nrollout.engine = "sglang"' + JUDGE + ON_GPU + "= 0.5",
            "roles.teacher.gpu_share is 0.5 and roles.judge.gpu_share 0.5, which leaves nothing of a GPU",
        ),
        (
            SGLANG + "\nroles.teacher.gpu_share = 0.5\nrun.colocate = true\nboard.max_staleness = 0",
            "a teacher takes no turns: give it GPUs of its own",
        ),
        ("roles.referense.threads = 1", "did you mean roles.reference"),
        (
            'reward.choose_by = "kind"\nreward.choices = { essay = "judge" }',
            'reward.choices.essay is "judge", but there is no judge: set roles.judge.model',
        ),
        ("roles.judge.temperature = 0.5", "roles.judge.temperature is set, but roles.judge.model is empty"),
        ('roles.judge.address = "http://x/v1"', "name the judge's model, as the server at the address knows it"),
        (JUDGE + '\nroles.judge.address = "http://u:p@x/v1"', "it has more than host and path"),
        (JUDGE + '\nroles.judge.address = "http://x/v1?key=k"', "it has more than host and path"),
        (JUDGE + '\nroles.judge.address = "x:1"', "must be a base URL"),
        (JUDGE + '\nroles.judge.address = "http://x/v1/chat/completions"', "without /chat/completions"),
        (JUDGE + '\nroles.judge.address = "http://x/v1"\nroles.judge.dtype = "bfloat16"', "is for a judge's replicas"),
        (JUDGE + "\nroles.judge.tensor_parallel = 2", 'is for roles.judge.engine = "sglang"'),
        (
            JUDGE + "\nroles.judge.gpu_share = 0.3",
            'gpu_share is 0.3, but rollout.engine is "transformers" and roles.judge.engine is "transformers": on GPUs',
        ),
        (JUDGE + ON_GPU + "= 0", "roles.judge.gpu_share"),
        (JUDGE + ON_GPU + "= 1.1", "roles.judge.gpu_share"),
        (JUDGE + '\nroles.judge.address = "http://x/v1"\nroles.judge.gpu_share = 0.3', "is for a judge's replicas"),
        (
            JUDGE + ON_GPU + "= 0.3",
            'rollout.engine is "transformers" and roles.judge.engine is "sglang": on GPUs that they share, both must',
        ),
        (
            JUDGE + ON_GPU + "= 0.3\nrun.colocate = true\nboard.max_staleness = 0",
            r'both must be "sglang" \(or "transformers" on CPUs, to take turns there\)',
        ),
    ],
)
def test_a_role_that_makes_no_sense_is_refused(settings: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(f"{RUN}\n{settings}")


def test_the_check_of_a_configuration_knows_the_sizes_of_the_reference(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 10,
                "hidden_size": 12,
                "intermediate_size": 24,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "num_hidden_layers": 4,
            }
        )
    )
    settings = (
        SERVICE
        + """
roles.reference.tensor_parallel = 4
roles.reference.pipeline_parallel = 3
roles.reference.micro_batch_tokens = 100
"""
    )
    found = {str(one) for one in check(load(RUN.replace('"model"', f'"{tmp_path}"') + settings))}
    for problem in (
        "roles.reference.tensor_parallel is 4: it must divide the model's 6 query heads; sizes that do: 1, 2",
        "roles.reference.pipeline_parallel is 3: it must divide the model's 4 layers; sizes that do: 1, 2, 4",
        "roles.reference.micro_batch_tokens = 100 is too small for one sample",
    ):
        assert any(problem in one for one in found), (problem, found)


def test_the_check_of_a_configuration_adds_up_the_layers_of_stages(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=5).save_pretrained(tmp_path)
    run = RUN.replace('"model"', f'"{tmp_path}"') + "\ntrainer.ranks = 2\ntrainer.pipeline_parallel = 2\n"

    def found(layers: str) -> list[str]:
        problems = map(str, check(load(run + f"trainer.pipeline_layers = {layers}\n")))
        return [problem for problem in problems if "layers" in problem]

    assert found("[3, 2]") == []  # though two stages can't have equally many
    assert "must divide the model's 5 layers" in "".join(found("[]"))
    assert "trainer.pipeline_layers is [3, 1]: it must add up to the model's 5 layers" in "".join(found("[3, 1]"))


def test_the_check_of_a_configuration_divides_the_layers_of_stages_into_chunks(tmp_path: Path) -> None:
    for name, layers in (("model", 8), ("other", 6)):
        LlamaConfig(num_hidden_layers=layers).save_pretrained(tmp_path / name)
    run = RUN.replace('"model"', f'"{tmp_path / "model"}"') + "\ntrainer.ranks = 2\ntrainer.pipeline_parallel = 2\n"

    def found(settings: str) -> list[str]:
        return [str(problem) for problem in check(load(run + settings)) if "chunk" in str(problem)]

    assert found("trainer.pipeline_chunks = 4") == []
    (wrong,) = found("trainer.pipeline_chunks = 3")
    assert "is 3: it must divide the 4 layers of a pipeline stage; numbers that do: 1, 2, 4" in wrong
    reference = f'\nroles.reference.model = "{tmp_path / "other"}"\nroles.reference.placement = "trainer"\n'
    reference += "algorithm.kl_coef = 0.1\n"
    (wrong,) = found("trainer.pipeline_chunks = 2" + reference)
    assert "is 2: it must divide the 3 layers of a pipeline stage; numbers that do: 1, 3" in wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("trainer.pipeline_chunks = 2", "pipeline_chunks is 2, but trainer.pipeline_parallel is 1: without a pipeline"),
        (
            "trainer.ranks = 2\ntrainer.pipeline_parallel = 2\ntrainer.pipeline_chunks = 2\n"
            "trainer.pipeline_layers = [3, 1]",
            "trainer.pipeline_layers is [3, 1]: set only one of them",
        ),
        (
            "trainer.ranks = 2\ntrainer.pipeline_parallel = 2\ntrainer.pipeline_chunks = 2\n"
            "trainer.shard_gradients = true",
            "trainer.shard_gradients is true, but trainer.pipeline_chunks is 2: ",
        ),
    ],
)
def test_chunks_that_cannot_be(settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RUN + "\n" + settings)
    assert message in str(caught.value)


def test_the_check_of_a_configuration_knows_the_engine_of_the_teacher(tmp_path: Path) -> None:
    """Key-value heads may be fewer than the GPUs that share it, and no micro-batch has to hold a sample."""
    (tmp_path / "config.json").write_text(
        '{"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 10, '
        '"max_position_embeddings": 64}'
    )
    run = RUN.replace('"model"', f'"{tmp_path}"') + SGLANG.replace('"big"', f'"{tmp_path}"')

    def problems(settings: str) -> list[str]:
        return [str(one) for one in check(load(f"{run}\n{settings}")) if one.setting.startswith("roles.teacher")]

    assert problems("roles.teacher.tensor_parallel = 4\nrollout.max_new_tokens = 8\ndata.max_prompt_tokens = 16") == [
        "roles.teacher.tensor_parallel = 4 does not divide the model's num_attention_heads = 6"
    ]
    assert not problems("roles.teacher.tensor_parallel = 6\nrollout.max_new_tokens = 8\ndata.max_prompt_tokens = 56")
    assert problems("rollout.max_new_tokens = 9\ndata.max_prompt_tokens = 56") == [
        "roles.teacher.model has a context of 64 tokens, but data.max_prompt_tokens + rollout.max_new_tokens = 65"
    ]
    assert problems(
        "rollout.max_new_tokens = 9\ndata.max_prompt_tokens = 20\nroles.teacher.sglang = { context_length = 28 }"
    ) == [
        "roles.teacher.sglang.context_length has a context of 28 tokens, but data.max_prompt_tokens + "
        "rollout.max_new_tokens = 29"
    ]


def test_the_check_of_a_configuration_knows_which_models_an_engine_runs(tmp_path: Path) -> None:
    run = (RUN + SGLANG + JUDGE + ON_GPU + "= 1").replace('"model"', f'"{tmp_path}"').replace('"big"', f'"{tmp_path}"')

    def problems(model_type: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return [str(one) for one in check(load(run)) if one.setting.endswith(".engine")]

    refused = "which isn't known to run models of type 'qwen3_next' as the trainer does"
    assert problems("qwen3_next") == [f'roles.teacher.engine = "sglang", {refused}: "megatron" does']
    assert problems("qwen3") == []


def test_relaxd_up_has_to_be_told_which_teachers_to_start(tmp_path: Path) -> None:
    for words, problem in (
        (["--teacher-engine", "vllm"], "--teacher-engine is 'vllm': it must be one of megatron, sglang"),
        (["--teacher-engine", "sglang", "--compose"], "--teacher-engine sglang is for services that are processes"),
    ):
        done = CliRunner().invoke(app, ["up", "--state", str(tmp_path), *words])
        assert isinstance(done.exception, CliError)
        assert problem in str(done.exception)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("", ""),
        ("trainer.ranks = 4\ntrainer.context_parallel = 4", ""),
        (
            'trainer.ranks = 4\ntrainer.context_parallel = 4\ntrainer.attention = "cudnn"',
            "trainer.context_parallel is 4, among which the model's 6 query heads don't divide, as trainer.attention = "
            '"cudnn" needs; sizes that do: 1, 2$',
        ),
        (
            "trainer.ranks = 4\ntrainer.tensor_parallel = 4",
            "trainer.tensor_parallel is 4: it must divide the model's 6 query heads; sizes that do: 1, 2",
        ),
        ("family", 'model_type is "mixtral": supported are llama, .* nearest name is "mistral"; see docs/models.md'),
    ],
)
def test_the_check_of_a_configuration_reads_the_model(tmp_path: Path, settings: str, problem: str) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4, "hidden_size": 12}
    family = "mixtral" if settings == "family" else "llama"
    model = {"model_type": family, "vocab_size": 10, "intermediate_size": 24, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = "" if settings == "family" else settings
    found = [str(one) for one in check(load(f"{RUN}\n{settings}".replace('"model"', f'"{tmp_path}"')))]
    of_model = [one for one in found if "heads" in one or "model_type" in one]
    assert len(of_model) == bool(problem)
    assert not problem or re.search(problem, of_model[0])
