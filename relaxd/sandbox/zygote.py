"""The parent process from which confined processes are forked: `python -m relaxd.sandbox.zygote DESCRIPTOR LIMITS`.

Starting Python takes longer than running most answers, so the zygote starts it once and imports the modules that
answers use most. It never sees the code that its children run: each child gets its job over a separate socket. The
zygote takes two messages on its socket, DESCRIPTOR. "start" comes with the child's socket, and optionally its standard
input and output; the answer is the child's process id. "end PID" kills a child; the answer is its wait status. The
zygote ends with the process that started it.
"""

import gc
import json
import os
import signal
import socket
import sys
from importlib import import_module

from relaxd.sandbox import program
from relaxd.sandbox.channel import Channel
from relaxd.sandbox.limits import Limits, confine, make_rules
from relaxd.sandbox.program import CONTEST

CHANNEL = 3
"""File descriptor at which a forked child finds the socket to its watcher."""
MESSAGE_BYTES = 64
IMPORTED = (*CONTEST, "dataclasses", "decimal", "fractions", "queue")
"""Modules that answers often use. The zygote imports them before it forks, so that children needn't."""


def main() -> None:
    """Run the zygote: start and kill confined processes as messages request, until the other end closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts from a terminal
    limits = Limits(**json.loads(sys.argv[2]))
    rules = make_rules(limits)
    root = os.environ.pop("PYTHONPATH")
    sys.path[:] = [path for path in sys.path if path != root]
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = ["answer"]
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # garbage collection in children would copy shared memory
    control.send(b"ready")
    while True:
        message, given, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
        if not message:
            return
        order, _, rest = message.partition(b" ")
        if order == b"start":
            pid = os.fork()
            if pid == 0:
                _become(given, limits, rules)
            for one in given:
                os.close(one)
            control.send(str(pid).encode())
        else:
            os.kill(int(rest), signal.SIGKILL)  # only this process waits for the child, so its id can't be reused yet
            control.send(str(os.waitpid(int(rest), 0)[1]).encode())


def _become(given: list[int], limits: Limits, rules: int | None) -> None:
    """Confine this process, a forked child, then receive and execute its job. Never returns: the process exits."""
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        end, stdin, stdout = (*given, *[null] * (3 - len(given)))
        # Move the descriptors above the numbers that are set below.
        end, stdin, stdout, null = (_above(one) for one in (end, stdin, stdout, null))
        if rules is not None:
            rules = _above(rules)
        for number, one in enumerate((stdin, stdout, null, end)):
            os.dup2(one, number, inheritable=False)
        kept = CHANNEL if rules is None else os.dup2(rules, CHANNEL + 1, inheritable=False)
        os.closerange(kept + 1, 1 << 20)
        channel = Channel(socket.socket(fileno=CHANNEL))
        try:
            confine(limits, None if rules is None else kept)
        except OSError as error:
            channel.send({"unconfined": str(error)})
            return
        channel.send({"ready": True})
        program.run(channel)
        status = 0
    finally:
        os._exit(status)


def _above(descriptor: int) -> int:
    """Duplicate a file descriptor to a number of at least 16, above those that a child uses."""
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)


if __name__ == "__main__":
    main()
