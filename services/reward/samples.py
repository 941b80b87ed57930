"""Samples as rewards get them, from and to Score requests."""

import json

from relaxd.rewards import RewardInput
from relaxd.rewards.base import text_message
from relaxd.rewards.messages import text_and_media, to_proto
from relaxd.rpc.enums import numbers, words
from relaxd.v1.content_pb2 import Conversation
from relaxd.v1.reward_pb2 import ScoreRequest
from relaxd.v1.sample_pb2 import FinishReason


def samples_of_request(request: ScoreRequest) -> list[RewardInput]:
    """Return the samples of a request that is known to be right."""
    prompt, prompt_messages = text_and_media(request.prompt, "user")
    answer, answer_messages = text_and_media(request.answer, "assistant")
    metadata = json.loads(request.metadata_json or "{}")
    reasons = [words(FinishReason)[reason] for reason in request.finish_reasons] or [""] * len(request.responses)
    samples = []
    for response, reason in zip(request.responses, reasons, strict=True):
        text, messages = text_and_media(response.messages, "assistant")
        samples.append(RewardInput(prompt, text, answer, metadata, reason, prompt_messages, messages, answer_messages))
    return samples


def request_of_sample(reward: str, sample: RewardInput) -> ScoreRequest:
    """Return the request that scores one sample."""
    response = sample.response_messages or [text_message("assistant", sample.response)]
    return ScoreRequest(
        reward=reward,
        prompt=to_proto(sample.prompt_messages or [text_message("user", sample.prompt)]),
        answer=to_proto(sample.answer_messages or [text_message("assistant", sample.answer)]),
        metadata_json=json.dumps(sample.metadata),
        responses=[Conversation(messages=to_proto(response))],
        finish_reasons=[numbers(FinishReason)[sample.finish_reason]],
    )
