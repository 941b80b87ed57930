"""The short attack: every call of every service, with a fixed seed. `make fuzz MESSAGES=100000` is the long one."""

import asyncio
import contextlib
import logging

import pytest
from google.protobuf.message import DecodeError

from relaxd.telemetry.logs import TextFormatter
from relaxd.v1.rollout_pb2 import PauseGenerationRequest
from tests.fuzz.__main__ import problems_of
from tests.fuzz.attack import LEFT_OUT, attack, methods_of, path_of
from tests.fuzz.fleet import Fleet, bugs_in
from tests.fuzz.messages import Fuzzer
from tests.fuzz.requests import good_requests, tame

MESSAGES, SEED = 3000, 20


@pytest.mark.night
@pytest.mark.timeout(900)
def test_no_message_breaks_a_service(victims: Fleet) -> None:
    asyncio.run(attack(victims, 500, SEED + 1))  # caches fill, workers start
    before = victims.resources()
    report = asyncio.run(attack(victims, MESSAGES, SEED))
    problems = problems_of(victims, report, before)
    assert not problems, "\n".join(problems)
    paths = {path_of(method) for target in victims.targets for method in methods_of(target)}
    assert set(report.calls) == paths - set(LEFT_OUT)
    statuses = {path: set(tally.statuses) for path, tally in report.calls.items()}
    assert sum("OK" in codes for codes in statuses.values()) > len(statuses) // 2, "most attacks never got inside"


@pytest.mark.night
@pytest.mark.timeout(900)
def test_good_requests_name_real_calls(victims: Fleet) -> None:
    paths = {path_of(method) for target in victims.targets for method in methods_of(target)}
    assert set(good_requests(victims, 1)) <= paths


def test_a_seed_says_which_messages_are_sent() -> None:
    from relaxd.v1.coordinator_pb2 import HeartbeatRequest

    first, again, other = (Fuzzer(seed, {}, {}) for seed in (1, 1, 2))
    made = [[fuzzer.request(HeartbeatRequest.DESCRIPTOR, None) for _ in range(50)] for fuzzer in (first, again, other)]
    assert made[0] == made[1] != made[2]


def test_damage_leaves_ids_that_services_remember_as_they_may_be() -> None:
    now = 1795969831818
    fuzzer, good = Fuzzer(1, {}, tame(now)), PauseGenerationRequest(sync_id=now, lease_seconds=0.2)
    found = set()
    for _ in range(20_000):
        message = PauseGenerationRequest()
        with contextlib.suppress(DecodeError):
            message.ParseFromString(fuzzer.request(PauseGenerationRequest.DESCRIPTOR, good))
            found.add(message.sync_id)
    assert found == set(tame(now)["sync_id"])


def test_an_exception_is_read_from_a_log() -> None:
    try:
        raise ValueError("of the engine")
    except ValueError as error:
        raised = (type(error), error, error.__traceback__)
    record = logging.LogRecord("fuzz", logging.ERROR, "file", 1, "failed", (), raised)
    (bug,) = bugs_in(TextFormatter("rollout").format(record))
    assert bug.startswith("ValueError: of the engine File ")
