"""Samples as rewards get them, from and to Score requests."""

import json
from collections.abc import Sequence

from relaxd.media.messages import text_and_media, text_message, to_proto
from relaxd.rewards import RewardInput
from relaxd.rpc.message_parts import numbers, words
from relaxd.v1.content_pb2 import Conversation
from relaxd.v1.reward_pb2 import ScoreRequest
from relaxd.v1.sample_pb2 import FinishReason


def samples_of_request(request: ScoreRequest) -> list[RewardInput]:
    """Return the samples of a request that is known to be right."""
    prompt, prompt_messages = text_and_media(request.prompt, "user")
    answer, answer_messages = text_and_media(request.answer, "assistant")
    metadata = json.loads(request.metadata_json or "{}")
    count = len(request.responses)
    reasons = [words(FinishReason)[reason] for reason in request.finish_reasons] or [""] * count
    tokens = list(request.response_tokens) or [0] * count
    samples = []
    for response, reason, length in zip(request.responses, reasons, tokens, strict=True):
        text, messages = text_and_media(response.messages, "assistant")
        samples.append(
            RewardInput(prompt, text, answer, metadata, reason, prompt_messages, messages, answer_messages, length)
        )
    return samples


def request_of_samples(reward: str, samples: Sequence[RewardInput]) -> ScoreRequest:
    """Return the request that scores samples of one prompt."""
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
    )
