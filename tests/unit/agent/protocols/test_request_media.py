"""Media in requests: the forms that each protocol has for them, and what is refused by name."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from relaxd.data.vision import read_vision
from relaxd.media.images import normalise_image
from relaxd.media.prompt_media import StoredMedia, reference_part
from relaxd.media.sources import data_uri
from relaxd.media.videos import normalise_video
from services.agent.chat_requests import BadRequest, SessionMedia, StoredMessages, new_messages
from services.agent.protocols.anthropic_messages import ANTHROPIC_MESSAGES
from services.agent.protocols.chat_completions import CHAT_COMPLETIONS
from services.agent.protocols.openai_responses import OPENAI_RESPONSES
from services.agent.protocols.protocol import Protocol, read_object
from tests.kit.sounds import WITH_SOUND, encoded_sound, sound, write_omni_model
from tests.kit.vision import WITH_VIDEO, clip, encoded, encoded_clip, picture, write_vision_model

FILE = encoded(picture(64, 96))
URI, DATA = data_uri(FILE), base64.b64encode(FILE).decode()
CHAT = {"type": "image_url", "image_url": {"url": URI, "detail": "low"}}
RESPONSES = {"type": "input_image", "image_url": URI, "detail": "auto"}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
TEXT = {"type": "text", "text": "What?"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [ANTHROPIC, TEXT]}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
OUTPUT = {
    "type": "function_call_output",
    "call_id": "c",
    "output": [RESPONSES, {"type": "input_text", "text": "What?"}],
}


@pytest.fixture
def media(tmp_path: Path) -> SessionMedia:
    return SessionMedia(read_vision(write_vision_model(tmp_path), WITH_VIDEO))


def read(protocol: Protocol, media: SessionMedia, **asked: Any) -> Any:
    return protocol.read(read_object(json.dumps(asked).encode()), StoredMessages(), media)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


@pytest.mark.parametrize(
    ("protocol", "asked"),
    [
        (CHAT_COMPLETIONS, {"messages": [user(CHAT, {"type": "text", "text": "Wh"}, {"type": "text", "text": "at?"})]}),
        (CHAT_COMPLETIONS, {"messages": [user({"type": "image", "image": URI}, TEXT)]}),
        (CHAT_COMPLETIONS, {"messages": [{"role": "tool", "tool_call_id": "c", "content": [CHAT, TEXT]}]}),
        (OPENAI_RESPONSES, {"input": [user(RESPONSES, {"type": "input_text", "text": "What?"})]}),
        (OPENAI_RESPONSES, {"input": [OUTPUT]}),
        (ANTHROPIC_MESSAGES, {"messages": [user(ANTHROPIC, TEXT)]}),
        (ANTHROPIC_MESSAGES, {"messages": [user(RESULT)]}),
    ],
)
def test_images_stand_in_messages_by_reference(media: SessionMedia, protocol: Protocol, asked: Any) -> None:
    (message,) = read(protocol, media, **asked).messages
    assert media.vision is not None
    normal = StoredMedia.of(normalise_image(FILE, media.vision.rule))
    assert message["content"] == [reference_part(normal), TEXT]
    assert media.of([message, {"role": "user", "content": "x"}]) == [normal]


@pytest.mark.parametrize("form", ["file", "frames", "video_url"])
def test_videos_are_read_as_the_data_are(media: SessionMedia, form: str) -> None:
    frames = clip(4, 64, 96)
    source = [data_uri(encoded(one)) for one in frames] if form == "frames" else data_uri(encoded_clip(frames, 2.0))
    part = (
        {"type": "video_url", "video_url": {"url": source}}
        if form == "video_url"
        else {"type": "video", "video": source}
    )
    (message,) = read(CHAT_COMPLETIONS, media, messages=[user(part, TEXT)]).messages
    (item,) = media.of([message])
    assert media.vision is not None
    assert item == StoredMedia.of(normalise_video([encoded(one) for one in frames], media.vision.video))
    assert message["content"] == [reference_part(item), TEXT]


def test_sounds_come_as_input_audio(tmp_path: Path) -> None:
    heard = SessionMedia(read_vision(write_omni_model(tmp_path), WITH_SOUND))
    wav = encoded_sound(sound(0.5))
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
    url = {"type": "audio_url", "audio_url": {"url": data_uri(wav)}}
    for protocol, asked in (
        (CHAT_COMPLETIONS, {"messages": [user(part)]}),
        (CHAT_COMPLETIONS, {"messages": [user(url)]}),
        (OPENAI_RESPONSES, {"input": [user(part)]}),
        (OPENAI_RESPONSES, {"input": [{**OUTPUT, "output": [part]}]}),
    ):
        (message,) = read(protocol, heard, **asked).messages
        (item,) = heard.of([message])
        assert (item.kind, item.content) == ("audio", wav)


def test_an_image_of_the_prompt_is_taken_as_it_is(media: SessionMedia) -> None:
    """Its normal form isn't resized again, and another file of the same pixels is the same image."""
    own = StoredMedia("0" * 64, (1, 4, 6), FILE)
    seen = SessionMedia(media.vision, [own])
    (message,) = read(CHAT_COMPLETIONS, seen, messages=[user(CHAT)]).messages
    assert seen.of([message]) == [own]
    (first, second) = (
        read(CHAT_COMPLETIONS, media, messages=[user({"type": "image", "image": data_uri(file)})]).messages
        for file in (FILE, encoded(picture(64, 96), compress_level=0))
    )
    assert first == second


def test_a_history_with_another_image_is_another_one(media: SessionMedia) -> None:
    other = {"type": "image", "image": data_uri(encoded(picture(64, 96, 1)))}
    said = {"role": "assistant", "content": "A dog."}
    known, asked = (read(CHAT_COMPLETIONS, media, messages=[user(one), said, user(TEXT)]) for one in (CHAT, other))
    with pytest.raises(BadRequest, match=r"messages\[0\] isn't as it was: its content is .*, and was "):
        new_messages(known.messages[:2], asked.messages)


def anthropic(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


UNSENT, BROKEN = "has no image in it: send its content", "is a data URI whose base64 is damaged"


@pytest.mark.parametrize(
    ("protocol", "part", "problem"),
    [
        (CHAT_COMPLETIONS, {"type": "image_url", "image_url": {"url": "https://u:secret@example.com/a.png"}}, UNSENT),
        (CHAT_COMPLETIONS, {"type": "image_url", "image_url": {"url": "/etc/hosts"}}, UNSENT),
        (CHAT_COMPLETIONS, {"type": "image_url"}, UNSENT),
        (CHAT_COMPLETIONS, {"type": "image", "image": "data:image/png;base64,?"}, BROKEN),
        (CHAT_COMPLETIONS, {"type": "image", "image": data_uri(FILE[:300])}, "is a broken image"),
        (CHAT_COMPLETIONS, {"type": "image", "image": data_uri(encoded(picture(4, 9)))}, "must have at least 8"),
        (CHAT_COMPLETIONS, {"type": "video_url", "video_url": {"url": URI}}, "is no video in a format that is read"),
        (CHAT_COMPLETIONS, {"type": "video", "video": ["/etc/hosts"]}, "has no video in it: send its content"),
        (CHAT_COMPLETIONS, {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}, "is of type audio"),
        (OPENAI_RESPONSES, {"type": "input_video", "video_url": URI}, "only parts of type input_text or output_text"),
        (OPENAI_RESPONSES, {"type": "input_video", "video_url": URI}, "are; send video and sound through chat compl"),
        (
            OPENAI_RESPONSES,
            {"type": "input_audio", "input_audio": {"format": "wav"}},
            "has input_audio.data = null: it",
        ),
        (CHAT_COMPLETIONS, {"type": "input_audio", "input_audio": {"data": ""}}, 'has input_audio.data = "": it must'),
        (CHAT_COMPLETIONS, {"type": "input_audio", "input_audio": {"data": DATA}}, "has input_audio.format = null: it"),
        (OPENAI_RESPONSES, {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}, "is of type audio"),
        (OPENAI_RESPONSES, {"type": "input_audio"}, "has no audio in it: send its content"),
        (ANTHROPIC_MESSAGES, {"type": "video", "source": {}}, "are; send video and sound through chat completions"),
        (CHAT_COMPLETIONS, {"type": ["image"]}, "isn't supported: only parts of type"),
        (OPENAI_RESPONSES, {"type": "input_image", "image_url": "https://example.com/a.png"}, UNSENT),
        (OPENAI_RESPONSES, {"type": "input_image", "file_id": "file-1"}, UNSENT),
        (ANTHROPIC_MESSAGES, anthropic(type="url", url="https://example.com/a.png"), UNSENT),
        (ANTHROPIC_MESSAGES, anthropic(type="file", file_id="file_1"), UNSENT),
        (ANTHROPIC_MESSAGES, anthropic(type="base64", media_type="image/png", data="?"), BROKEN),
    ],
)
def test_what_is_no_image_is_refused_by_name(
    media: SessionMedia, protocol: Protocol, part: dict[str, Any], problem: str
) -> None:
    name = "input" if protocol is OPENAI_RESPONSES else "messages"
    with pytest.raises(BadRequest) as caught:
        read(protocol, media, **{name: [user(part)]})
    place = f"{name}[0].content[0]"
    assert (caught.value.status, caught.value.param) == (400, place)
    assert str(caught.value).startswith(f"{place} ")
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_only_video_and_sound_are_sent_elsewhere(media: SessionMedia) -> None:
    with pytest.raises(BadRequest, match=r"only parts of type .* or input_image or input_audio are$"):
        read(OPENAI_RESPONSES, media, input=[user({"type": "input_file", "file_data": URI})])


@pytest.mark.parametrize(("protocol", "part"), [(CHAT_COMPLETIONS, CHAT), (ANTHROPIC_MESSAGES, ANTHROPIC)])
def test_the_assistant_and_runs_without_images_show_none(
    media: SessionMedia, protocol: Protocol, part: dict[str, Any]
) -> None:
    with pytest.raises(
        BadRequest, match=r"messages\[0\]\.content\[0\] .* isn't supported: only parts of type text are"
    ):
        read(protocol, media, messages=[{"role": "assistant", "content": [part]}, user(TEXT)])
    with pytest.raises(BadRequest, match=r'\[0\] is of type image, but agent.media doesn.t name it: add "image"'):
        read(protocol, SessionMedia(), messages=[user(part)])
