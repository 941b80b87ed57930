"""The interface of rewards: their input and output, reference answers, and a time limit for checks."""

from __future__ import annotations

import io
import json
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from numbers import Real
from types import FrameType
from typing import TYPE_CHECKING, Any

from relaxd.envs.environment import as_python, shown
from relaxd.media.messages import Message, text_message
from relaxd.media.sounds import decode_wav
from relaxd.media.videos import frames_of

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@dataclass(frozen=True)
class RewardInput:
    """The sample that a reward scores. `messages` is the whole conversation; for one text prompt and answer the other
    fields suffice."""

    prompt: str
    """Text of the prompt's last message that isn't the assistant's."""
    response: str
    """The text of the model's last message, without end tokens."""
    answer: str = ""
    """The reference answer as text; "" if the data has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the prompt's line in the data."""
    finish_reason: str = ""
    """Reason why the answer ended: "stop", "length", "abort" or another of relaxd/reasons.py; "" if unknown."""
    prompt_messages: Sequence[Message] = ()
    """Messages of the prompt; empty if it is a single user message with the text `prompt`."""
    response_messages: Sequence[Message] = ()
    """Messages after the prompt; empty if it is a single message of the model with the text `response`."""
    answer_messages: Sequence[Message] = ()
    """Messages of the reference answer; empty if it is a single message with the text `answer`."""

    tokens: int = 0
    """Number of tokens that the model wrote, end tokens included; 0 if unknown."""
    environment_reward: float | None = None
    """Sum of the rewards that the environment gave in the conversation; None without an environment."""
    environment_info: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment reported, by name (`Step.info`)."""
    media: Mapping[str, bytes] = field(default_factory=dict)
    """The messages' media by hash: images and videos as PNG, sounds as WAV; {} unless reward.media is set."""

    def images(self) -> list[Image]:
        """Open the conversation's images with Pillow, in order: RGB, in the size that the model sees.

        Raises:
            ValueError: reward.media isn't set, so the images weren't sent to the reward.
        """
        return [self._opened(part) for part in self._parts("image")]

    def videos(self) -> list[list[Image]]:
        """Open the frames of the conversation's videos with Pillow, as the model sees them.

        Raises:
            ValueError: reward.media isn't set, so the videos weren't sent to the reward.
        """
        return [
            frames_of(self._opened(part), int(part["media_type"].rpartition("frames=")[2]))
            for part in self._parts("video")
        ]

    def sounds(self) -> list[np.ndarray]:
        """Return the samples of the conversation's sounds: int16, one channel, at the model's rate.

        Raises:
            ValueError: reward.media isn't set, so the sounds weren't sent to the reward.
        """
        return [decode_wav(self.media[part["sha256"]]) for part in self._parts("audio")]

    def _parts(self, kind: str) -> list[Mapping[str, Any]]:
        """Return all parts of a kind, such as "image", in the conversation. Raises ValueError if media are missing."""
        messages = [*self.prompt_messages, *self.response_messages]
        parts = [part for message in messages for part in message["content"] if part["type"] == kind]
        if lacking := next((part["sha256"] for part in parts if part["sha256"] not in self.media), None):
            raise ValueError(f"{kind} {lacking} isn't here: set reward.media = true")
        return parts

    def _opened(self, part: Mapping[str, Any]) -> Image:
        from PIL import Image

        return Image.open(io.BytesIO(self.media[part["sha256"]]))

    @property
    def messages(self) -> list[Message]:
        """The whole conversation: the prompt's messages and all later ones."""
        prompt = self.prompt_messages or [text_message("user", self.prompt)]
        return [*prompt, *(self.response_messages or [text_message("assistant", self.response)])]


@dataclass(frozen=True)
class RewardOutput:
    """The validated result of a reward for one sample; all numbers are finite."""

    reward: float
    """The sample's reward, on which the trainer trains; `parts` aren't added to it."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components of the reward, for reporting only."""


Score = float | Mapping[str, Any]
"""A number, or {"reward": number, "parts": {name: number}}; other numbers beside "reward" are parts, too, and values
that aren't numbers are left out. "score" may replace "reward", as in verl, and counts if both are present."""
Reward = Callable[[RewardInput], Score | Awaitable[Score]] | Callable[[Sequence[RewardInput]], Any]
"""A reward function: scores a sample, or returns a list of scores for a group if its first parameter is `samples`. May
be async. If the function raises, reward.on_failure decides what happens to the sample."""


RIGHT = 'a number, or {"reward": number, "parts": {name: number}}'


class BadRewardError(ValueError):
    """A reward has a wrong signature or returned an invalid value."""


def check_output(value: object, key: str = "") -> RewardOutput:
    """Convert a reward's return value to a `RewardOutput`.

    Args:
        value: the return value.
        key: the reward's key in a mapping; by default "score", or else "reward". Other keys with numbers are parts;
            text and other values are left out. numpy's and torch's scalars are numbers, too.

    Raises:
        BadRewardError: the value is no number, not finite, or a mapping without the key; the message says what is
            valid.
    """
    if not isinstance(value, Mapping):
        return RewardOutput(_number("the reward", value))
    found = next((one for one in ((key,) if key else ("score", "reward")) if one in value), None)
    if found is None:
        keys = ", ".join(sorted(map(repr, value))) or "none"
        raise BadRewardError(
            f'the reward returned a mapping without "{key or "reward"}"; its keys are {keys}: '
            f"return {RIGHT}{'' if key else ', or set reward.key'}"
        )
    nested = value.get("parts", {})
    parts = {name: part for name, part in value.items() if name not in (found, "parts")}
    parts |= nested if isinstance(nested, Mapping) else {"parts": nested}
    for name in parts:
        if not isinstance(name, str):
            raise BadRewardError(f"the reward returned a part named {name!r}: names must be text")
    numbers = {
        name: _number(f"part {name!r} of the reward", number)
        for name, part in parts.items()
        if isinstance(number := as_python(part), Real)
    }
    return RewardOutput(_number("the reward", value[found]), numbers)


def _number(what: str, value: object) -> float:
    value = as_python(value)
    if not isinstance(value, Real):
        raise BadRewardError(f"{what} is {shown(value)}: it must be a number; return {RIGHT}")
    try:
        number = float(value)
    except OverflowError as error:
        raise BadRewardError(f"{what} is too large for a float64") from error
    if not math.isfinite(number):
        raise BadRewardError(f"{what} is {number}: it must be finite")
    return number


_AGAIN_SECONDS = 0.1


class TooSlow(BaseException):
    """A check exceeded its time limit. Derives from BaseException, because packages such as sympy catch Exception."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the body after `seconds` of processor time, so that a busy machine changes no reward.

    An answer that makes a checker run for ever is then wrong, and doesn't cost its whole group. Uses SIGVTALRM, so it
    does nothing outside the main thread, and doesn't nest; workers score in their main thread. C code that doesn't
    check for signals, such as a power of huge numbers, isn't interrupted; the sample's deadline ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"longer than {seconds:g} s")

    handler = signal.signal(signal.SIGVTALRM, stop)
    # Repeated, in case the first exception is swallowed by a finalizer.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


def references(answer: str) -> list[str]:
    """Return the reference answers of a prompt: the texts if the answer is a JSON list, else only the answer."""
    if answer.startswith("[") and answer.endswith("]"):
        try:
            found = json.loads(answer)
        except ValueError:
            return [answer]
        if all(isinstance(one, str) for one in found) and (texts := [one for one in found if one.strip()]):
            return texts
    return [answer]


def ground_truth(sample: RewardInput) -> Any:
    """Return a sample's ground truth as verl has it: metadata.reward_model.ground_truth unchanged, or else the
    answer."""
    model = sample.metadata.get("reward_model")
    return model["ground_truth"] if isinstance(model, dict) and "ground_truth" in model else sample.answer


def best_of_references(reward: Callable[[RewardInput], Any]) -> Callable[[RewardInput], Any]:
    """Wrap a reward so that it scores a reply against each reference answer, and returns the best score."""

    @wraps(reward)
    def best(sample: RewardInput) -> Any:
        scores = [reward(replace(sample, answer=one)) for one in references(sample.answer)]
        return max(scores, key=lambda score: check_output(score).reward)

    return best
