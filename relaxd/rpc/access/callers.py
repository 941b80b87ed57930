"""Access control: the calls that a role's token may make, and for which replicas."""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from relaxd.roles import REPLICA_ROLES, ROLES
from relaxd.rpc.errors import PermissionDenied
from relaxd.rpc.methods import callers, methods, path
from relaxd.rpc.reflection import SERVICES as REFLECTION_SERVICES

READ = "read"
"""Looks, and changes nothing."""
ADMIN = "admin"
"""May make every call, on behalf of everyone."""
REPLICA = "replica"
"""Caller in protos: every role that registers, for its own replicas."""
TOKEN_ROLES = (READ, ADMIN, *ROLES)
"""Roles of tokens."""


@dataclass(frozen=True)
class Caller:
    """The caller of a call: the role and name of its token."""

    name: str
    """Name of the token."""
    role: str
    """One of TOKEN_ROLES."""


_CALLERS = {
    **{path(method): callers(method) for method in methods()},
    **{f"/{service}/ServerReflectionInfo": TOKEN_ROLES for service in REFLECTION_SERVICES},
}
_caller: ContextVar[Caller] = ContextVar("caller")


def callers_of(method: str) -> tuple[str, ...]:
    """Return the roles whose tokens allow a method, such as "/relaxd.v1.Reward/Score"; only ADMIN for unknown ones."""
    listed = (REPLICA_ROLES if role == REPLICA else (role,) for role in _CALLERS.get(method, ()))
    roles = [role for several in listed for role in several if role in TOKEN_ROLES]
    return tuple(dict.fromkeys([*roles, ADMIN]))


def admit(caller: Caller, method: str) -> None:
    """Allow `caller` to call a method; `speak_for` checks the replicas it names. Raises PermissionDenied."""
    if caller.role != ADMIN and caller.role not in callers_of(method):
        raise PermissionDenied(
            f"{_token(caller)}, but {method} is for {_either(callers_of(method))}: call it with such a token"
        )
    _caller.set(caller)


def speak_for(role: str, deed: str) -> None:
    """Check that the current call's token may act for replicas of a role.

    Args:
        role: the replicas' role.
        deed: what the caller is about to do, such as "register reward-1".

    Raises PermissionDenied if the token is for another role. Where calls need no token, everybody may.
    """
    caller = _caller.get(None)
    if caller is not None and caller.role not in (role, ADMIN):
        raise PermissionDenied(
            f"{_token(caller)}, but to {deed} is for {role}: give this process a token for {role} (RELAXD_TOKEN_FILE)"
        )


def _token(caller: Caller) -> str:
    return f'token "{caller.name}" is for {caller.role}'


def _either(roles: Iterable[str]) -> str:
    *others, last = roles
    return f"{', '.join(others)} or {last}" if others else last
