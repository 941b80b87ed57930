"""Errors without a connection; tests/integration/rpc has them on the wire."""

from typing import Any

import grpc
import pydantic
import pytest
from google.protobuf.message import Message
from google.rpc import status_pb2
from google.rpc.error_details_pb2 import ErrorInfo, PreconditionFailure, RetryInfo

from relaxd.config import GRPOConfig
from relaxd.rpc.errors import (
    STATUS_DETAILS_KEY,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RpcError,
    Unavailable,
    Violations,
    explain,
)


def test_violations_are_collected():
    violations = Violations()
    assert violations.check(1 > 0, "n", "must be positive")
    violations.raise_if_any()
    assert not violations.check(0 > 0, "n", "must be positive, is 0")
    violations.check([], "tokens", "must not be empty")
    with pytest.raises(InvalidArgument) as caught:
        violations.raise_if_any()
    assert caught.value.violations == (("n", "must be positive, is 0"), ("tokens", "must not be empty"))
    assert str(caught.value) == "n: must be positive, is 0; tokens: must not be empty"


def test_what_pydantic_found_is_told_with_its_place():
    with pytest.raises(pydantic.ValidationError) as caught:
        GRPOConfig.model_validate({"clip_low": 2, "nam": "grpo"})
    error = InvalidArgument.from_validation(caught.value, "algorithm_json")
    assert [field for field, _ in error.violations] == ["algorithm_json.clip_low", "algorithm_json.nam"]
    assert "less than 1" in error.violations[0][1]


def details(error: RpcError, kind: type[Message]) -> list[Any]:
    """The details of a kind that the error has on the wire."""
    ((key, serialized),) = error.trailing_metadata()
    assert key == STATUS_DETAILS_KEY
    status = status_pb2.Status.FromString(serialized)
    assert status.code == error.code.value[0]
    found = [kind() for detail in status.details if detail.Is(kind.DESCRIPTOR)]
    for message, detail in zip(found, [each for each in status.details if each.Is(kind.DESCRIPTOR)], strict=True):
        detail.Unpack(message)
    return found


def test_every_error_has_a_reason_for_programs():
    (info,) = details(NotFound("no such run"), ErrorInfo)
    assert (info.reason, info.domain) == ("NOT_FOUND", "relaxd")
    error = FailedPrecondition("run 'a' is active", reason="RUN_ACTIVE", subject="run a")
    (info,) = details(error, ErrorInfo)
    assert info.reason == "RUN_ACTIVE"
    ((violation,),) = [each.violations for each in details(error, PreconditionFailure)]
    assert (violation.type, violation.subject, violation.description) == ("RUN_ACTIVE", "run a", "run 'a' is active")


def test_what_may_be_retried_says_when():
    (retry,) = details(Unavailable("no trainer is ready", retry_seconds=2.5), RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5
    assert details(FailedPrecondition("x"), RetryInfo) == []


def test_long_errors_fit_into_http_trailers():
    for error in (FailedPrecondition("ä" * 10_000, subject="s" * 10_000), Unavailable("u" * 10_000)):
        ((_, serialized),) = error.trailing_metadata()
        assert len(serialized) <= 2500


def test_an_error_that_never_left_the_client_is_explained_too():
    assert explain(grpc.RpcError("broken")) == "UNKNOWN: broken"
