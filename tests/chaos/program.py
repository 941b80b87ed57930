"""A program that leads conversations, and which a fault makes do what it should not: `program.py MOOD_FILE`.

It needs only the standard library, so that it starts soon.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

MOODS = {"never asks": "no conversation has a message of the model: timeout", "exits": "exit code 3"}
"""Words in the details of groups that are dropped for each mood."""
TRICKS = ("asks out of order", "repeats requests", "sends another's session")
"""Moods that must harm no conversation."""
PLAYED, HARMED, SESSIONS = ".played", ".harmed", ".sessions"
"""Suffixes of files beside that of the mood: a line for each trick that did no harm, each harm that one did, and each
session's address."""
MOOD = Path(sys.argv[-1])
USER = {"role": "user", "content": "And?"}
ADDRESS = os.environ.get("OPENAI_BASE_URL", "")
RECENT = 16
"""Number of sessions that may still be there."""
Messages = list[dict[str, Any]]


def ask(messages: Messages, address: str = ADDRESS) -> dict[str, Any]:
    """Return the model's next message."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(
        f"{address}/chat/completions", json.dumps({"messages": messages}).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def note(suffix: str, line: str) -> None:
    """Add a line to one of the files."""
    with MOOD.with_suffix(suffix).open("a") as file:
        file.write(f"{line}\n")


def fail(harm: str) -> NoReturn:
    """End because a trick did harm."""
    note(HARMED, harm)
    sys.exit(harm)


def talk(messages: Messages) -> None:
    """Have three messages."""
    for _ in range(3):
        messages = [*messages, ask(messages), USER]


def repeat_requests(messages: Messages) -> None:
    """Send each request three times at once."""
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            first, *others = pool.map(ask, [messages] * 3)
            if others != [first] * 2:
                fail("a repeated request was answered otherwise")
            messages = [*messages, first, USER]


def ask_out_of_order(messages: Messages) -> None:
    """Go on from what the model hasn't said, then from what it has, and from the former again."""
    said = ask(messages)
    other = [*messages, {"role": "assistant", "content": "never said"}, USER]
    answer = ask(other)
    ask([*messages, said, USER])
    ask([*other, answer, USER])


def use_another_session(messages: Messages) -> bool:
    """Ask in the sessions of others, with this one's key; return True if one was there."""
    note(SESSIONS, ADDRESS)
    met = False
    for other in set(MOOD.with_suffix(SESSIONS).read_text().split()[-RECENT:]) - {ADDRESS}:
        try:
            ask(messages, other)
        except urllib.error.HTTPError as error:
            if error.code not in (401, 404):
                fail(f"another's session answers {error.code}")
            met = met or error.code == 401
        except urllib.error.URLError:
            pass  # the service that had it has ended
        else:
            fail("another's session has answered")
    talk(messages)
    return met


def main() -> None:
    """Do what the mood says, or talk."""
    messages = json.loads(Path(os.environ["RELAXD_SAMPLE"]).read_text())["messages"]
    what = MOOD.read_text() if MOOD.exists() else ""
    played = what in TRICKS
    match what:
        case "never asks":
            time.sleep(3600)
        case "exits":
            ask(messages)
            sys.exit(3)
        case "asks out of order":
            ask_out_of_order(messages)
        case "repeats requests":
            repeat_requests(messages)
        case "sends another's session":
            played = use_another_session(messages)
        case _:
            talk(messages)
    if played:
        note(PLAYED, what)


if __name__ == "__main__":
    main()
