"""Environments of the tests, good and bad."""

import asyncio
import os
import time
from io import BytesIO
from pathlib import Path

from PIL import Image

import relaxd
from relaxd.envs.environment import Reply, Sample, Step
from relaxd.media.sources import read_source


class Echo:
    """Says what it was told. Notes in a file when it is opened, asked and closed."""

    def __init__(self, notes: str = "") -> None:
        self._notes = notes

    def open(self, sample: Sample) -> str:
        self._note("open")
        return f"{sample.messages[-1]['content']} {sample.answer} {sample.metadata} {sample.seed}"

    async def step(self, reply: Reply) -> tuple[str, float, bool, dict[str, object]]:
        self._note(reply.text)
        await asyncio.sleep(0)
        return f"you said {reply.text}", 0.5, reply.text == "end", {"length": len(reply.text), "kind": "echo"}

    def close(self) -> None:
        self._note("close")

    def _note(self, text: str) -> None:
        if self._notes:
            with Path(self._notes).open("a") as notes:
                notes.write(text + "\n")


class Bad:
    """Does what a message of the model says, or what its first argument says when it is opened."""

    def __init__(self, opening: str = "") -> None:
        if opening == "make":
            raise KeyError("no such key")
        self._opening = opening
        if opening == "tools":
            self.tools = ["add"]

    def open(self, sample: Sample) -> object:
        return b"bytes" if self._opening == "bytes" else None

    def step(self, reply: Reply) -> object:
        match reply.text:
            case "raise":
                raise RuntimeError("no luck")
            case "leave":
                raise SystemExit(3)
            case "hang":
                time.sleep(60)
            case "die":
                os._exit(7)
            case "none":
                return None
            case "text reward":
                return "well", "good"
            case "nan":
                return "well", float("nan")
            case "huge":
                return "x" * 100_000_000, 0.0
            case "invalid":
                return b"\xff".decode(errors="surrogateescape"), 0.0
            case "number":
                return Step(observation=3)  # type: ignore[arg-type]
            case "picture":
                return {"role": "user", "content": [{"type": "image"}]}, 0.0
            case "done":
                return Step("well", 1.0, done="yes")  # type: ignore[arg-type]
        return "well", 1.0


class Measuring:
    """Tells the size of the prompt's picture."""

    def open(self, sample: Sample) -> str:
        (shown,) = (part["image"] for part in sample.messages[-1]["content"] if part["type"] == "image")
        with Image.open(BytesIO(read_source(shown))) as picture:
            return f"It has {picture.width} x {picture.height} pixels."

    def step(self, reply: Reply) -> Step:
        return Step(done=True)


class Telling:
    """Tells people what it hears."""

    def open(self, sample: Sample) -> None:
        relaxd.notify("opened")

    async def step(self, reply: Reply) -> Step:
        relaxd.notify(f"heard {reply.text}")
        raise RuntimeError("no luck")


class BadAsync:
    """Blocks or awaits for too long in an async method."""

    async def step(self, reply: Reply) -> Step:
        if reply.text == "block":
            time.sleep(60)
        await asyncio.sleep(0 if reply.text == "fast" else 60)
        return Step(reply.text)


class WithoutStep:
    """Isn't an environment."""
