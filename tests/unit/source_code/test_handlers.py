"""Where gRPC handlers are: those of a service in a file named *server.py, with the service itself in a file named
service.py, or in its only file; those of a child in its program's file."""

import ast
from collections.abc import Iterator, Mapping

from tests.unit.source_code.calls import trees

SERVER = ("server.py", "service.py")
CHILDREN = {
    "relaxd/envs/host.py": "EnvironmentHandlers",
    "services/reward/worker_rewards.py": "Rewards",
    "services/rollout/engines/engine_process.py": "EngineProcess",
    "services/rollout/engines/sglang/scheduler.py": "ControlHandlers",
    "services/trainer/reference_models/model_rank.py": "ModelRank",
    "services/trainer/loop/training_rank.py": "Rank",
}
"""Handlers that only a parent process calls, through a Unix socket: the file is the child's program, or its base."""
ONE_FILE = {"services/rollout/judge.py": "JudgeServicer", "services/trainer/ranks.py": "RanksServicer"}
"""Handlers of services that are one file."""


def handlers(modules: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Yield file and name of each class that inherits from a generated servicer."""
    for file, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Servicer") for base in node.bases):
                yield file, node.name


def test_handlers_of_services_are_in_named_files_and_those_of_children_are_listed() -> None:
    found = dict(handlers(trees()))
    elsewhere = {file: name for file, name in found.items() if not file.endswith(SERVER)}
    assert elsewhere == CHILDREN | ONE_FILE, (
        "move a service's handlers to its server.py or service.py, or list a child process"
    )


def test_a_handler_is_found_by_its_base() -> None:
    sources = {
        "a.py": "class A(pb2_grpc.JudgeServicer): ...",
        "b.py": "class B(Servicer, C): ...\nclass D(Service): ...",
    }
    modules = {file: ast.parse(source) for file, source in sources.items()}
    assert list(handlers(modules)) == [("a.py", "A"), ("b.py", "B")]
