"""Access control: bearer tokens with roles, the calls that a role may make, and the replicas that it may act for.

Reads from the protos' descriptors who may call a method, whether gRPC may retry it, and whether it needs a term. Also
adds server reflection."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import MethodOptions
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from relaxd.roles import COORDINATOR, REPLICA_ROLES, ROLES, unknown_role
from relaxd.rpc.errors import PermissionDenied, Unauthenticated
from relaxd.v1 import (
    access_pb2,
    advantage_pb2,
    agent_pb2,
    coordinator_pb2,
    engine_pb2,
    external_scaler_pb2,
    judge_pb2,
    launcher_pb2,
    rank_pb2,
    ranks_pb2,
    replica_pb2,
    reward_pb2,
    reward_worker_pb2,
    rollout_pb2,
    trainer_pb2,
)

_FILES = (
    advantage_pb2,
    agent_pb2,
    coordinator_pb2,
    engine_pb2,
    external_scaler_pb2,
    judge_pb2,
    launcher_pb2,
    ranks_pb2,
    replica_pb2,
    reward_pb2,
    reward_worker_pb2,
    rollout_pb2,
    trainer_pb2,
    rank_pb2,
)
_WORK = ("/relaxd.v1.Agent/Converse", "/relaxd.v1.Reward/Score", "/relaxd.v1.Rollout/Generate")
"""Paths of coordinator calls that only give a replica work; they need no term, unlike orders such as Drain."""


def methods() -> Iterator[MethodDescriptor]:
    """Yield the descriptors of all gRPC methods of relaxd's services."""
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def callers(method: MethodDescriptor) -> tuple[str, ...]:
    """Return the roles that may call a method; empty if its proto declares none.

    The proto declares them by the option `callers` of protos/relaxd/v1/access.proto.
    """
    return tuple(method.GetOptions().Extensions[access_pb2.callers])


def may_repeat(method: MethodDescriptor) -> bool:
    """Return whether gRPC may retry a method on UNAVAILABLE: a unary read, or one that its proto calls idempotent.

    Other calls aren't retried, because a request that kills a replica would then kill the next one, too.
    """
    return not method.server_streaming and method.GetOptions().idempotency_level in (
        MethodOptions.NO_SIDE_EFFECTS,
        MethodOptions.IDEMPOTENT,
    )


def path(method: MethodDescriptor) -> str:
    """Return a gRPC method's path, such as "/relaxd.v1.Reward/Score"."""
    return f"/{method.containing_service.full_name}/{method.name}"


_ORDERS = frozenset(path(method) for method in methods() if callers(method) == (COORDINATOR,)).difference(_WORK)


def needs_term(method_path: str) -> bool:
    """Return True if a method is an order to a replica or launcher, which must carry the coordinator's term."""
    return method_path in _ORDERS


REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)


def enable_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Add gRPC server reflection to a server, for the services `names`."""
    pool = _MethodFindingPool()
    servicer = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME], pool=pool)  # type: ignore[attr-defined]
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    # grpcio-reflection has no v1.
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION_SERVICES[0], {"ServerReflectionInfo": handler}),)
    )


class _MethodFindingPool:
    """protobuf's default descriptor pool that also finds methods, for `grpcurl describe relaxd.v1.Reward.Score`."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            if method not in found.methods_by_name:
                raise
            return found.file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


READ = "read"
"""Token role that allows only calls that read."""
ADMIN = "admin"
"""Token role that allows all calls, on behalf of any replica."""
REPLICA = "replica"
"""Name in the protos' `callers` option that stands for all roles with replicas; each may act for its own replicas."""
TOKEN_ROLES = (READ, ADMIN, *ROLES)
"""All roles that a token may have: "read", "admin" and the roles of services."""


@dataclass(frozen=True)
class Caller:
    """Caller of a gRPC method, identified by the name and role of the access token."""

    name: str
    """The token's name in the token file, for people."""
    role: str
    """The token's role, one of TOKEN_ROLES."""


_CALLERS = {
    **{path(method): callers(method) for method in methods()},
    **{f"/{service}/ServerReflectionInfo": TOKEN_ROLES for service in REFLECTION_SERVICES},
}
_caller: ContextVar[Caller] = ContextVar("caller")


def callers_of(method: str) -> tuple[str, ...]:
    """Return the token roles that may call a method, such as "/relaxd.v1.Reward/Score"; only ADMIN if it is unknown."""
    listed = (REPLICA_ROLES if role == REPLICA else (role,) for role in _CALLERS.get(method, ()))
    roles = [role for several in listed for role in several if role in TOKEN_ROLES]
    return tuple(dict.fromkeys([*roles, ADMIN]))


def admit(caller: Caller, method: str) -> None:
    """Check that a caller may call a method, and remember the caller for `speak_for`. Raises PermissionDenied."""
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

    Raises PermissionDenied if the token is for another role. If calls need no token, every caller may.
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


_log = logging.getLogger(__name__)

MIN_TOKEN_LENGTH = 16
"""Minimum length, in characters, of a token that callers on other machines may use."""
KNOWN_TOKENS = (
    *("", "admin", "changeme", "default", "demo", "dev", "development", "example", "letmein", "local", "none"),
    *("null", "pass", "password", "relaxd", "root", "secret", "test", "testing", "token", "your-token", "xxx"),
)
"""Guessable tokens. All are shorter than MIN_TOKEN_LENGTH: the list detects tokens of which a file has only the
SHA-256, which hides their length."""


@dataclass(frozen=True)
class _Entry:
    caller: Caller
    digest: bytes
    """SHA-256 digest of the access token."""
    weakness: str
    """Reason why the token is guessable; empty if it seems strong."""


class AccessTokens:
    """The access tokens that a server accepts; reloads the token file when it changes."""

    RELOAD_SECONDS = 1.0
    """Seconds between two checks whether the token file has changed."""

    def __init__(self, file: Path | None = None, token: str | None = None) -> None:
        """Accept the tokens in `file`; without a file, accept only `token`, with the role admin.

        Each line of the file is `role name token`: role is in TOKEN_ROLES, name is for people, and token is the
        token itself or `sha256:` and its hexadecimal SHA-256. `#` begins a comment. A changed file is read again; if it
        is invalid, the error is logged and the former tokens stay.

        Raises OSError, and ValueError that names the line but never the token.
        """
        self._file = file
        self._strong_only = False
        self._entries: tuple[_Entry, ...] = ()
        if file is not None:
            self._stamp = _stamp(file)
            self._entries = _parse(file)
        elif token is not None:
            self._entries = (_Entry(Caller("the only one", ADMIN), _digest(token), _weakness(token)),)
        self._check_at = time.monotonic() + self.RELOAD_SECONDS

    def refuse_weak(self) -> None:
        """Reject guessable tokens now and whenever the file changes.

        Raises ValueError, which names a guessable token without showing it.
        """
        self._check_strength(self._entries)
        self._strong_only = True

    def caller(self, token: str) -> Caller | None:
        """Return the name and role of a token; None if it is unknown. Compares in constant time."""
        return self._find(token.encode())

    def check(self, method: str, authorization: str | bytes | None) -> None:
        """Check that a call is authorised, and remember its caller for `speak_for`.

        Args:
            method: path of the called method, such as "/relaxd.v1.Reward/Score".
            authorization: the call's `authorization` metadata.

        Raises Unauthenticated without a valid token, PermissionDenied if the token's role may not call the method.
        """
        if authorization is None:
            raise Unauthenticated(
                "this service needs a token: set RELAXD_TOKEN or RELAXD_TOKEN_FILE "
                "(grpcurl: -H 'authorization: Bearer ...')"
            )
        given = authorization if isinstance(authorization, bytes) else authorization.encode()
        caller = self._find(given.removeprefix(b"Bearer ")) if given.startswith(b"Bearer ") else None
        if caller is None:
            raise Unauthenticated(
                "the token is wrong: RELAXD_TOKEN (or RELAXD_TOKEN_FILE) is not one that the service accepts (those in "
                "its RELAXD_TOKENS_FILE, or else its own)"
            )
        admit(caller, method)

    def _find(self, token: bytes) -> Caller | None:
        self._reload()
        digest, found = hashlib.sha256(token).digest(), None
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found

    def _check_strength(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            if entry.weakness:
                name = f'token "{entry.caller.name}" in {self._file}' if self._file else "token in RELAXD_TOKEN(_FILE)"
                raise ValueError(f"the {name} {entry.weakness}")

    def _reload(self) -> None:
        if self._file is None or time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + self.RELOAD_SECONDS
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            entries = _parse(self._file)
            if self._strong_only:
                self._check_strength(entries)
            self._entries, self._stamp = entries, stamp
            _log.info("%s has changed: accepting its %d tokens from now on", self._file, len(self._entries))
        except (OSError, ValueError) as error:
            self._check_at += 10 * self.RELOAD_SECONDS
            _log.error("still accepting the former tokens: %s", error)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


_KNOWN_DIGESTS = frozenset(map(_digest, KNOWN_TOKENS))


def _stamp(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _weakness(token: str) -> str:
    if len(token) < MIN_TOKEN_LENGTH:
        return f"has {len(token)} characters: it must have {MIN_TOKEN_LENGTH} or more"
    return ""


def _parse(file: Path) -> tuple[_Entry, ...]:
    entries: list[_Entry] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"tokens file {file}, line {number}"
        if len(words) != 3:
            raise ValueError(f"{where}: has {len(words)} words, not three: role, name and token")
        role, name, token = words
        if role not in TOKEN_ROLES:
            raise ValueError(f"{where}: role {unknown_role(role, TOKEN_ROLES)}")
        if token.startswith("sha256:"):
            if not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", token):
                raise ValueError(f"{where}: sha256: must be followed by 64 hexadecimal digits")
            digest = bytes.fromhex(token.removeprefix("sha256:"))
            weakness = "is a well-known word" if digest in _KNOWN_DIGESTS else ""
        elif token.isascii() and token.isprintable():
            digest, weakness = _digest(token), _weakness(token)
        else:
            raise ValueError(f"{where}: the token is not printable ASCII")
        if any(entry.caller.name == name or entry.digest == digest for entry in entries):
            raise ValueError(f"{where}: {name!r} or its token occurs twice")
        entries.append(_Entry(Caller(name, role), digest, weakness))
    if not entries:
        raise ValueError(f"tokens file {file}: has no token")
    return tuple(entries)
