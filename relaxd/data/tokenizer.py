"""Tokenising of prompts with the model's tokenizer, without transformers."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.decoders import DecodeStream

from relaxd.config import RunConfig
from relaxd.data.examples import Example
from relaxd.data.templating import load_chat_template
from relaxd.data.vision import VisionModel, measure, read_vision, unseen
from relaxd.media.kinds import MediaSize, NormalMedia
from relaxd.media.media_tokens import expand
from relaxd.media.sources import MediaError
from relaxd.models import DataError

MEASURING_THREADS = 8
"""Maximum number of threads that read prompts' media. Fetching media is mostly waiting."""
LONG_TEXT = 20_000
"""Minimum length, in characters, of a text whose tokenisation is slow enough to release Python's lock to other
threads."""
NFC_GROWTH = 3
"""Maximum factor by which Unicode's normal form C lengthens a text in UTF-8, in bytes (Unicode FAQ, Normalization)."""
SPLITS = {"ByteLevel", "Digits", "Punctuation", "Split"}
"""Types of pre-tokenisation steps that add nothing to a text."""


@lru_cache(maxsize=4)
def _read(file: str, changed_ns: int, size: int) -> Tokenizer:
    """Load a tokenizer. The cache is needed because tokenizers 0.23 never frees a tokenizer's word cache of tens of
    megabytes."""
    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PromptTokenizer:
    """Renders prompts with a model's chat template, and tokenises them."""

    vision: VisionModel | None = None
    """Rules by which the model takes images, videos and sounds; None if prompts have no media."""

    def __init__(
        self,
        folder: Path,
        chat_template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = True,
        vision: VisionModel | None = None,
    ) -> None:
        """Load a model's tokenizer and chat template.

        Args:
            folder: the model's folder.
            chat_template: text or path of a template to use instead of the model's.
            arguments: variables for the template.
            continue_final: True if prompts may end in a message of the assistant, which the model continues.
            vision: the model's rules for media, if prompts may have some.

        Raises:
            DataError: the tokenizer or the template is missing or invalid.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError("model.path", f"the model folder {folder} has no tokenizer: tokenizer.json is missing")
        stamp = file.stat()
        try:
            self._tokenizer = _read(str(file), stamp.st_mtime_ns, stamp.st_size)
        except Exception as error:  # the Rust binding raises plain Exception
            raise DataError("model.path", f"{file} is not a tokenizer: {error}") from error
        self.template = load_chat_template(folder, chat_template, arguments)
        """Chat template for prompts; None if neither the model nor `chat_template` gives one."""
        self._continue_final = continue_final
        self._growth = _growth(self._tokenizer)
        self.vision = vision

    @classmethod
    def of_run(cls, config: RunConfig, folder: Path) -> "PromptTokenizer":
        """Load the tokenizer of a run whose model is in `folder`. Raises DataError if the tokenizer, the chat
        template or the model's rules for media can't be used."""
        model, data = config.model, config.data
        return cls(
            folder,
            model.chat_template,
            model.chat_template_arguments,
            continue_final=data.continue_final_message,
            vision=read_vision(folder, data, config.media_kinds) if config.has_media else None,
        )

    def encode(self, examples: Sequence[Example]) -> list[np.ndarray]:
        """Return the token ids of prompts, including those of their media: an array int32 [P] for each prompt.

        Raises DataError if the template rejects a prompt, a conversation has no template, or a prompt has no tokens,
        isn't valid Unicode, or has media that can't be used.
        """
        return self._with_media(examples, self._encode(examples, [self.render(example) for example in examples]))

    def encode_seen(self, example: Example, media: Sequence[NormalMedia]) -> np.ndarray:
        """Return the token ids of a prompt whose media are already normalised, int32 [P]. Raises DataError like
        `encode`."""
        (tokens,) = self._encode([example], [self.render(example)])
        return self._expanded(example, tokens, self._vision_of(example), [item.size for item in media])

    def longer(self, examples: Sequence[Example], limit: int) -> dict[int, int]:
        """Return the number of tokens of each prompt that has more than `limit` tokens, by the prompt's index.

        Prompts with too few bytes to exceed the limit aren't tokenised. Raises DataError like `encode`.
        """
        texts = [self.render(example) for example in examples]
        doubtful = [index for index, text in enumerate(texts) if examples[index].media or self._may_exceed(text, limit)]
        chosen = [examples[index] for index in doubtful]
        encoded = self._with_media(chosen, self._encode(chosen, [texts[index] for index in doubtful]))
        return {index: len(tokens) for index, tokens in zip(doubtful, encoded, strict=True) if len(tokens) > limit}

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids. Special tokens are left out unless `special`."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=not special)

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds to the previous ones; "" while a character is incomplete."""
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, int(token)) or "" for token in tokens]

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text that a chat template wrote, and that already contains all special tokens."""
        if len(text) < LONG_TEXT:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        # This releases Python's lock, which `encode` doesn't.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def labels_of(self, times: Sequence[float]) -> list[list[int]]:
        """Return the token ids of the labels of a video's times, in seconds, as Qwen3-VL's processor writes them.

        For Qwen3-Omni, whose videos are single blocks, the labels are empty.
        """
        if self.vision is not None and self.vision.tokens.second:
            return [[] for _ in times]
        return [self.encode_text(f"<{seconds:.1f} seconds>") for seconds in times]

    @cached_property
    def added_tokens(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before the rest is tokenised, by id. They include all special tokens."""
        return dict(self._tokenizer.get_added_tokens_decoder())

    def is_special(self, token: int) -> bool:
        """Return True if the id is that of a special token, such as the end of a reply."""
        return token in self.added_tokens and self.added_tokens[token].special

    def has_token(self, token: int) -> bool:
        """Return True if the tokenizer's vocabulary has a token with this id. The id must be from 0 to 2**31 - 1."""
        return self._tokenizer.id_to_token(token) is not None

    def render(self, example: Example, now: datetime | None = None) -> str:
        """Return a prompt's text as the model gets it. `now` is the time for templates that write the date; None: the
        current time. Raises DataError like `encode`."""
        text = self._render(example, now)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON's "\ud83d" without its second half
            problem = f"has {text[error.start]!r}, half of a character, which can't be tokenised: repair or remove it"
            raise DataError("data", f"{example.place} {problem}") from None
        return text

    def _render(self, example: Example, now: datetime | None) -> str:
        if self.template is None:
            if isinstance(example.prompt, str) and not example.tools:
                return example.prompt
            what = "has tools" if example.tools else "is a list of chat messages"
            raise DataError(
                "model.chat_template",
                f"is not set, and the model has no chat template, which the prompt of {example.place} needs: it {what}",
            )
        try:
            return self.template.render(example.messages, example.tools, continue_final=self._continue_final, now=now)
        except DataError as error:
            place = example.place if error.field.startswith("data") else f"with the prompt of {example.place}"
            raise DataError(error.field, f"{place}: {error.message}") from error

    def _encode(self, examples: Sequence[Example], texts: list[str]) -> list[np.ndarray]:
        # A template writes special tokens itself; without one, the tokenizer adds them.
        # The fast method leaves out the tokens' offsets in the text.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self.template is None)
        for example, encoding in zip(examples, encodings, strict=True):
            if not encoding.ids:
                raise DataError("data", f"{example.place} has no tokens")
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _with_media(self, examples: Sequence[Example], encoded: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the token ids of prompts with those of their media. `encoded` are the token ids of the prompts'
        texts."""
        seen = [example for example in examples if example.media]
        if not seen:
            return list(encoded)
        pool = ThreadPoolExecutor(min(len(seen), MEASURING_THREADS), "measuring")
        try:
            found = pool.map(lambda example: measure(example, self._vision_of(example)), seen)
            return [
                self._expanded(example, tokens, self._vision_of(example), next(found)) if example.media else tokens
                for example, tokens in zip(examples, encoded, strict=True)
            ]
        finally:  # an error is raised at once: later items may take minutes
            pool.shutdown(wait=False, cancel_futures=True)

    def _vision_of(self, example: Example) -> VisionModel:
        if self.vision is None:
            raise unseen(example, example.media[0].kind)
        return self.vision

    def _expanded(
        self, example: Example, tokens: np.ndarray, vision: VisionModel, sizes: Sequence[MediaSize]
    ) -> np.ndarray:
        labels = [self.labels_of(size.times) for size in sizes]
        try:
            times = [size.times for size in sizes]
            return expand(tokens, [size.grid for size in sizes], vision.tokens, labels, times)
        except MediaError as error:
            raise DataError("data", f"{example.place} {error}") from error

    def _may_exceed(self, text: str, limit: int) -> bool:
        """Return True if a text may have more tokens than the limit, judged by its number of bytes."""
        if self._growth is None or not text:
            return True
        added = self._tokenizer.num_special_tokens_to_add(is_pair=False) if self.template is None else 0
        most = len(text) if text.isascii() else len(text.encode()) * self._growth
        return most + added > limit


def _growth(tokenizer: Tokenizer) -> int | None:
    """Return the maximum number of tokens per byte of a non-ASCII text; for ASCII texts it is 1.

    The number is known for byte-level BPE, in which a token has at least one byte of the normalised text. Returns None
    for other tokenizers.
    """
    normalizers = _parts(tokenizer.normalizer, "normalizers")
    splits = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    kinds = [one["type"] for one in splits]
    byte_level = kinds.count("ByteLevel") == 1 and set(kinds) <= SPLITS and isinstance(tokenizer.model, models.BPE)
    # A space before each piece, or byte fallback after the byte level, would add tokens.
    if not byte_level or any(one.get("add_prefix_space") for one in splits) or tokenizer.model.byte_fallback:
        return None
    if any(one["type"] != "NFC" for one in normalizers):
        return None
    return NFC_GROWTH if normalizers else 1


def _parts(step: Any, name: str) -> list[dict[str, Any]]:
    """Return the description of a tokenizer's step as a list: of its parts if the step is a sequence, else of the step
    alone."""
    if step is None:
        return []
    described = json.loads(step.__getstate__())  # what pickling uses: only the whole tokenizer has a to_str()
    if described["type"] != "Sequence":
        return [described]
    return described[name]
