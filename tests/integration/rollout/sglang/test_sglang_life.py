"""How an SGLang engine starts, fails to, and ends: with everything that belongs to it."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from relaxd.process.child import ChildExited
from relaxd.process.ports import reservation_name
from relaxd.rpc.errors import FailedPrecondition, InvalidArgument
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import sync
from tests.kit.engines import EngineRunner, assert_gone, family
from tests.kit.waiting import wait_until

PROMPT = [5, 9, 17, 200, 33]
LOADS = "/dev/shm/sglang_loads_"
"""Begins the name of the file that SGLang's processes share, and that nothing would remove when they are killed."""


def mapped_files(pid: int) -> set[str]:
    """Return the files that a process has mapped; " (deleted)" follows those that have no name any more."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}


def test_a_scheduler_process_that_dies_ends_the_engine(start: Callable[..., EngineRunner], source: Source) -> None:
    runner = start()
    shared = [name for process in family(runner.engine.pid) for name in mapped_files(process.pid) if LOADS in name]
    assert shared
    assert all(name.endswith(" (deleted)") for name in shared)
    sync(runner, source, 0)
    asked = runner.ask(PROMPT, 2, stream=True, max_new_tokens=400, ignore_eos=True)
    runner.wait_begun(asked)
    processes = family(runner.engine.pid)
    (scheduler,) = [each for each in processes if "scheduler" in " ".join(each.cmdline())]
    os.kill(scheduler.pid, signal.SIGKILL)
    ended = runner.wait_exit()
    assert ended.exit_code == 1
    assert any("scheduler process 0 of SGLang is gone" in line for line in ended.last_lines)
    with pytest.raises(ChildExited):
        runner.wait(asked)
    assert not runner.engine.alive
    assert_gone(processes)


def test_the_port_of_its_processes_is_reserved_until_they_listen(start: Callable[..., EngineRunner]) -> None:
    reserved: set[int] = set()
    name = re.compile(rf"@{reservation_name('127.0.0.1', 0)[:-1]}(\d+)$", re.MULTILINE)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start)

        def started() -> bool:
            reserved.update(map(int, name.findall(Path("/proc/net/unix").read_text())))
            return starting.done()

        wait_until(started)
        runner = starting.result()
    connections = [each for process in family(runner.engine.pid) for each in process.net_connections("inet")]
    listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening & reserved
    now = set(map(int, name.findall(Path("/proc/net/unix").read_text())))
    assert not listening & now, "reserved no longer than that"


def test_options_that_sglang_does_not_have(start: Callable[..., EngineRunner]) -> None:
    with pytest.raises(InvalidArgument) as error:
        start(sglang={"chunked_prefil_size": 4})
    assert "rollout.sglang.chunked_prefil_size is not an option of SGLang" in str(error.value)
    assert "did you mean chunked_prefill_size?" in str(error.value)


def test_a_model_that_sglang_cannot_load(start: Callable[..., EngineRunner], model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(FailedPrecondition, match="Cannot find any model weights"):
        start(folder)
