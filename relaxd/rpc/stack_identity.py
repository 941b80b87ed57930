"""The identity of a stack: services that belong together, with one coordinator.

`relaxd up` and `relaxd run` make one for each start; containers and services on several hosts get theirs from
RELAXD_STACK. Every call carries the identity of its caller's stack as metadata `relaxd-stack`, and a server refuses
calls from another stack: a port that changes hands must not let a service or a command work for strangers. A call
without identity, such as one that grpcurl sends, is accepted, except for registrations.
"""

import os
import re
import secrets
from pathlib import Path

from relaxd.rpc.errors import FailedPrecondition

STACK_METADATA = "relaxd-stack"
STACK_VARIABLE = "RELAXD_STACK"
"""Environment variable with a stack's identity: the stack of this service, or the stack that a command calls."""
STACK_IDENTITY = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
NEEDS_IDENTITY = "/relaxd.v1.Coordinator/Register"


def make_stack_identity(folder: Path) -> str:
    """Return the identity of a stack that starts with this state folder.

    It is the value of RELAXD_STACK, or else a random identity that begins with the name of the folder's parent.

    Raises ValueError: RELAXD_STACK is invalid.
    """
    if given := os.environ.get(STACK_VARIABLE):
        return checked_stack_identity(given)
    name = re.sub("[^A-Za-z0-9_-]+", "-", folder.resolve().parent.name).strip("-_")[:32] or "stack"
    return f"{name}-{secrets.token_hex(4)}"


def read_stack_identity() -> str:
    """Return the stack identity in the environment variable RELAXD_STACK; "" if it isn't set."""
    return os.environ.get(STACK_VARIABLE, "")


def checked_stack_identity(text: str) -> str:
    """Return a stack's identity unchanged if it is valid or "". Raises ValueError otherwise."""
    if text and STACK_IDENTITY.fullmatch(text) is None:
        raise ValueError(
            f"{STACK_VARIABLE} is {text[:80]!r}: it must be 1 to 64 letters, digits, dots, dashes and underscores, "
            "beginning with a letter or digit"
        )
    return text


checked_stack_identity.__name__ = "stack identity (1 to 64 letters, digits, dots, dashes and underscores)"


def check_stack(method: str, own: str, given: str | bytes | None) -> None:
    """Check that a call doesn't come from another stack: its identity `given` must equal the server's, `own`.

    Calls without an identity are accepted, except NEEDS_IDENTITY. If `own` is "", all calls are accepted.

    Raises FailedPrecondition with reason STACK_MISMATCH.
    """
    if not own or given == own:
        return
    if given is not None:
        text = given.decode("ascii", "replace") if isinstance(given, bytes) else given
        raise FailedPrecondition(
            f"this is stack {own}, the caller belongs to stack {text[:80]!r}: give it the address of its own stack",
            reason="STACK_MISMATCH",
            subject=own,
        )
    if method == NEEDS_IDENTITY:
        raise FailedPrecondition(
            f"this is stack {own}, and the registration names no stack: start the service with {STACK_VARIABLE}={own} "
            "if it belongs here",
            reason="STACK_MISMATCH",
            subject=own,
        )
