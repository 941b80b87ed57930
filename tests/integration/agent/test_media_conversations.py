"""Conversations with media from the environment to the trainer's log-probs, beside transformers' own pass."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration

from relaxd.algorithms import create
from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA, Column
from relaxd.config import GRPOConfig
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import normalise, read_vision
from relaxd.media.images import ImageRule, normalise_image
from relaxd.media.messages import to_proto
from relaxd.media.placeholders import MediaItem, shown_text
from relaxd.media.prompt_media import PromptMedia, with_references
from relaxd.media.sources import data_uri
from relaxd.v1.reward_pb2 import ScoreRequest
from relaxd.v1.sample_pb2 import SamplingParams
from services.agent.conversation import Conversation
from services.agent.engines import EngineSession, WantedWeights
from services.agent.group_conversations import columns_of, media_columns_of
from services.agent.service import EvaluationConversations
from services.reward.samples import samples_of_columns, samples_of_request
from services.trainer.batch.groups import check_group
from services.trainer.batch.micro_batch import pack
from services.trainer.batch.sequence_media import GroupMediaReader
from tests.integration.agent.conversation_kit import config_of, service_of, talks
from tests.integration.agent.function_kit import holding as function_holding
from tests.integration.agent.galleries import OTHER, SHOWN
from tests.integration.agent.program_kit import config_of as program_config
from tests.integration.agent.program_kit import holding as program_holding
from tests.integration.agent.scripted_engines import Fleet
from tests.integration.agent.seeing_engines import SeeingFleet
from tests.integration.trainer.trainer_worlds import Job, make_learner
from tests.kit.megatron_world import leave_layout
from tests.kit.models import byte_tokenizer
from tests.kit.sounds import encoded_sound, make_omni_model, sound
from tests.kit.vision import Item, clip, encoded, encoded_clip, make_vision_model, picture, seen_by_transformers
from tests.unit.rollout.engine_harness import Harness

GALLERY = "tests.integration.agent.galleries:Gallery"
THEATRE = "tests.integration.agent.galleries:Theatre"
ASKED = picture(70, 130, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def harness(folder: Path) -> Iterator[Harness]:
    harness = Harness(folder)
    yield harness
    harness.engine.stop()


def asked(
    items: Sequence[Any], tokenizer: PromptTokenizer, kind: str = "image"
) -> tuple[Example, np.ndarray, PromptMedia]:
    """Return a prompt, its published tokens and its media."""
    assert tokenizer.vision is not None
    found = tuple(MediaItem(kind, encoded(one) if isinstance(one, Image.Image) else one, "") for one in items)
    parts = [{"type": kind} for _ in items]
    example = Example([{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}], media=found)
    media = normalise(example, tokenizer.vision)
    tokens = tokenizer.encode_seen(example, media)
    return Example(with_references(example.messages, media)), tokens, PromptMedia.of(media)


def normal_size(shown: Image.Image) -> tuple[int, int]:
    return normalise_image(encoded(shown), ImageRule(16, 2, 32 * 32 * 4, 32 * 32 * 64)).size.normal


def group_columns(conversations: Sequence[Conversation], tokens: np.ndarray, media: PromptMedia) -> dict[str, Column]:
    columns = columns_of(conversations, masked=False) | media_columns_of(conversations, media)
    if media:
        columns |= {PROMPT_MEDIA: list(media.records), MEDIA_CONTENTS: media.array}
    advantages = np.ones(len(np.asarray(columns["tokens"])), np.float32)
    return {**columns, "prompt_tokens": tokens, "advantages": advantages, "reward": np.array([0.0, 1.0])}


def trained_log_probs(learner: Any, columns: dict[str, Column]) -> np.ndarray:
    """Return the trainer's log-probs of the model's tokens of all sequences, packed into one row."""
    tokens = learner.media_tokens
    names = [name for name in columns if name not in ("response_messages",)]
    group = check_group("g", columns, names, media=tokens)
    every, packed = range(len(group.lengths)), ("rollout_logprobs", "advantages")
    row = pack(group.sequences(every, packed, create(GRPOConfig()), 1.0, 0, media=GroupMediaReader(tokens)))
    (found,) = learner.log_probs([row])
    return np.asarray(found[row.loss_mask == 1])


def reference(whole: Any, tokens: np.ndarray, mask: np.ndarray, items: Sequence[Item]) -> np.ndarray:
    """Return log-probs of the tokens with mask 1 by transformers' own processors, positions and modules.

    A token of media that the model wrote is text, as it isn't for transformers.
    """
    model, seen = whole.model, seen_by_transformers(items)
    ids, asked = torch.from_numpy(tokens)[None].long(), torch.from_numpy(mask)[None] == 0
    modality = torch.zeros_like(ids)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        deep = [torch.zeros_like(embeddings)] * 3
        for kind, token, features, patches, grids in (
            (1, whole.config.image_token_id, model.get_image_features, "pixel_values", "image_grid_thw"),
            (2, whole.config.video_token_id, model.get_video_features, "pixel_values_videos", "video_grid_thw"),
        ):
            if patches not in seen:
                continue
            own = features(seen[patches], seen[grids], return_dict=True)
            is_own = (ids == token) & asked
            modality[is_own] = kind
            embeddings = embeddings.masked_scatter(is_own[..., None], torch.cat(list(own.pooler_output)))
            deep = [
                before.masked_scatter(is_own[..., None], torch.cat(list(rows)))
                for before, rows in zip(deep, own.deepstack_features, strict=True)
            ]
        all_grids = {name: seen[name] for name in ("image_grid_thw", "video_grid_thw") if name in seen}
        position, _ = model.get_rope_index(ids, mm_token_type_ids=modality, **all_grids)
        media = {"visual_pos_masks": modality != 0, "deepstack_visual_embeds": [rows[modality != 0] for rows in deep]}
        hidden = model.language_model(inputs_embeds=embeddings, position_ids=position, **media).last_hidden_state
        logits = whole.lm_head(hidden)[0, :-1]
    found = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return np.asarray(found[mask[1:] == 1])


@pytest.mark.parametrize(
    ("opens", "in_prompt"),
    [
        pytest.param(False, 0, id="a text"),
        pytest.param(False, 1, id="a prompt with an image"),
        pytest.param(True, 1, id="a prompt of its own"),
    ],
)
async def test_the_trainer_sees_what_the_engine_saw(
    folder: Path, harness: Harness, tmp_path: Path, alone: None, opens: bool, in_prompt: int
) -> None:
    config = config_of(GALLERY, media=["image"], settings={"folder": str(tmp_path), "opens": opens}, turn_tokens=6)
    tokenizer = PromptTokenizer.of_run(config, folder)
    example, tokens, media = asked([ASKED] * in_prompt, tokenizer)
    fleet = SeeingFleet(harness)
    async with fleet.serving() as engines, talks(config, tokenizer, engines) as conversations:
        held = [await conversations.hold(f"s{seed}", example, tokens.tolist(), 7, seed, media=media) for seed in (1, 2)]
        evaluations = EvaluationConversations(config.agent, {"e": conversations}, asyncio.Semaphore(2), ["e"])
        wanted = WantedWeights(1, 0, or_later=False)
        asked_for = evaluations.hold("e", example, 1, SamplingParams(max_new_tokens=90, seed=1), wanted, media)
        (evaluated,) = [one async for one in asked_for]
    assert [(one.failure, one.finish, one.turns, list(one.sequences)) for one in held] == [("", "env_done", 3, [0])] * 2
    columns = group_columns(held, tokens, media)
    shares = np.asarray(columns["shares_prompt"])
    assert shares.tolist() == [not opens] * 2
    pictures = [*[ASKED] * in_prompt, *SHOWN[not opens :], *[ASKED] * in_prompt]
    assert len(fleet.requests[2].media) == len(pictures), "an engine gets all images with every request"
    records: Any = columns["sequence_media"]
    whole = sum(one["bytes"] for own in records for one in own)
    assert whole == len(np.asarray(columns["sequence_contents"])), "the images of both samples are stored once"
    assert [one["bytes"] for one in records[1]] == [0] * len(records[1])

    # Rewards may open what the conversation showed, in training and in evaluations.
    prompt = {"text": "", "messages": example.messages}
    scored = samples_of_columns({**columns, "prompt": prompt})
    assert [[one.size for one in sample.images()] for sample in scored] == [[normal_size(one) for one in pictures]] * 2
    answered = {"messages": evaluated.messages}
    request = ScoreRequest(
        prompt=to_proto(example.messages), responses=[answered], media=media.by_hash() | dict(evaluated.media)
    )
    (sample,) = samples_of_request(request)
    assert len(sample.images()) == len(pictures)

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    bounds, lengths = np.cumsum([0, *columns["lengths"]]), len(tokens) * shares
    expected = []
    for index in range(2):
        own = slice(bounds[index], bounds[index + 1])
        before = tokens[: lengths[index]]
        mask = np.concatenate([np.zeros(len(before)), np.asarray(columns["loss_mask"])[own]])
        sequence = np.concatenate([before, np.asarray(columns["tokens"])[own]])
        expected.append(reference(model, sequence, mask, pictures))
    of_engine = np.asarray(columns["rollout_logprobs"])[np.asarray(columns["loss_mask"]) == 1]
    np.testing.assert_allclose(of_engine, np.concatenate(expected), atol=1e-5)

    learner = make_learner(Job(folder))
    np.testing.assert_allclose(trained_log_probs(learner, columns), np.concatenate(expected), atol=1e-5)
    # With two pictures of one size in each other's place the log-probs are others.
    for own in records:
        one, other = (own[len(own) - place] for place in (2 + in_prompt, 1 + in_prompt))
        one["sha256"], other["sha256"] = other["sha256"], one["sha256"]
    assert np.abs(trained_log_probs(learner, columns) - np.concatenate(expected)).max() > 1e-2
    leave_layout()


@pytest.mark.parametrize(
    "client", ["openai", "anthropic", "function", pytest.param("responses", marks=pytest.mark.night)]
)
async def test_the_trainer_sees_what_a_program_showed(folder: Path, harness: Harness, alone: None, client: str) -> None:
    """Images come from unmodified clients; a picture in the place of the prompt's begins a sequence of its own."""
    agent = {"media": ["image"], "turn_tokens": 6}
    tokenizer = PromptTokenizer.of_run(program_config(["none"], **agent), folder)
    example, tokens, media = asked([ASKED], tokenizer)
    shown = [SHOWN[0], SHOWN[2], OTHER]
    assert tokenizer.vision is not None
    metadata = {"pictures": [data_uri(encoded(one)) for one in shown], "image_token": tokenizer.vision.tokens.token}
    example = replace(example, metadata=metadata)
    fleet = SeeingFleet(harness)
    held: AbstractAsyncContextManager[Any] = (
        function_holding(tokenizer, fleet, "pictures", **agent)
        if client == "function"
        else program_holding(tokenizer, fleet, f"pictures_{client}", **agent)
    )
    async with held as its:
        (one,) = [await its.conversations.hold("s", example, tokens.tolist(), 7, 1, media=media)]
    turns = 4 + (client == "openai")  # which goes on with token ids
    assert (one.failure, one.finish, one.turns, one.reward) == ("", "env_done", turns, 1.0)
    columns = group_columns([one], tokens, media) | {"reward": np.array([1.0])}
    assert np.asarray(columns["shares_prompt"]).tolist() == [1, 0]
    own = [[ASKED, SHOWN[0], SHOWN[2], ASKED], [OTHER]]
    opened = [*own[0], OTHER]
    (scored,) = samples_of_columns({**columns, "prompt": {"text": "", "messages": example.messages}})[:1]
    assert [one.size for one in scored.images()] == [normal_size(one) for one in opened]

    lengths = np.asarray(columns["lengths"])
    sequences = np.split(np.asarray(columns["tokens"]), np.cumsum(lengths)[:-1])
    masks = np.split(np.asarray(columns["loss_mask"]), np.cumsum(lengths)[:-1])
    sequences[0], masks[0] = np.concatenate([tokens, sequences[0]]), np.concatenate([np.zeros(len(tokens)), masks[0]])
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    expected = np.concatenate([reference(model, *parts) for parts in zip(sequences, masks, own, strict=True)])
    of_engine = np.asarray(columns["rollout_logprobs"])[np.asarray(columns["loss_mask"]) == 1]
    np.testing.assert_allclose(of_engine, expected, atol=1e-5)
    learner = make_learner(Job(folder))
    np.testing.assert_allclose(trained_log_probs(learner, columns), expected, atol=1e-5)
    records: Any = columns["sequence_media"]
    first, second, _ = records[0]  # two pictures of one size
    first["sha256"], second["sha256"] = second["sha256"], first["sha256"]
    assert np.abs(trained_log_probs(learner, columns) - expected).max() > 1e-2
    leave_layout()


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Harness]]:
    folder = make_omni_model(tmp_path_factory.mktemp("hearing"))
    harness = Harness(folder)
    yield folder, harness
    harness.engine.stop()


@pytest.mark.parametrize(
    ("kind", "who"),
    [
        ("video", "environment"),
        pytest.param("video", "function", marks=pytest.mark.night),
        pytest.param("video", "openai", marks=pytest.mark.night),
        pytest.param("audio", "environment", marks=pytest.mark.night),
        pytest.param("audio", "function", marks=pytest.mark.night),
        pytest.param("audio", "openai", marks=pytest.mark.night),
        pytest.param("clip", "environment", marks=pytest.mark.night),
        pytest.param("clip", "openai", marks=pytest.mark.night),
    ],
)
async def test_the_trainer_gets_each_kind_as_the_engine_did(
    request: pytest.FixtureRequest, alone: None, kind: str, who: str
) -> None:
    """Video as transformers computes it, too. With two items of one size in each other's place log-probs are others.

    A "clip" is a video with its own sound.
    """
    names = ("folder", "harness") if kind == "video" else ("omni",)
    found = [request.getfixturevalue(name) for name in names]
    folder, harness = found if kind == "video" else found[0]
    of_item = "video" if kind == "clip" else kind
    agent = {"media": ["image", of_item], "turn_tokens": 6}
    environment = {"settings": {"kind": kind}}
    config = config_of(THEATRE, **agent, **environment)
    if kind == "clip":  # with few tokens: the processor's minimum is 128 for a frame
        own = config.data.model_copy(update={"video_sound": True, "max_video_tokens": 8})
        config = config.model_copy(update={"data": own})
    tokenizer = PromptTokenizer.of_run(config, folder)
    example, tokens, media = asked([_file_of(kind, 0)], tokenizer, of_item)
    shown = [data_uri(_file_of(kind, seed)) for seed in (2, 3)]
    example = replace(example, metadata={"kind": of_item, "parts": [_OPENAI[of_item](uri) for uri in shown]})
    fleet = SeeingFleet(harness)
    held: AbstractAsyncContextManager[Any]
    if who == "environment":
        async with fleet.serving() as engines, talks(config, tokenizer, engines) as conversations:
            one = await conversations.hold("s", example, tokens.tolist(), 7, 1, media=media)
    else:
        leads = function_holding if who == "function" else program_holding
        held = leads(tokenizer, fleet, "items" if who == "function" else "items_openai", **agent)
        async with held as its:
            one = await its.conversations.hold("s", example, tokens.tolist(), 7, 1, media=media)
    assert (one.failure, one.finish, list(one.sequences)) == ("", "env_done", [0])
    columns = group_columns([one], tokens, media) | {"reward": np.array([1.0])}
    of_engine = np.asarray(columns["rollout_logprobs"])[np.asarray(columns["loss_mask"]) == 1]
    assert len(of_engine) > 6
    learner = make_learner(Job(folder))
    np.testing.assert_allclose(trained_log_probs(learner, columns), of_engine, atol=1e-5)
    records: Any = columns["sequence_media"]
    of_kind = [record for record in records[0] if record["kind"] == of_item]
    assert {len(record["grid"]) for record in of_kind} == {{"video": 3, "audio": 1, "clip": 4}[kind]}
    if kind == "video":
        seeds: list[int | None] = [0, 2, 3] if who == "function" else [0, 2, 3, 0]
        if who == "environment":
            seeds = [0, 1, 2, None, 3, 0]
        items: list[Item] = [SHOWN[0] if seed is None else clip(4, 64, 64, seed) for seed in seeds]
        shares = bool(np.asarray(columns["shares_prompt"])[0])
        before = tokens if shares else tokens[:0]
        whole = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        mask = np.concatenate([np.zeros(len(before)), np.asarray(columns["loss_mask"])])
        sequence = np.concatenate([before, np.asarray(columns["tokens"])])
        np.testing.assert_allclose(of_engine, reference(whole, sequence, mask, items), atol=1e-5)
    (scored,) = samples_of_columns({**columns, "prompt": {"text": "", "messages": example.messages}})
    assert len(scored.sounds() if kind == "audio" else scored.videos()) == 1 + len(of_kind) - (who == "environment")
    first, second = of_kind[-3:-1] if who != "function" else of_kind[-2:]
    first["sha256"], second["sha256"] = second["sha256"], first["sha256"]
    assert np.abs(trained_log_probs(learner, columns) - of_engine).max() > 1e-3
    leave_layout()


def _file_of(kind: str, seed: int) -> bytes:
    if kind == "audio":
        return encoded_sound(sound(0.5, seed))
    return encoded_clip(clip(4, 64, 64, seed), 2.0, samples=sound(1.5, seed) if kind == "clip" else None)


_OPENAI: dict[str, Callable[[str], dict[str, Any]]] = {
    "video": lambda uri: {"type": "video_url", "video_url": {"url": uri}},
    "audio": lambda uri: {"type": "input_audio", "input_audio": {"data": uri.partition(",")[2], "format": "wav"}},
}
"""Return an item in the form that openai's client sends, by kind."""


WRONG = {
    "broken": "the environment's image messages[0].content[1] is a broken image",
    "large": "messages[0].content[1] is 7000 x 7000 pixels: at most 33,554,432 are decoded, make it smaller",
    "missing": "content[1] is '/nowhere/picture.png', which is no file here",
    "fetched": "content[1] is a URL of example.com: relaxd fetches no media",
    "video": 'messages[0].content[1] is of type video, but agent.media doesn\'t name it: add "video"',
    "": "content[1] has no item",
}


async def test_what_cannot_be_shown_fails_the_conversation_by_name(folder: Path, tmp_path: Path) -> None:
    config = config_of("tests.integration.agent.galleries:Wrong", media=["image"])
    byte_tokenizer().save_pretrained(tmp_path)  # the scripted engine's
    tokenizer = PromptTokenizer(tmp_path, vision=read_vision(folder))
    fleet = Fleet([*WRONG, "broken"], versions=[3])
    async with fleet.serving() as engines, talks(config, tokenizer, engines) as conversations:
        for number, (what, complaint) in enumerate(WRONG.items()):
            held = await conversations.hold(f"s{number}", Example(f"Show {number}!"), [1], 7, 8)
            assert held.finish == "env_failed"
            assert complaint in held.failure, what
            assert "secret" not in held.failure
        tokenizer.vision = None
        held = await conversations.hold("s", Example("Show!"), [1], 7, 8)
    assert held.failure.endswith(
        'messages[0].content[1] is of type image, but agent.media doesn\'t name it: add "image"'
    )


@pytest.mark.parametrize(
    ("who", "limit", "count"), [("environment", 46_000, 6), ("function", 27_000, 3), ("program", 30_000, 3)]
)
async def test_media_larger_than_a_message_fail_the_conversation_by_name(
    folder: Path, harness: Harness, tmp_path: Path, who: str, limit: int, count: int
) -> None:
    """Each of the three requests has all media so far; only the third is above the limit."""
    config = config_of(GALLERY, media=["image"], settings={"folder": str(tmp_path), "opens": True}, turn_tokens=6)
    tokenizer = PromptTokenizer.of_run(config, folder)
    fleet = SeeingFleet(harness)
    fleet.max_message_bytes = limit
    example, tokens, media = asked([ASKED], tokenizer)
    parts = [{"type": "image_url", "image_url": {"url": data_uri(encoded(SHOWN[place]))}} for place in (1, 2)]
    example = replace(example, metadata={"kind": "image", "parts": parts})
    async with AsyncExitStack() as stack:
        if who == "environment":
            engines = await stack.enter_async_context(fleet.serving())
            conversations: Any = await stack.enter_async_context(talks(config, tokenizer, engines))
        else:
            leads, name = (function_holding, "items") if who == "function" else (program_holding, "items_openai")
            holding: AbstractAsyncContextManager[Any] = leads(tokenizer, fleet, name, media=["image"], turn_tokens=6)
            conversations = (await stack.enter_async_context(holding)).conversations
        held = await conversations.hold("s", example, tokens.tolist(), 7, 8, media=media)
    first, second = fleet.requests
    assert second.media_contents.startswith(first.media_contents)
    assert (held.finish, held.turns) == ("env_failed", 2)
    assert f"of them in {count} images, videos and sounds: show fewer or smaller ones" in held.failure
    assert "larger than max" in held.failure
    seen = len(held.sequences[0].media) + len(media.records) * held.sequences[0].shares_prompt
    assert seen == len(second.media), "those that the model didn't come to see aren't kept"


async def test_a_service_may_show_more_than_grpcs_default_of_4_mib(folder: Path, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)  # the scripted engine's
    tokenizer = PromptTokenizer(tmp_path, vision=read_vision(folder))
    fleet = Fleet(["look"], versions=[3])
    async with (
        service_of("tests.integration.agent.galleries:Large") as address,
        fleet.serving() as engines,
        talks(config_of(address, media=["image"]), tokenizer, engines) as conversations,
    ):
        held = await conversations.hold("s", Example("Show!"), [1], 7, 8)
    assert (held.finish, held.failure) == ("env_done", "")


async def test_media_of_more_than_64_mib_reach_the_engine() -> None:
    fleet = Fleet(["seen"], versions=[3])
    contents = bytes(65 << 20)
    media = PromptMedia(({"kind": "image", "sha256": "0" * 64, "grid": [1, 2, 2], "bytes": len(contents)},), contents)
    async with fleet.serving() as engines:
        reply = await engines.generate(EngineSession("s"), [1], SamplingParams(max_new_tokens=9), lambda: 60.0, media)
    assert reply.text == "seen"
    assert len(fleet.requests[0].media_contents) == len(contents)


@pytest.mark.parametrize(("tokens", "seen", "finish"), [(90, 2, "turns"), (20, 0, "budget")])
async def test_images_that_the_model_does_not_come_to_see_are_not_stored(
    folder: Path, harness: Harness, tmp_path: Path, tokens: int, seen: int, finish: str
) -> None:
    config = config_of(GALLERY, media=["image"], settings={"folder": str(tmp_path)}, max_turns=2, turn_tokens=6)
    tokenizer = PromptTokenizer.of_run(config, folder)
    fleet = SeeingFleet(harness)
    async with fleet.serving() as engines, talks(config, tokenizer, engines) as conversations:
        example = Example(
            [{"role": "user", "content": [{"type": "text", "text": "Show!"}]}], sampling={"max_new_tokens": tokens}
        )
        held = await conversations.hold("s", example, [1], 7, 8)
    assert held.finish == finish
    assert len(held.sequences[0].media) == seen
    parts = [part for one in held.messages if isinstance(one["content"], list) for part in one["content"]]
    assert len([part for part in parts if part["type"] == "image"]) == seen
    assert "<image>" in shown_text(held.messages[-1]["content"])
