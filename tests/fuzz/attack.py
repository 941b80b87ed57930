"""Sends messages to every call of every service, and judges what comes back."""

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from relaxd.rpc.client import channel_options
from relaxd.rpc.errors import field_violations
from relaxd.rpc.leader_term import TERM_METADATA
from tests.fuzz.fleet import Fleet, Target
from tests.fuzz.messages import Fuzzer
from tests.fuzz.requests import QUEUED, SLOW, TURNS, good_requests, hints, tame

ROUND = 2000
"""Messages in a round."""
TOGETHER = 8
"""Calls under way at a time, to each target."""
DEADLINE_SECONDS = 10.0
SLOW_DEADLINE_SECONDS = 0.4
AS_COORDINATOR = ((TERM_METADATA, "1"),)
MAX_ANSWERS = 20
"""Answers of a stream that are read before it is left."""
LEFT_OUT = {
    "/relaxd.v1.Replica/Restart": "ends the process, as it is asked to",
    "/relaxd.v1.Launcher/Restart": "ends a process, as it is asked to",
}
BROKEN = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNIMPLEMENTED}
"""What a service must not answer to bad input: these say that the service is wrong."""
CONNECTION = re.compile(
    "failed to connect|Socket closed|Connection reset|Broken pipe|recvmsg|Stream removed|RST_STREAM"
)
"""In an UNAVAILABLE that gRPC itself made up: the process is gone, or hung up."""


@dataclass
class Tally:
    """What was heard of one call."""

    statuses: Counter[str] = field(default_factory=Counter)
    slowest_seconds: float = 0.0


@dataclass
class Report:
    """What an attack has found."""

    calls: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    wrong: dict[str, tuple[int, str]] = field(default_factory=dict)
    """How often something was wrong, and an example, by what it was."""
    messages: int = 0

    def note(self, what: str, example: str = "") -> None:
        """Something was wrong."""
        count, first = self.wrong.get(what, (0, example))
        self.wrong[what] = (count + 1, first)


def path_of(method: MethodDescriptor) -> str:
    """As gRPC names it: "/package.Service/Method"."""
    return f"/{method.containing_service.full_name}/{method.name}"


def methods_of(target: Target) -> list[MethodDescriptor]:
    """Every call of the target's services."""
    pool = descriptor_pool.Default()
    return [method for name in target.services for method in pool.FindServiceByName(name).methods]


async def attack(
    fleet: Fleet,
    messages: int,
    seed: int,
    *,
    seconds: float = 0.0,
    told: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Send about `messages` messages in all, the same number to each call. `told` is called now and then.

    With `seconds`, no round begins after them.

    In rounds: after each one the run must go on, which also heals an engine that has quarantined itself.
    """
    report = Report()
    targets = fleet.targets
    calls = sum(path_of(method) not in LEFT_OUT for target in targets for method in methods_of(target))
    each = max(1, -(-messages // calls))
    rounds = max(1, messages // ROUND)
    begun = time.monotonic()
    for number in range(rounds):
        if seconds and time.monotonic() - begun > seconds:
            break
        share = each * (number + 1) // rounds - each * number // rounds
        seed_of_round = f"{seed}-{number}"
        work = (_attack_target(fleet, target, share, seed_of_round, report, told) for target in targets)
        await asyncio.gather(*work)
        try:
            await asyncio.to_thread(fleet.wake)
            await asyncio.to_thread(fleet.goes_on)
            await asyncio.to_thread(fleet.pause)
        except AssertionError as error:
            report.note(f"the run doesn't go on after round {number}", str(error))
            break
    return report


async def _attack_target(
    fleet: Fleet, target: Target, each: int, seed: str, report: Report, told: Callable[[Report], None]
) -> None:
    now = int(time.time() * 1000)
    fuzzer = Fuzzer(f"{seed}-{target.name}", hints(fleet), tame(now))
    good = good_requests(fleet, now)
    methods = [method for method in methods_of(target) if path_of(method) not in LEFT_OUT]
    order = methods * each
    fuzzer.random.shuffle(order)
    order.sort(key=lambda method: path_of(method) in TURNS)
    work = iter(enumerate(order))
    async with grpc.aio.insecure_channel(target.address, options=channel_options()) as channel:

        async def worker() -> None:
            for number, method in work:
                path = path_of(method)
                # Where no good request is listed, all fields are fine as they are by default.
                message = good[path](number) if path in good else GetMessageClass(method.input_type)()
                data = fuzzer.request(method.input_type, message)
                await _send(channel, method, data, report, target)
                report.messages += 1
                if report.messages % 50 == 0:
                    told(report)

        await asyncio.gather(*(worker() for _ in range(TOGETHER)))


async def _send(
    channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes, report: Report, target: Target
) -> None:
    path = path_of(method)
    deadline = SLOW_DEADLINE_SECONDS if path in SLOW else DEADLINE_SECONDS
    tally, begun, detail = report.calls[path], time.monotonic(), ""
    answers: list[bytes] = []
    try:
        if method.server_streaming:
            call = channel.unary_stream(path, None, None)(data, timeout=deadline, metadata=AS_COORDINATOR)
            async for answer in call:
                answers.append(answer)
                if len(answers) >= MAX_ANSWERS:
                    call.cancel()
                    break
        else:
            answers.append(await channel.unary_unary(path, None, None)(data, timeout=deadline, metadata=AS_COORDINATOR))
        code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        code, detail = error.code(), error.details() or ""
        wrong = _what_is_wrong(path, error, code, detail)
        if wrong:
            said = re.sub(r"\W?[0-9]+", "0", detail[:60])
            report.note(f"{target.name} {path}: {wrong}: {code.name}: {said}", f"{detail[:300]} <- {data[:200]!r}")
    try:
        for answer in answers:
            GetMessageClass(method.output_type).FromString(answer)
    except DecodeError as error:
        report.note(f"{target.name} {path}: the answer is no {method.output_type.name}", str(error))
    tally.statuses[code.name] += 1
    tally.slowest_seconds = max(tally.slowest_seconds, time.monotonic() - begun)


def _what_is_wrong(path: str, error: grpc.aio.AioRpcError, code: grpc.StatusCode, detail: str) -> str:
    if code in BROKEN:
        return "no proper status"
    if code is grpc.StatusCode.UNAVAILABLE and CONNECTION.search(detail):
        return "the connection broke"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and path not in SLOW | QUEUED and "Deadline Exceeded" in detail:
        return f"no answer within {DEADLINE_SECONDS:g} s"
    if code is grpc.StatusCode.INVALID_ARGUMENT and not field_violations(error) and "not a message" not in detail:
        return "no field is named"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "metadata" in detail:
        return "the error is too large to be sent"
    if not detail:
        return "no word about what is wrong"
    return ""
