"""Tries a reward on samples, as workers do, without the service: `python -m services.reward.reward_trial --help`.

Reads a sample per line, as JSON with the fields of RewardInput, or a group per line, with its columns (--columns).
Prints one JSON object: {"error": reason} if the reward can't be loaded, else {"outcomes": [...]} with reward, parts and
seconds of each sample, or error and traceback. A judge at an address is called. A judge with replicas doesn't run
here: samples whose reward asks it fail, with "asks_judge": true.
"""

import argparse
import asyncio
import base64
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from relaxd.config import JudgeConfig, RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.judge import JudgeError, NoJudgeError
from relaxd.rpc.credentials import read_token
from relaxd.rpc.service_settings import JUDGE_KEY
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from services.reward.http_services import ChatCompletions
from services.reward.judge import no_judge
from services.reward.patience import MismatchError, UnreachableError
from services.reward.remote_scorer import RemoteScorer, RemoteTerms, of_workers
from services.reward.samples import samples_of_columns
from services.reward.worker_enclosure import MissingPathError, MissingVariableError
from services.reward.worker_pool import REWARD_OF_RUN, Failure, Score, Scored, WorkerPool, WorkerStartError

NOT_YET = (
    "the reward asks the judge, whose replicas are there only in a run; a server at roles.judge.address would be asked"
)
"""Error of a sample whose reward asks the judge, if the judge runs as replicas, which a trial doesn't start."""
NOT_TRIED = "not tried, because the reward took too long for samples before it"
"""Error of samples that weren't scored because too many before them were late."""


async def try_reward(
    config: RewardConfig,
    samples: Sequence[RewardInput],
    workers: int,
    judge: JudgeConfig | None = None,
    secret_files: Sequence[str] = (),
    max_late: int = 0,
) -> dict[str, Any]:
    """Score samples, as many concurrently as there are workers. Returns the program's output.

    Once `max_late` samples took longer than their deadline, those that have not begun are left out; with 0, all samples
    are scored.
    """
    judges = ChatCompletions(judge, read_token(variable=JUDGE_KEY)) if judge is not None and judge.address else None

    async def ask(question: AskRequest) -> AskResponse:
        if judge is None or not judge.is_there:
            return await no_judge(question)
        if judges is None:
            raise NoJudgeError(NOT_YET)
        try:
            return await judges.ask(question, judge.timeout_seconds)
        except (UnreachableError, MismatchError) as error:
            raise JudgeError(f"the judge at {judge.address} can't be asked: {error}") from error

    own = of_workers(config)
    pool: WorkerPool | None = None
    remote: RemoteScorer | RemoteTerms | None = None
    try:
        if config.address:
            remote = RemoteScorer(config)
        else:
            pool = WorkerPool(workers, own or config, ask, secret_files=secret_files)
            remote = RemoteTerms(config, pool) if config.calls_services else None
    except (MissingVariableError, MissingPathError) as error:
        return {"error": str(error)}

    async def score(samples: Sequence[RewardInput]) -> Scored:
        if remote is not None:
            return await remote.score(samples)
        assert pool is not None
        return await pool.score(REWARD_OF_RUN, samples, config.timeout_seconds)

    try:
        if pool is not None and own is not None and (failure := await pool.load(REWARD_OF_RUN)):
            return {"error": failure.reason}
        if remote is not None:
            await remote.probe()
        to_come = judge is not None and judge.has_replicas
        return {"outcomes": await _try_all(score, samples, workers, max_late, judge_to_come=to_come)}
    except UnreachableError as error:  # an error here: nobody waits for it
        what = f"the reward service at {config.address}" if config.address else "a reward service of reward.terms"
        return {"error": f"{what} can't be reached: {error}"}
    except (MismatchError, WorkerStartError) as error:
        return {"error": str(error)}
    finally:
        if pool is not None:
            pool.close()
        for client in (judges, remote):
            if client is not None:
                await client.close()


async def _try_all(
    score: Score, samples: Sequence[RewardInput], workers: int, max_late: int, *, judge_to_come: bool
) -> list[dict[str, Any]]:
    room, late = asyncio.Semaphore(workers), list[Failure]()

    async def try_sample(sample: RewardInput) -> dict[str, Any]:
        async with room:
            if max_late and len(late) >= max_late:
                return {"error": NOT_TRIED, "traceback": "", "seconds": 0.0, "asks_judge": False, "tried": False}
            begun = time.monotonic()
            (outcome,) = await score([sample])
            if isinstance(outcome, Failure) and outcome.late:
                late.append(outcome)
            return _described(outcome, time.monotonic() - begun, judge_to_come)

    return await asyncio.gather(*map(try_sample, samples))


def _described(outcome: RewardOutput | Failure, seconds: float, judge_to_come: bool) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        asks = outcome.no_judge and judge_to_come
        return {"error": outcome.reason, "traceback": outcome.traceback, "seconds": seconds, "asks_judge": asks}
    return {"reward": outcome.reward, "parts": outcome.parts, "seconds": seconds}


def _sample(line: str) -> RewardInput:
    """Return the sample in a line of JSON, which has the fields of RewardInput, with media in base64."""
    fields = json.loads(line)
    media = {name: base64.b64decode(content) for name, content in fields.pop("media").items()}
    return RewardInput(**fields, media=media)


def main() -> None:
    """Run the trial with the command line's arguments, and print its output."""
    parser = argparse.ArgumentParser(prog="python -m services.reward.reward_trial", description=__doc__)
    parser.add_argument("--config", required=True, help="the run's section [reward] as JSON")
    parser.add_argument("--judge", default="{}", help="the run's section [roles.judge] as JSON")
    parser.add_argument("--secret-file", action="append", default=[], help="a file that the reward can't open")
    parser.add_argument("--workers", type=int, default=1, help="samples to score at once")
    parser.add_argument("--max-late", type=int, default=0, help="leave out the rest after so many late samples")
    parser.add_argument("--columns", action="store_true", help="each line has the columns of a group instead")
    words = parser.parse_args()
    lines = [line for line in sys.stdin if line.strip()]
    samples = [
        sample
        for line in lines
        for sample in (samples_of_columns(json.loads(line)) if words.columns else [_sample(line)])
    ]
    try:
        reward, judge = RewardConfig.model_validate_json(words.config), JudgeConfig.model_validate_json(words.judge)
        result = asyncio.run(try_reward(reward, samples, words.workers, judge, words.secret_file, words.max_late))
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
