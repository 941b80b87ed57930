"""Errors without a connection; tests/integration/rpc has them on the wire."""

import grpc
import pydantic
import pytest

from relaxd.config import GRPOConfig
from relaxd.rpc.errors import InvalidArgument, NotFound, Violations, explain


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


def test_an_error_without_details_needs_no_metadata():
    assert NotFound("no such run").trailing_metadata() == ()


def test_an_error_that_never_left_the_client_is_explained_too():
    assert explain(grpc.RpcError("broken")) == "UNKNOWN: broken"
