"""Details of a run that people ask for: what became of its groups, and the texts of its samples' tokens."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from relaxd.data.tokenizer import PromptTokenizer
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.report.group_outcomes import ConditionError, Test, condition, of_prompt, read_fates
from relaxd.rpc.errors import Violations
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.runs.record_messages import group_message
from services.coordinator.runs.starting import check_run_id
from services.coordinator.state.records import RunRecord

MAX_GROUPS = 1000
DEFAULT_GROUPS = 100
MAX_READ_GROUPS = 1_000_000
"""Maximum number of groups that one call looks at, the newest ones: a thread reads them, for some seconds."""

logger = logging.getLogger(__name__)


def group_tests(request: pb.GetGroupsRequest) -> list[Test]:
    """Return the tests that the wanted groups pass. Raises InvalidArgument."""
    violations, tests = Violations(), []
    check_run_id(request.run_id, violations)
    in_range = 0 <= request.max_groups <= MAX_GROUPS
    violations.check(
        in_range, "max_groups", f"is {request.max_groups}: it must be 1 to {MAX_GROUPS}; 0 means {DEFAULT_GROUPS}"
    )
    if request.prompt:
        tests.append(of_prompt(request.prompt))
    if request.where:
        try:
            tests.append(condition(request.where))
        except ConditionError as error:
            violations.check(False, "where", str(error))
    violations.raise_if_any()
    return tests


def find_groups(folder: Path, tests: Sequence[Test], count: int) -> pb.GetGroupsResponse:
    """Return the newest closed groups that pass all tests, at most `count` (0: DEFAULT_GROUPS).

    Reads files: call it in a thread.
    """
    found = pb.GetGroupsResponse(complete=True)
    for number, line in enumerate(read_fates(folder)):
        if len(found.groups) == (count or DEFAULT_GROUPS):
            break
        if number == MAX_READ_GROUPS:
            found.complete = False
            break
        if all(test(line) for test in tests):
            found.groups.append(group_message(line))
    return found


def token_texts(record: RunRecord) -> Callable[[Sequence[int]], list[str]]:
    """Return a function for the texts of a run's tokens; it returns none if the tokenizer can't be read.

    Reads files: call it in a thread.
    """
    try:
        model = json.loads(record.config_json)["model"]["path"]
        return PromptTokenizer(resolve_model(model, weights=False)).texts
    except DataError as error:
        logger.warning("samples are shown without the texts of their tokens: %s", error.message)
        return lambda tokens: []
