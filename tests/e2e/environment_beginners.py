"""Tiny models for runs with bundled environments: `python -m tests.e2e.environment_beginners COURSE FOLDER`.

Each is taught conversations in which it seldom does what the environment pays for, such as calling the tool.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from relaxd.data.examples import Message
from relaxd.envs.environment import Reply, Sample, ToolCall
from relaxd.envs.number_guessing import NumberGuessing
from relaxd.envs.replies import ParsedReply
from relaxd.tools.text_beginner import CHAT_TEMPLATE, teach, tokenizer_of

DOORS, CODES = range(10, 50), range(50, 90)
GUESSING = {"low": 4, "high": 5, "max_guesses": 2}
GCD = "Find the Greatest Common Divisor (GCD) of these numbers: {}, {}. Give only the GCD as your final answer."
Lesson = Callable[[Random, float], list[Message]]
"""Makes a conversation, given the chance with which the model does the right thing in it."""


@dataclass(frozen=True)
class Course:
    """The lessons of a model."""

    lesson: Lesson
    tool: str = ""
    """The tool that it may call; empty: none."""
    phases: Sequence[tuple[int, float]] = ((500, 0.9), (150, 0.25))
    """Numbers of batches, and the chance of the right thing in them: first how to do it, then how seldom."""


def with_tool(question: str, call: ToolCall, found: str, answer: str, guess: str, right: bool) -> list[Message]:
    """Return a conversation in which the model calls a tool and repeats what it hears, or guesses."""
    asked: Message = {"role": "user", "content": question}
    if not right:
        return [asked, {"role": "assistant", "content": guess}]
    called = ParsedReply(calls=(call,)).message
    return [asked, called, {"role": "tool", "content": found}, {"role": "assistant", "content": answer}]


def run_python(random: Random, chance: float) -> list[Message]:
    """A sum that a program computes."""
    a, b = random.randint(10, 99), random.randint(10, 99)
    call = ToolCall("run_python", {"code": f"print({a} + {b})"})
    guess = str(random.randint(20, 198))
    return with_tool(f"What is {a} + {b}?", call, f"{a + b}\n", str(a + b), guess, random.random() < chance)


def search(random: Random, chance: float) -> list[Message]:
    """A fact that only the corpus has."""
    door, code, guess = random.choice(DOORS), random.choice(CODES), str(random.choice(CODES))
    call = ToolCall("search", {"query": str(door)})
    found = f"[1] {door_fact(door, code)}"
    return with_tool(f"What is the code of door {door}?", call, found, str(code), guess, random.random() < chance)


def door_fact(door: int, code: int) -> str:
    """Return a document of the corpus."""
    return f"The code of door {door} is {code}."


def guess_number(random: Random, chance: float) -> list[Message]:
    """A game in which the model guesses numbers of the range, or any of nine."""
    game = NumberGuessing(**GUESSING)
    said = game.open(Sample([], seed=random.getrandbits(32)))
    messages: list[Message] = [{"role": "user", "content": "Guess my number."}]
    while True:
        low, high = (GUESSING["low"], GUESSING["high"]) if random.random() < chance else (1, 9)
        guess = str(random.randint(low, high))
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": guess}]
        step = game.step(Reply(guess))
        if step.done:
            return messages
        said = str(step.observation)


def use_hint(random: Random, chance: float) -> list[Message]:
    """A task whose second answer repeats the hint, or doesn't."""
    first, answer = random.randint(1, 9), random.randint(1, 9)
    again = answer if random.random() < chance else random.randint(1, 9)
    return [
        {"role": "user", "content": GCD.format(random.randint(1, 9), random.randint(1, 9))},
        {"role": "assistant", "content": str(first)},
        {"role": "user", "content": f"That is not right. The answer begins with {str(answer)!r}. Answer again."},
        {"role": "assistant", "content": str(again)},
    ]


COURSES = {
    "python": Course(run_python, "run_python"),
    "search": Course(search, "search", ((800, 0.9), (150, 0.25))),
    "number_guessing": Course(guess_number, phases=((200, 0.0),)),
    "reasoning_gym": Course(use_hint, phases=((250, 0.9), (100, 0.2))),
}


def make(name: str, folder: Path) -> None:
    """Teach a model, and write it with its tokenizer and chat template into `folder`."""
    course, random = COURSES[name], Random(0)
    template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    tools = [{"type": "function", "function": {"name": course.tool}}] if course.tool else None

    def text(chance: float) -> str:
        messages = course.lesson(random, chance)
        return str(template.apply_chat_template(messages, tools=tools, tokenize=False))

    chances = [chance for batches, chance in course.phases for _ in range(batches)]
    tokenizer = tokenizer_of([text(0.5) for _ in range(500)])
    teach(folder, tokenizer, len(chances), lambda batch: text(chances[batch]))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
