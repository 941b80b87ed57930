"""Converts samples for rewards: from a group's columns, from and to Score requests; and converts scores to columns."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relaxd.board import (
    ENVIRONMENT_INFO,
    ENVIRONMENT_REWARD,
    OFF_POLICY_TOKENS,
    RESPONSE_MESSAGES,
    Column,
)
from relaxd.media.messages import text_and_media, text_message, to_proto, with_parts
from relaxd.media.prompt_media import contents_of_group
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rpc.message_parts import numbers, words
from relaxd.v1.content_pb2 import Conversation
from relaxd.v1.reward_pb2 import EnvironmentOutcome, ScoreRequest
from relaxd.v1.sample_pb2 import FinishReason


def samples_of_request(request: ScoreRequest) -> list[RewardInput]:
    """Return the samples in a valid ScoreRequest."""
    prompt, prompt_messages = text_and_media(request.prompt, "user")
    answer, answer_messages = text_and_media(request.answer, "assistant")
    metadata = json.loads(request.metadata_json or "{}")
    count, media = len(request.responses), dict(request.media)
    reasons = [words(FinishReason)[reason] for reason in request.finish_reasons] or [""] * count
    tokens = list(request.response_tokens) or [0] * count
    samples = []
    for response, reason, length in zip(request.responses, reasons, tokens, strict=True):
        text, messages = text_and_media(response.messages, "assistant")
        own = (prompt, text, answer, metadata, reason, prompt_messages, messages, answer_messages, length)
        samples.append(RewardInput(*own, media=media))
    if not request.environment_outcomes:
        return samples
    return [
        replace(sample, environment_reward=outcome.reward, environment_info=dict(outcome.info))
        for sample, outcome in zip(samples, request.environment_outcomes, strict=True)
    ]


def request_of_samples(reward: str, samples: Sequence[RewardInput]) -> ScoreRequest:
    """Return the ScoreRequest for samples of one prompt."""
    first = samples[0]
    responses = [one.response_messages or [text_message("assistant", one.response)] for one in samples]
    return ScoreRequest(
        reward=reward,
        prompt=to_proto(first.prompt_messages or [text_message("user", first.prompt)]),
        answer=to_proto(first.answer_messages or [text_message("assistant", first.answer)]),
        metadata_json=json.dumps(first.metadata),
        responses=[Conversation(messages=to_proto(response)) for response in responses],
        finish_reasons=[numbers(FinishReason)[one.finish_reason] for one in samples],
        response_tokens=[one.tokens for one in samples],
        environment_outcomes=[
            EnvironmentOutcome(reward=one.environment_reward, info=one.environment_info)
            for one in samples
            if one.environment_reward is not None
        ],
        media=first.media,
    )


def samples_of_columns(columns: dict[str, Column]) -> list[RewardInput]:
    """Return the samples of a group from its columns.

    The response of a sample with several sequences is the text of the last one; its messages have all of them. The
    messages of a conversation include the environment's.

    Raises ValueError when a column has another form than the coordinator or the rollout stage writes.
    """
    prompt, texts, finish = columns["prompt"], columns["text"], columns["finish"]
    samples = np.asarray(columns["sample_of_sequence"])
    if not isinstance(prompt, dict) or not isinstance(texts, list) or not isinstance(finish, list):
        raise ValueError("prompt must be an object, text and finish lists")
    if not len(texts) == len(finish) == len(samples):
        raise ValueError(f"{len(texts)} texts, {len(finish)} finish and {len(samples)} sample_of_sequence differ")
    answers: dict[int, list[str]] = {}
    for sample, text in zip(samples.tolist(), texts, strict=True):
        answers.setdefault(sample, []).append(text)
    reasons = dict(zip(samples.tolist(), finish, strict=True))
    of_token = np.repeat(samples, np.asarray(columns["lengths"]))
    count = len(answers)  # the last samples may have no tokens
    tokens = np.bincount(of_token, weights=np.asarray(columns["loss_mask"]) != 0, minlength=count)
    if OFF_POLICY_TOKENS in columns:
        tokens += np.bincount(samples, weights=np.asarray(columns[OFF_POLICY_TOKENS]), minlength=count)
    media = contents_of_group(columns)
    found = [
        RewardInput(
            prompt=prompt["text"],
            response=said[-1],
            answer=prompt.get("answer", ""),
            metadata=prompt.get("metadata", {}),
            finish_reason=reasons[sample],
            prompt_messages=with_parts(prompt.get("messages", ())),
            tokens=int(tokens[sample]),
            response_messages=[text_message("assistant", text) for text in said] if len(said) > 1 else (),
            media=media,
        )
        for sample, said in answers.items()
    ]
    return _with_environment(found, columns) if ENVIRONMENT_REWARD in columns else found


def _with_environment(samples: list[RewardInput], columns: dict[str, Column]) -> list[RewardInput]:
    """Return the samples with conversations and environment results from a group's columns. Raises ValueError if a
    column has a wrong type."""
    rewards = np.asarray(columns[ENVIRONMENT_REWARD]).tolist()
    conversations, info = columns[RESPONSE_MESSAGES], columns[ENVIRONMENT_INFO]
    if not isinstance(conversations, list) or not isinstance(info, dict):
        raise ValueError(f"{RESPONSE_MESSAGES} must be a list, {ENVIRONMENT_INFO} an object")
    return [
        replace(
            sample,
            response_messages=with_parts(messages),
            environment_reward=reward,
            environment_info={name: values[index] for name, values in info.items() if values[index] is not None},
        )
        for index, (sample, reward, messages) in enumerate(zip(samples, rewards, conversations, strict=True))
    ]


def columns_of_rewards(outputs: Sequence[RewardOutput]) -> dict[str, Column]:
    """Return the columns that the stage writes: reward float64 [n], reward_parts {name: [n floats or None]}.

    A sample that lacks a part has None: a default value would falsify the part's mean.
    """
    names = dict.fromkeys(name for output in outputs for name in output.parts)
    return {
        "reward": np.array([output.reward for output in outputs], dtype=np.float64),
        "reward_parts": {name: [output.parts.get(name) for output in outputs] for name in names},
    }
