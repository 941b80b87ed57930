"""Tokenising of prompts with the model's tokenizer, without transformers."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from relaxd.data.errors import DataError
from relaxd.data.examples import Example
from relaxd.data.templating import load_chat_template


@lru_cache(maxsize=4)
def _read(file: str, changed_ns: int, size: int) -> Tokenizer:
    """Load a tokenizer, cached because tokenizers 0.23 never frees a tokenizer's word cache of tens of megabytes."""
    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PromptTokenizer:
    """Templates and tokenises prompts for one model."""

    def __init__(
        self, folder: Path, chat_template: str | None = None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """`chat_template` overrides the model's, and `arguments` are variables for it.

        Raises DataError for a missing or invalid tokenizer.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError("model.path", f"the model folder {folder} has no tokenizer: tokenizer.json is missing")
        stamp = file.stat()
        try:
            self._tokenizer = _read(str(file), stamp.st_mtime_ns, stamp.st_size)
        except Exception as error:  # the Rust binding raises plain Exception
            raise DataError("model.path", f"{file} is not a tokenizer: {error}") from error
        self._template = load_chat_template(folder, chat_template, arguments)

    def encode(self, examples: Sequence[Example]) -> list[np.ndarray]:
        """Tokenise prompts: an int32 array [P] each.

        Raises DataError if the template rejects a prompt, a conversation has no template, or a prompt has no tokens.
        """
        texts = [self.render(example) for example in examples]
        # A template writes special tokens itself; without one, the tokenizer adds them.
        # The fast one leaves out where in the text each token is.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._template is None)
        for example, encoding in zip(examples, encodings, strict=True):
            if not encoding.ids:
                raise DataError("data", f"{example.place} has no tokens")
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode token ids without special tokens."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def render(self, example: Example) -> str:
        """Return a prompt as the model gets it. Raises DataError, see `encode`."""
        if self._template is None:
            if isinstance(example.prompt, str) and not example.tools:
                return example.prompt
            what = "has tools" if example.tools else "is a list of chat messages"
            raise DataError(
                "model.chat_template", f"{example.place} {what}, but the model has no chat template: set one"
            )
        try:
            return self._template.render(example.messages, example.tools)
        except DataError as error:
            raise DataError(error.field, f"{example.place}: {error.message}") from error
