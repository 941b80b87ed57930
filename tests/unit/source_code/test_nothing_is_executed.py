"""What comes from the wire or from Redis is never executed: no module on those paths can unpickle or evaluate."""

import ast

from tests.unit.source_code.calls import calls, trees

PICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "multiprocessing")
PICKLES += ("torch.distributed.checkpoint", "megatron.core.dist_checkpointing")
"""Modules that execute what they read, or may."""
EVALUATES = ("eval", "exec", "compile", "__import__", "torch.load", "torch.save", "np.load", "numpy.load")
LAST_NAMES = {name.split(".")[-1] for name in EVALUATES}
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
"""Collectives of torch that pickle."""

SHARDS = "only Megatron's description of a model's shards: its files are never read"
ARGUED = {
    "services/trainer/learner/checkpoint_pieces.py": SHARDS,
    "services/trainer/transformer/mlp.py": SHARDS,
    "services/trainer/megatron/cpu_support.py": "compiles Megatron's own source, as it is installed",
    "relaxd/sandbox/program.py": "a model's code and its tests, in a confined process: that is what it is for",
    "relaxd/data/tools_file.py": "yaml.safe_load, which makes plain values; the configuration names the file",
    "relaxd/tools/migrate/verl.py": "yaml.safe_load, which makes plain values; a person names the file",
    "services/rollout/engines/sglang/scheduler.py": "SGLang's scheduler is a child process of SGLang's own making",
}
"""Modules that do, and why that is no door."""


def executing() -> dict[str, list[str]]:
    """What executes what it reads, by module."""
    found: dict[str, list[str]] = {}
    for file, node in ((file, node) for file, tree in trees().items() for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if wrong := [module for module in modules if any(f"{module}.".startswith(f"{name}.") for name in PICKLES)]:
            found.setdefault(file, []).extend(wrong)
    for place in calls():
        evaluates = place.name in LAST_NAMES and place.called in EVALUATES
        if evaluates or place.name in OBJECTS or {"allow_pickle", "shell"} & place.keywords:
            found.setdefault(place.file, []).append(f"{place.text[:80]} in line {place.call.lineno}")
    return found


def test_only_what_is_argued_executes_what_it_reads() -> None:
    executes = executing()
    unargued = {name: found for name, found in executes.items() if name not in ARGUED}
    assert not unargued
    assert set(ARGUED) <= set(executes), f"no reason needed any more: {set(ARGUED) - set(executes)}"


def test_only_code_that_a_configuration_names_is_imported_by_a_name_that_is_given() -> None:
    found = {place.file for place in calls() if place.name == "import_module"}
    assert found == {
        "relaxd/importing.py",  # names in the run's configuration; Compute refuses an algorithm's
        "relaxd/rewards/loading.py",  # a name in the run's configuration; Score takes no other
        "relaxd/sandbox/program.py",  # standard modules, in a confined process
        "relaxd/sandbox/zygote.py",  # a constant list of standard modules
        "services/rollout/service/rollout_service.py",  # a module of the table of engines, relaxd/engines.py
        "services/trainer/model/architectures/__init__.py",  # the files beside it
    }
