"""Prompt source of examples/pitches.toml: tones; the answer is the number of the tone's octave.

Tones are computed with numpy, so that nothing is downloaded.
"""

import base64
from typing import Any

import numpy as np

from relaxd.media.sounds import encode_wav
from relaxd.tools.digit_pictures import DrawnPrompts

PROMPT = "<audio>How high is this?"
PITCHES = 5
"""Number of octaves to tell apart. It is small because lucky guesses speed up learning."""
LOWEST = 200.0
"""Frequency in the middle of the lowest octave, in hertz."""
DETUNED = 0.3
"""Maximum distance of a tone from the middle of its octave, in octaves."""
RATE = 16_000
SECONDS = 0.4
LOUDNESS = (3_000, 20_000)
"""Range of the amplitudes of tones, in int16 units."""
NOISE = 500
"""Standard deviation of the noise, in int16 units."""


class TonePitches(DrawnPrompts):
    """A source of prompts, each with a tone."""

    def row(self, seed: int, *, blank: bool) -> dict[str, Any]:
        """Return the prompt row for a seed. The column "sounds" has the tone, or silence with `blank`."""
        pitch, tone = draw(seed)
        return {"prompt": PROMPT, "answer": str(pitch), "sounds": [encoded(np.zeros_like(tone) if blank else tone)]}


def draw(seed: int) -> tuple[int, np.ndarray]:
    """Return a random octave's number and a tone in it: int16 audio samples of random pitch, loudness, phase and
    noise."""
    random = np.random.default_rng(seed % 2**32)
    pitch = int(random.integers(PITCHES))
    frequency = LOWEST * 2 ** (pitch + random.uniform(-DETUNED, DETUNED))
    time = np.arange(int(SECONDS * RATE)) / RATE
    wave = random.uniform(*LOUDNESS) * np.sin(2 * np.pi * (frequency * time + random.uniform()))
    tone: np.ndarray = (wave + random.normal(0, NOISE, len(time))).astype(np.int16)
    return pitch, tone


def encoded(samples: np.ndarray) -> str:
    """Return a sound as a base64-encoded WAV file, so that JSON can hold it."""
    return base64.b64encode(encode_wav(samples, RATE)).decode()
