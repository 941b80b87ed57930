"""Reward for replies in JSON that fit a schema."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from relaxd.media.messages import THINKING
from relaxd.rewards.interface import RewardInput, TooSlow, time_limit

CHECK_SECONDS = 1.0
"""Maximum seconds to check a reply; a slower reply counts as not fitting the schema."""
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def json_schema(sample: RewardInput, schema: Mapping[str, Any] | None = None) -> dict[str, float]:
    """1 if the reply is JSON that fits a JSON schema, else 0.

    The JSON is the last fenced block after the reply's thinking, or all text after it. Settings: schema; by default
    metadata.json_schema, or else the answer, as an object or as text. External schemas ("$ref" to a URL) aren't
    fetched. Part: format: 1 if the reply is JSON. Needs the package jsonschema.

    Raises:
        ValueError: the schema is missing or invalid.
    """
    given: Any = schema if schema is not None else sample.metadata.get("json_schema", sample.answer)
    checker = _checker(given if isinstance(given, str) else json.dumps(given))
    response = sample.response.rpartition("</think>")[2]
    if THINKING.match(response.lstrip()):  # it was cut off
        response = ""
    fenced = _FENCED.findall(response)
    try:
        with time_limit(CHECK_SECONDS):
            value = json.loads(fenced[-1] if fenced else response, parse_constant=_no_constant)
            return {"reward": float(_fits(checker, value)), "format": 1.0}
    except (ValueError, RecursionError, TooSlow):
        return {"reward": 0.0, "format": 0.0}


def _fits(checker: Any, value: Any) -> bool:
    from referencing.exceptions import Unresolvable

    try:
        return bool(checker.is_valid(value))
    except (RecursionError, TooSlow):
        return False
    except Unresolvable as error:
        raise LookupError(f"the schema refers to {error.ref}, which isn't in it and isn't fetched") from error


@lru_cache(maxsize=256)
def _checker(text: str) -> Any:
    import jsonschema
    import referencing

    if not text.strip():
        raise ValueError("there is no schema: set reward.settings.schema, or give prompts metadata.json_schema")
    try:
        schema = json.loads(text)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, TypeError, jsonschema.SchemaError) as error:
        raise ValueError(f"the schema {text[:80]!r} is no JSON schema: {getattr(error, 'message', error)}") from error
    # A separate registry, because the default registry fetches URLs in "$ref".
    return kind(schema, registry=referencing.Registry())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
