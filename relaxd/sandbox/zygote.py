"""The process that confined processes are forked from: `python -m relaxd.sandbox.zygote DESCRIPTOR LIMITS`.

Starting Python takes longer than most answers. The zygote has started it and has imported what they use most. It never
sees what they run: it gets a socket for each, and its child speaks over that. On the zygote's own socket, DESCRIPTOR, a
message is "start" with the child's socket, and with its standard input and output if it has them; the answer is the
child's process id. Or it is "end PID"; the answer is the child's wait status after killing it. The zygote ends with the
process that started it.
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
"""Descriptor of a child's socket."""
MESSAGE_BYTES = 64
IMPORTED = (*CONTEST, "dataclasses", "decimal", "fractions", "queue")
"""Modules that answers use, imported before forking so that children have them at once."""


def main() -> None:
    """Fork on request until the socket's other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal: the other side decides
    limits = Limits(**json.loads(sys.argv[2]))
    rules = make_rules(limits)
    root = os.environ.pop("PYTHONPATH")
    sys.path[:] = [path for path in sys.path if path != root]
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.argv[:] = ["answer"]
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # what children share isn't copied by their collections
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
            os.kill(int(rest), signal.SIGKILL)  # nobody else waits for it, so its id is still its own
            control.send(str(os.waitpid(int(rest), 0)[1]).encode())


def _become(given: list[int], limits: Limits, rules: int | None) -> None:
    """Run as a confined process until it ends."""
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        end, stdin, stdout = (*given, *[null] * (3 - len(given)))
        # Out of the way of what is set below.
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
    """Return a copy of a descriptor with a number above those that a child uses."""
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)


if __name__ == "__main__":
    main()
