"""`relaxd status --addresses`: the services' addresses as variables of a shell."""

import re
import shlex
from collections.abc import Sequence

from relaxd.rpc.stack_identity import STACK_VARIABLE
from relaxd.v1 import coordinator_pb2 as pb


def address_lines(coordinator: str, replicas: Sequence[pb.RegisteredReplica], stack: str = "") -> list[str]:
    """Return NAME=host:port for the coordinator and each replica; a role's own name is its first replica's.

    With the stack's identity, which services need that are to register here, also RELAXD_STACK.

    A replica's name is its id in capitals: that of rollout-2 is ROLLOUT_2.
    """
    found = {"COORDINATOR": coordinator}
    registrations = sorted((replica.registration for replica in replicas), key=lambda one: (one.role, one.replica_id))
    for one in registrations:
        for name in (one.role, one.replica_id):
            found.setdefault(re.sub(r"[^A-Z0-9]", "_", name.upper()), one.address)
    found |= {STACK_VARIABLE: stack} if stack else {}
    return [f"{name}={shlex.quote(address)}" for name, address in found.items()]
