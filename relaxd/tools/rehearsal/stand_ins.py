"""Stand-ins of a rehearsal: a model's folder with only a tokenizer, a reward, and an environment."""

import asyncio
import hashlib
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relaxd.envs.environment import Environment, Reply, Step
from relaxd.media.placeholders import AUDIO, VIDEO
from relaxd.rewards.interface import RewardInput

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOKEN_SIDE = 32
"""Width and height of the picture area of one media token, in pixels."""
FRAMES = 4
"""Number of frames of a stand-in video: two time steps, the minimum that models sample."""
SOUND_RATE, SOUND_TOKENS = 16_000, 13
"""Audio samples and media tokens per second of sound."""


def write_stand_in(folder: Path, experts: tuple[int, int] = (0, 0)) -> Path:
    """Write a model folder with only a configuration and a tokenizer, which has a token for each byte. Returns it.

    Args:
        folder: folder to write.
        experts: number of layers, and experts of each token in a layer; (0, 0) for a model without experts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    sizes = dict(zip(("num_hidden_layers", "num_experts_per_tok"), experts, strict=True))
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def scripted(sample: RewardInput, success: float = 0.5, seconds: float = 0.0) -> float:
    """Return a reward of 1 with probability `success`, else 0, after `seconds`."""
    if seconds:
        time.sleep(seconds)
    # Texts of one length are equal in a rehearsal, so chance comes from here.
    digest = hashlib.blake2b(f"{sample.prompt}/{len(sample.response)}/{time.monotonic_ns()}".encode(), digest_size=4)
    return float(int.from_bytes(digest.digest(), "little") < success * 2**32)


class StandInEnvironment(Environment):
    """Stand-in for any environment: draws the number of turns, and the time of each, from log-normal distributions."""

    def __init__(
        self, turns: int, seconds: float, spread: float, words: int, word: str = " a", shows: str = ""
    ) -> None:
        """Set the distributions of turns and delays, and the content of the environment's answers.

        Args:
            turns: median number of the model's messages.
            seconds: median seconds for an answer.
            spread: standard deviation of the logarithms of `turns` and `seconds`.
            words: number of words of an answer.
            word: text of each word.
            shows: kind of media that answers consist of, with about `words` tokens; "": text.
        """
        self._random = random.Random()
        self._left = max(1, round(turns * self._factor(spread)))
        self._seconds, self._spread, self._words, self._text, self._shows = seconds, spread, words, words * word, shows

    async def step(self, reply: Reply) -> Step:
        """Answer the model's message after a random delay."""
        await asyncio.sleep(self._seconds * self._factor(self._spread))
        self._left -= 1
        done = self._left == 0
        if not self._shows or done:
            return Step(self._text, done=done)
        return Step({"role": "user", "content": [noise(self._shows, self._words)]})

    def _factor(self, spread: float) -> float:
        return math.exp(spread * self._random.gauss(0.0, 1.0))


def noise(kind: str, tokens: int) -> dict[str, Any]:
    """Return a message part with an image, video or sound of random noise, the content that takes the most bytes.

    Args:
        kind: the kind of media.
        tokens: approximate number of media tokens.
    """
    from PIL import Image

    drawn = np.random.default_rng()
    if kind == AUDIO:
        samples = drawn.uniform(-1, 1, tokens * SOUND_RATE // SOUND_TOKENS).astype(np.float32)
        return {"type": kind, kind: {"array": samples, "sampling_rate": SOUND_RATE}}
    frames = FRAMES if kind == VIDEO else 1
    side = TOKEN_SIDE * max(1, round(math.sqrt(tokens / math.ceil(frames / 2))))
    pictures = [Image.fromarray(pixels) for pixels in drawn.integers(0, 256, (frames, side, side, 3), np.uint8)]
    return {"type": kind, kind: pictures if kind == VIDEO else pictures[0]}
