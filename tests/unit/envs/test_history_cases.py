"""Special cases of conversations: other stop tokens, observations with control tokens, odd templates."""

import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from relaxd.data.examples import Example, Message
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.data.vision import VisionModel
from relaxd.envs.environment import ToolCall
from relaxd.envs.replies import ParsedReply
from relaxd.envs.token_history import CannotContinue, TokenHistory
from relaxd.media.images import ImageRule
from relaxd.media.media_tokens import MediaTokens, lay_out
from relaxd.media.prompt_media import StoredMedia
from relaxd.models import DataError
from tests.kit.cases import each
from tests.kit.templates import TEMPLATES, template_tokenizer
from tests.kit.tokenizer import write_tokenizer

ASKED = Example([{"role": "user", "content": "2+3?"}])
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}assistant:"
"""A template without special tokens."""
CALL = ParsedReply(calls=(ToolCall("add", {"a": 2}, id="call00001"),)).message


def reply(
    history: TokenHistory, tokenizer: PromptTokenizer, text: str, message: Message | None = None, **given: Any
) -> None:
    tokens = tokenizer.encode_text(text)
    message = message or {"role": "assistant", "content": text}
    history.add_reply(tokens, [-1.0] * len(tokens), [3] * len(tokens), message, **given)


def tail(history: TokenHistory, *messages: Message) -> list[int]:
    """Add messages and return their tokens."""
    count = history.add_messages(messages)
    return history.context[-count:]


def added(history: TokenHistory, tokenizer: PromptTokenizer, *messages: Message) -> str:
    """Add messages and return the text of their tokens."""
    return tokenizer.decode(tail(history, *messages), special=True)


@pytest.fixture
def chatml(tmp_path: Path) -> PromptTokenizer:
    return PromptTokenizer(write_tokenizer(tmp_path))


def custom(tmp_path: Path, template: str) -> PromptTokenizer:
    return PromptTokenizer(write_tokenizer(tmp_path), template)


# --- the end of a reply -----------------------------------------------------------------------------------------------


def test_a_stop_token_that_the_template_has_otherwise_is_not_trained_on() -> None:
    tokenizer = template_tokenizer("gptoss")
    history = TokenHistory(tokenizer, ASKED)
    reply(history, tokenizer, "<|channel|>final<|message|>5<|return|>")
    assert history.columns["loss_mask"].all()
    before = len(history.columns["tokens"])
    text = added(history, tokenizer, {"role": "user", "content": "Sure?"})
    assert text == "<|end|><|start|>user<|message|>Sure?<|end|><|start|>assistant"
    assert "<|return|>" not in tokenizer.decode(history.context, special=True)
    assert history.columns["loss_mask"].tolist() == [1] * (before - 1) + [0] * (
        len(history.columns["tokens"]) - before + 1
    )
    assert history.columns["logprobs"].tolist() == [-float(mask) for mask in history.columns["loss_mask"]]


@pytest.mark.parametrize(
    ("said", "stopped", "after"),
    [
        ("5<|im_end|>", True, "\n<|im_start|>user\n!<|im_end|>\n<|im_start|>assistant\n"),
        ("5", False, "<|im_end|>\n<|im_start|>user\n!<|im_end|>\n<|im_start|>assistant\n"),
        ("5<|im_start|>", False, "<|im_end|>\n<|im_start|>user\n!<|im_end|>\n<|im_start|>assistant\n"),
        ("5</answer>", True, "<|im_end|>\n<|im_start|>user\n!<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_turn_is_closed_once(said: str, stopped: bool, after: str, chatml: PromptTokenizer) -> None:
    history = TokenHistory(chatml, ASKED)
    reply(history, chatml, said, stopped=stopped)
    assert added(history, chatml, {"role": "user", "content": "!"}) == after


def test_a_stop_token_stays_where_the_template_writes_no_special_token(tmp_path: Path) -> None:
    tokenizer = custom(tmp_path, PLAIN)
    history = TokenHistory(tokenizer, ASKED)
    reply(history, tokenizer, " 5<|im_end|>")
    assert added(history, tokenizer, {"role": "user", "content": "!"}) == ";user: !;assistant:"
    assert tokenizer.decode(history.context, special=True).endswith("assistant: 5<|im_end|>;user: !;assistant:")


def test_a_call_that_was_cut_off_after_its_end_is_closed() -> None:
    tokenizer = template_tokenizer("qwen3")
    history = TokenHistory(tokenizer, ASKED, TOOLS)
    reply(history, tokenizer, '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', CALL, stopped=False)
    text = added(history, tokenizer, {"role": "tool", "content": "5"})
    assert text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>")


# --- messages of the environment --------------------------------------------------------------------------------------


@each("name", TEMPLATES)
def test_control_tokens_in_observations_are_plain_text(name: str) -> None:
    tokenizer = template_tokenizer(name)
    controls = [one.content for one in tokenizer.added_tokens.values()]
    hostile = " and ".join(controls)
    tails = []
    for text in ("fine", f"fine {hostile} fine"):
        history = TokenHistory(tokenizer, ASKED)
        reply(history, tokenizer, "5")
        tokens = tail(history, {"role": "user", "content": text})
        assert text in tokenizer.decode(tokens, special=True)
        tails.append([token for token in tokens if token in tokenizer.added_tokens])
    assert tails[0] == tails[1]


def test_control_tokens_in_names_and_opening_messages_are_plain_text() -> None:
    tokenizer = template_tokenizer("gptoss")
    name = "add<|end|>"
    history = TokenHistory(tokenizer, ASKED, TOOLS, opened=[{"role": "user", "content": "<|end|> <|start|>"}])
    end = tokenizer.encode_text("<|end|>")[0]
    assert "<|end|> <|start|>" in tokenizer.decode(history.prompt_tokens, special=True)
    assert history.prompt_tokens.count(end) == TokenHistory(tokenizer, ASKED, TOOLS).prompt_tokens.count(end) + 1
    message = ParsedReply(calls=(ToolCall(name, {}, id="call00001"),)).message
    reply(history, tokenizer, "<|call|>", message)
    tokens = tail(history, {"role": "tool", "name": name, "content": "5"})
    assert tokens.count(end) == 1
    assert "functions.add<|end|> to=assistant" in tokenizer.decode(tokens, special=True)


def test_opening_messages_and_tools_are_part_of_the_prompt() -> None:
    tokenizer = template_tokenizer("qwen3")
    opened = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
    history = TokenHistory(tokenizer, ASKED, TOOLS, opened=opened)
    whole = Example([*ASKED.messages, {"role": "user", "content": "a b"}], tools=TOOLS)
    assert history.prompt_tokens == tokenizer.encode([whole])[0].tolist()
    assert (
        TokenHistory(tokenizer, Example("2+3?", tools=TOOLS)).prompt_tokens
        != TokenHistory(tokenizer, ASKED).prompt_tokens
    )


IMAGE = {"type": "image"}


def seeing(name: str) -> PromptTokenizer:
    """Return the tokenizer of a model that sees, whose image token is <|image_pad|>."""
    tokenizer = copy(template_tokenizer(name))
    (token,) = tokenizer.encode_text("<|image_pad|>")
    tokenizer.vision = VisionModel(ImageRule(16, 2, 1024, 65536), MediaTokens(token, 2), (0.5,) * 3, (0.5,) * 3, 2)
    return tokenizer


def test_images_have_their_tokens_where_the_template_writes_them() -> None:
    """With Qwen3-VL's own template, in the prompt and in a tool's result that also names the image's token."""
    tokenizer = seeing("qwen3_vl")
    media = [StoredMedia("a", (1, 4, 4), b"a"), StoredMedia("b", (1, 4, 6), b"b"), StoredMedia("c", (1, 2, 2), b"c")]
    asked = Example([{"role": "user", "content": [IMAGE, {"type": "text", "text": "Zoom!"}]}])
    history = TokenHistory(tokenizer, asked, TOOLS, media=media[:1])
    reply(history, tokenizer, "<|image_pad|> then<|im_end|>")
    said = [{"type": "text", "text": "<|image_pad|>: "}, IMAGE, IMAGE]
    history.add_messages([{"role": "tool", "content": said}], media[1:])
    context, pad = history.context, tokenizer.encode_text("<|image_pad|>")
    assert [item.sha256 for item in history.media] == ["a", "b", "c"]
    for item, count in zip(history.media, (4, 6, 1), strict=True):
        assert item.begin is not None
        own = context[item.begin - 1 : item.begin + count + 1]
        assert tokenizer.decode(own, special=True) == f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
    assert context.count(pad[0]) == 4 + 6 + 1 + 1  # and the one that the model wrote
    assert history.media_to_last_reply == history.media[:1]
    assert tokenizer.decode(context).count("<|image_pad|>: ") == 1


def test_a_video_has_the_texts_of_its_times_and_begins_at_its_first_frame() -> None:
    tokenizer = seeing("qwen3_vl")
    assert tokenizer.vision is not None
    (image, video), (start, end) = (
        map(tokenizer.encode_text, ("<|image_pad|>", "<|video_pad|>")),
        map(tokenizer.encode_text, ("<|vision_start|>", "<|vision_end|>")),
    )
    tokenizer.vision = replace(
        tokenizer.vision, tokens=MediaTokens(image[0], 2, video=video[0], start=start[0], end=end[0])
    )
    history = TokenHistory(tokenizer, ASKED, [])
    reply(history, tokenizer, "<|video_pad|>?<|im_end|>")
    clip = StoredMedia("a", (2, 4, 4), b"a", kind="video", times=(0.25, 1.25))
    history.add_messages(
        [{"role": "user", "content": [{"type": "video"}, {"type": "image"}]}], [clip, StoredMedia("b", (1, 2, 2), b"b")]
    )
    frame = f"<|vision_start|>{'<|video_pad|>' * 4}<|vision_end|>"
    shown = f"<|vision_start|><0.2 seconds>{frame}<1.2 seconds>{frame}<|vision_end|>"
    assert shown in tokenizer.decode(history.context, special=True)
    own, other = history.media
    assert history.context[own.begin - 1 : own.begin + 4] == [*start, *video * 4]
    assert history.context[other.begin - 1 : other.begin + 1] == [*start, *image]
    layout = lay_out(history.context, [own.grid, other.grid], tokenizer.vision.tokens, begins=[own.begin, other.begin])
    assert np.count_nonzero(layout.modality) == 9


def test_a_template_that_leaves_images_out_cannot_go_on() -> None:
    tokenizer = seeing("qwen3_vl")
    history = TokenHistory(tokenizer, ASKED, [])
    reply(history, tokenizer, "Well.<|im_end|>")
    item = StoredMedia("a", (1, 4, 4), b"a")
    with pytest.raises(CannotContinue, match="a conversation has 0 image tokens"):
        history.add_messages([{"role": "user", "content": "no part"}], [item])
    assert history.media == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "smell", "uri": "x"}]}, "a message of user has a part of type 'smell'"),
        ({"role": "tool", "content": {"a": 1}}, "the content of a message of tool is {'a': 1}: it must be text"),
        ({"role": "tool", "content": "\ud83d"}, r"a message of tool has '\ud83d', half of a character"),
        ({"role": "assistant", "content": "5"}, "the last message of an observation is the assistant's"),
    ],
)
def test_messages_that_cannot_be_tokens_are_refused(message: Message, problem: str, chatml: PromptTokenizer) -> None:
    history = TokenHistory(chatml, ASKED)
    reply(history, chatml, "5<|im_end|>")
    before = history.context
    with pytest.raises(CannotContinue, match=re.escape(problem)):
        history.add_messages([message])
    assert history.context == before
    history.add_messages([{"role": "user", "content": "!"}])


# --- templates --------------------------------------------------------------------------------------------------------

MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}[TOOLS]{{ tools }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


def test_tools_that_a_template_moves_to_the_last_question_are_there_once(tmp_path: Path) -> None:
    tokenizer = custom(tmp_path, MISTRAL)
    history = TokenHistory(tokenizer, ASKED, TOOLS)
    reply(history, tokenizer, "5<|im_end|>")
    assert added(history, tokenizer, {"role": "user", "content": "!"}) == "[INST]![/INST]"


def test_the_clock_of_a_template_stands_still(tmp_path: Path) -> None:
    tokenizer = custom(
        tmp_path, "{% for m in messages %}{{ m.content }}|{{ strftime_now('%H:%M:%S.%f') }}|{% endfor %}"
    )
    history = TokenHistory(tokenizer, ASKED)
    reply(history, tokenizer, "5")
    history.add_messages([{"role": "user", "content": "!"}])
    times = re.findall(r"\d\d:\d\d:\d\d\.\d{6}", tokenizer.decode(history.context))
    assert len(times) == 3
    assert len(set(times)) == 1


def test_the_arguments_of_calls_are_text_where_a_template_wants_it(tmp_path: Path) -> None:
    of_calls = "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}<|im_end|>{% endfor %}"
    tokenizer = custom(tmp_path, "{% for m in messages %}" + of_calls + "{{ m.content or '' }};{% endfor %}")
    history = TokenHistory(tokenizer, ASKED)
    for _ in range(2):
        reply(history, tokenizer, 'add{"a": 2}', CALL)
        assert added(history, tokenizer, {"role": "tool", "content": "5"}) == "<|im_end|>;5;"


def test_the_end_of_calls_is_not_written_twice(tmp_path: Path) -> None:
    of_calls = "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}<|im_start|>{% endfor %}"
    tokenizer = custom(tmp_path, "{% for m in messages %}" + of_calls + "{{ m.content }}{% endfor %}")
    history = TokenHistory(tokenizer, ASKED)
    reply(history, tokenizer, '{"a": 2}<|im_start|><|im_end|>', CALL)
    assert added(history, tokenizer, {"role": "tool", "content": "5"}) == "5"


def test_earlier_calls_that_a_template_refuses_are_left_out_of_the_render() -> None:
    tokenizer = template_tokenizer("llama3_1")
    history = TokenHistory(tokenizer, ASKED, TOOLS)
    two = ParsedReply(calls=(ToolCall("add", {}, id="a"), ToolCall("add", {}, id="b"))).message
    for message in (two, CALL):
        reply(history, tokenizer, "{}<|eot_id|>", message)
        text = added(history, tokenizer, {"role": "tool", "content": "5"})
        assert text.startswith("<|start_header_id|>ipython<|end_header_id|>")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content }}", "writes the model's message 0 times"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "writes the model's message 2 times"),
        (
            "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('no turns') }}{% endif %}",
            "no turns",
        ),
    ],
)
def test_templates_that_cannot_continue_say_why(template: str, problem: str, tmp_path: Path) -> None:
    tokenizer = custom(tmp_path, template)
    history = TokenHistory(tokenizer, ASKED)
    reply(history, tokenizer, "5<|im_end|>")
    with pytest.raises(CannotContinue, match=problem):
        history.add_messages([{"role": "user", "content": "!"}])


def test_a_prompt_that_ends_within_a_reply_is_continued() -> None:
    tokenizer = template_tokenizer("gemma")  # it refuses two messages of the assistant that follow each other
    history = TokenHistory(tokenizer, Example([*ASKED.messages, {"role": "assistant", "content": "It is"}]))
    assert tokenizer.decode(history.context, special=True).endswith("model\nIt is")
    reply(history, tokenizer, " 5<end_of_turn>")
    text = added(history, tokenizer, {"role": "user", "content": "!"})
    assert text == "\n<start_of_turn>user\n!<end_of_turn>\n<start_of_turn>model\n"


def test_no_space_comes_before_messages(tmp_path: Path) -> None:
    """Tokenizers of sentencepiece put a space before a text, which the middle of a conversation must not get."""
    write_tokenizer(tmp_path)
    letters = {letter: number for number, letter in enumerate("\u2581;!:<|_>abcdefghijklmnopqrstuvwxyz0123456789?+")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = PromptTokenizer(tmp_path, PLAIN)
    assert loaded.decode(loaded.encode_text("a")) == " a"
    text = loaded.decode(TokenHistory(loaded, ASKED, opened=[{"role": "user", "content": "<|im_end|>"}]).prompt_tokens)
    assert text == " user: 2+3?;user: <|im_end|>;assistant:"
    for end in ("", "<|im_end|>"):
        history = TokenHistory(loaded, ASKED)
        reply(history, loaded, f"5{end}")
        assert added(history, loaded, {"role": "user", "content": "!"}) == ";user: !;assistant:"


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"model\.chat_template is not set, and the model has none"):
        TokenHistory(PromptTokenizer(folder), ASKED)


def test_replies_and_messages_take_turns(chatml: PromptTokenizer) -> None:
    history = TokenHistory(chatml, ASKED)
    with pytest.raises(ValueError, match="add_messages needs a reply before"):
        history.add_messages([{"role": "user", "content": "!"}])
    with pytest.raises(ValueError, match="2 tokens, 1 logprobs and 2 versions"):
        history.add_reply([1, 2], [0.0], [0, 0], {"role": "assistant"})
    with pytest.raises(ValueError, match="0 tokens"):
        history.add_reply([], [], [], {"role": "assistant"})
    reply(history, chatml, "5")
    with pytest.raises(ValueError, match="two replies follow each other"):
        reply(history, chatml, "5")
