"""Commands whose runs are interrupted: reading up to a line, and killing everything at a step."""

import contextlib
import re
import subprocess
from collections.abc import Iterable, Iterator

import psutil

from relaxd.local.state_folder import StateFolder
from tests.kit.redis.redis_server import await_append_only_file


def until(lines: Iterable[str], expected: str) -> str:
    """Read lines up to one in which a pattern is found. Returns it."""
    seen = []
    for line in lines:
        seen.append(line)
        if re.search(expected, line):
            return line
    raise AssertionError(f"no line with {expected!r}:\n{''.join(seen)}")


def saved_step(output: str) -> int:
    saved = re.search(r"the checkpoint of step (\d+) is on disk", output)
    assert saved, output
    return int(saved[1])


def kill_everything_at(process: subprocess.Popen[str], state: StateFolder, steps: Iterator[int]) -> list[str]:
    """Read what a command prints until a step, then kill it, its services, their children: all at once."""
    assert process.stdout is not None
    at, output = next(steps), []
    for line in process.stdout:
        output.append(line)
        if (step := re.match(r"step +(\d+)/9", line)) and int(step[1]) >= at:
            break
    else:
        raise AssertionError("".join(output))
    supervisor = state.read()
    assert supervisor is not None
    redis = next(service.pid for service in supervisor.services if service.role == "redis")
    victims = [psutil.Process(process.pid), psutil.Process(supervisor.pid)]
    victims += psutil.Process(supervisor.pid).children(recursive=True)
    for victim in victims:
        if victim.pid != redis:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.suspend()  # so that none sees another one die
    await_append_only_file(supervisor.redis)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    psutil.wait_procs(victims[1:], timeout=60)
    process.wait(timeout=60)
    return output
