"""A headless Chromium, told what to do through pipes (the DevTools protocol): pages are seen as people see them."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 20.0


def find_browser() -> str | None:
    """Return the path of a Chromium, if one is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """The only page of a browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._session: dict[str, str] = {}
        self._calls, self._unread = 0, b""
        self.errors: list[str] = []
        """Exceptions that no script caught."""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]}
        self.call("Runtime.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method of the protocol. Raises AssertionError: it is refused, or not answered in time."""
        self._calls += 1
        os.write(
            self._write,
            json.dumps({"id": self._calls, "method": method, "params": params, **self._session}).encode() + b"\0",
        )
        while (message := self._message()).get("id") != self._calls:
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]))
        assert "error" not in message, message
        return dict(message["result"])

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._unread:
            ready = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "the browser does not answer"
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(text))


@contextmanager
def browser_page(program: str, profile: Path, width: int = 1200, height: int = 1600) -> Iterator[Page]:
    """Start a browser whose files are in `profile`, and end it with the block."""
    child_reads, write = os.pipe()
    read, child_writes = os.pipe()

    def connect() -> None:  # the browser reads descriptor 3 and writes 4
        source, target = (fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (child_reads, child_writes))
        os.dup2(source, 3)
        os.dup2(target, 4)

    words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    words += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
    process = subprocess.Popen(words, preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL)
    os.close(child_reads)
    os.close(child_writes)
    try:
        yield Page(write, read)
    finally:
        os.close(write)  # its end
        os.close(read)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
