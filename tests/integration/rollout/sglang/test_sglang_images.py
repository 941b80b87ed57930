"""Answers to prompts with images and videos from SGLang's own Qwen3-VL, also with experts, beside transformers'."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from grpc import StatusCode
from transformers import AutoModelForImageTextToText, PreTrainedModel

from relaxd.data.vision import read_vision
from relaxd.media.prompt_media import PromptMedia
from relaxd.rpc.errors import InvalidArgument
from services.rollout.engines.request_types import WrongMedia
from services.rollout.engines.transformers.transformers_process import named_parameters
from tests.integration.rollout.rollout_kit import Source
from tests.integration.rollout.sglang.syncs import sync
from tests.integration.rollout.weight_source import weights_of
from tests.kit.engines import Answer, EngineRunner
from tests.kit.vision import (
    EXPERTS,
    Item,
    clip,
    image_logprobs,
    make_vision_model,
    picture,
    prompt_with_media,
    with_published_experts,
    without_media,
)

pytestmark = pytest.mark.night

PICTURES = [picture(100, 60), picture(64, 64, 1), picture(70, 150, 2)]
LARGE = [picture(256, 250, 3), picture(64, 64, 4)]
"""So many tokens that a prompt is computed once for all samples."""


@pytest.fixture(scope="module", params=["dense", "mixture"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    if request.param == "dense":
        return make_vision_model(folder)
    experts = EXPERTS | {"moe_intermediate_size": 128}  # on a CPU SGLang pads 48 to 64
    return with_published_experts(make_vision_model(folder, tied=False, model_type="qwen3_vl_moe", **experts))


@pytest.fixture(scope="module")
def engine(start: Callable[..., EngineRunner], source: Source) -> EngineRunner:
    runner = start()
    sync(runner, source, 0)
    return runner


class Checker:
    """Transformers in float32, under each version."""

    def __init__(self, model: Path) -> None:
        self.vision = read_vision(model)
        self._model = model

    def with_weights(self, version: int) -> PreTrainedModel:
        reference = AutoModelForImageTextToText.from_pretrained(self._model, dtype=torch.float32).eval()
        parameters = named_parameters(reference)
        for name, tensor in weights_of(self._model, version).items():
            parameters[name].copy_(tensor)
        return reference

    def check(self, prompt: list[int], answer: Answer, pictures: Sequence[Item], begun: int = 0) -> int:
        """Compare each token's log-prob with that under its version; returns how many were compared.

        The first `begun` of the answer's tokens are from before the request.
        """
        tokens = without_media(answer.tokens, self.vision)
        for version in set(answer.versions):
            right = image_logprobs(self.with_weights(version), prompt, tokens, pictures)[begun:]
            rows = [row for row, each in enumerate(answer.versions[: len(right)]) if each == version]
            torch.testing.assert_close(torch.tensor(answer.logprobs)[rows], right[rows], atol=2e-5, rtol=0)
        return len(tokens) - begun


@pytest.fixture(scope="module")
def checker(model: Path) -> Checker:
    return Checker(model)


def test_log_probs_equal_transformers_under_each_version(
    engine: EngineRunner, source: Source, checker: Checker
) -> None:
    """Of prompts with one to three items, in groups, together, before and after the tower's weights change, and with
    what it made of them before only those of the language model changed."""
    compared = 0
    for version in (1, 2, 3):
        sync(engine, source, version)
        cases: list[list[Item]] = [
            [*PICTURES],
            [],
            [PICTURES[1]],
            [PICTURES[0], PICTURES[1], PICTURES[0]],
            [*LARGE],
            [clip(7, 64, 96, 5)],
            [clip(3, 64, 64, 6), PICTURES[1], clip(4, 96, 64, 7)],
            [clip(24, 96, 96, 8)],  # of so many tokens that a prompt is computed once for all samples
        ]
        prompts = [prompt_with_media(checker.vision, pictures) for pictures in cases]
        sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
        going = [engine.ask(prompt, 3, media=media, **sampling) for prompt, media in prompts]
        for (prompt, _), pictures, asked in zip(prompts, cases, going, strict=True):
            for answer in engine.wait(asked):
                assert answer.versions == [version] * 12
                compared += checker.check(prompt, answer, pictures)
    assert compared > 300


def test_equal_tokens_with_other_pictures_are_another_prompt(engine: EngineRunner, checker: Checker) -> None:
    """Asked together, and again when their keys and values are cached."""
    pictures = [[picture(256, 250, seed)] for seed in (1, 2)]
    asked = [prompt_with_media(checker.vision, one) for one in pictures]
    assert asked[0][0] == asked[1][0]
    for _ in range(2):
        going = [engine.ask(prompt, 2, media=media, max_new_tokens=4, ignore_eos=True) for prompt, media in asked]
        for (prompt, _), one, each in zip(asked, pictures, going, strict=True):
            for answer in engine.wait(each):
                checker.check(prompt, answer, one)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_while_answers_are_written(engine: EngineRunner, source: Source, checker: Checker, mode: str) -> None:
    """A prompt ends with an image: what SGLang computes again has the positions that it had."""
    assert engine.engine.weights is not None
    before = engine.engine.weights.version
    prompt, media = prompt_with_media(checker.vision, PICTURES[:2])
    prompt = prompt[:-1]
    asked = engine.ask(prompt, 4, media=media, stream=True, max_new_tokens=200, temperature=1.0, ignore_eos=True)
    engine.wait_begun(asked)
    assert sync(engine, source, before + 1, mode) == 4
    compared = 0
    for answer in engine.wait(asked):
        assert set(answer.versions) == {before, before + 1}
        assert answer.spans_weight_update == (mode == "in_place")
        if mode == "retract":
            compared += checker.check(prompt, answer, PICTURES[:2])
    assert compared > 100 or mode == "in_place"


def test_answers_go_on_whatever_they_have_sampled(engine: EngineRunner, checker: Checker) -> None:
    prompt, media = prompt_with_media(checker.vision, LARGE)
    begun = {0: (7, 8, 9), 2: (30,)}
    answers = engine.generate(prompt, 3, media=media, begun=begun, max_new_tokens=8, ignore_eos=True)
    for sample, tokens in begun.items():
        answer = answers[sample]
        assert len(answer.tokens) == 8 - len(tokens)
        answer.tokens = [*tokens, *answer.tokens]
        checker.check(prompt, answer, LARGE, len(tokens))
    # An image token that was sampled is a token like any other.
    odd = {0: (7, checker.vision.tokens.token, 8)}
    (answer,) = engine.generate(prompt, 1, media=media, begun=odd, max_new_tokens=6, ignore_eos=True)
    assert len(answer.tokens) == 3


def test_requests_whose_images_are_wrong_fail_alone(engine: EngineRunner, checker: Checker) -> None:
    prompt, media = prompt_with_media(checker.vision, PICTURES[:1])
    other = prompt_with_media(checker.vision, PICTURES[1:2])[1]
    small = {**media.records[0], "grid": [1, 1, 1]}
    wrong = {
        "tokens of media, but its items have": (prompt, other),
        "bytes of media, but prompt_media says": (prompt, PromptMedia(media.records, media.contents[:-1])),
        "can't be used: cannot identify": (prompt, PromptMedia(media.records, b"x" * len(media.contents))),
        r"has an item with the grid \[1, 1, 1\]": (prompt, PromptMedia((small,), media.contents)),
    }
    going = {
        complaint: engine.ask(tokens, media=given, max_new_tokens=4) for complaint, (tokens, given) in wrong.items()
    }
    right = engine.ask(prompt, media=media, max_new_tokens=4, ignore_eos=True)
    for complaint, asked in going.items():
        with pytest.raises(WrongMedia, match=complaint) as failed:
            engine.wait(asked)
        assert failed.value.code is StatusCode.INVALID_ARGUMENT
    assert len(engine.wait(right)[0].tokens) == 4


def test_two_ranks_see_what_one_does(start: Callable[..., EngineRunner], source: Source, checker: Checker) -> None:
    runner = start(tensor_parallel=2)
    sync(runner, source, 1, ranks=2)
    prompt, media = prompt_with_media(checker.vision, LARGE)
    answers = runner.generate(prompt, 4, media=media, max_new_tokens=12, temperature=1.0, ignore_eos=True)
    assert sum(checker.check(prompt, answer, LARGE) for answer in answers) > 12


def test_positions_of_text_for_images_are_refused(start: Callable[..., EngineRunner]) -> None:
    with pytest.raises(InvalidArgument, match=r"rl_on_policy_target is set.*leave it out for a model that takes media"):
        start(sglang={"rl_on_policy_target": "fsdp"})
