"""Makes the tiny models of `relaxd demo --task tool-use`, which can call a calculator and seldom does, and of
examples/two-players.toml, which plays random legal moves of Nim.

`python -m relaxd.tools.text_beginner TASK FOLDER` trains a model: for "tool" on lessons, which are conversations about
sums of two-digit numbers, for "game" on random games. It runs as a separate process, so that the command line needs no
torch.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from relaxd.data.examples import Message
from relaxd.data.sources.addition_source import addition
from relaxd.envs.calculator import Calculator
from relaxd.envs.environment import Reply, Sample, ToolCall
from relaxd.envs.nim import Nim
from relaxd.envs.replies import ParsedReply

DIGITS = 2
PADDING, END, ASSISTANT = "<|padding|>", "<|end|>", "<|assistant|>"
SPECIAL_TOKENS = (PADDING, END, ASSISTANT, "<|system|>", "<|user|>", "<|tool|>")
CHAT_TEMPLATE = """\
{%- if tools -%}
<|system|>Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>
{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
"""
"""Chat template that lists the tools, and writes tool calls in the format of Hermes and Qwen."""
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
BATCH = 16
LEARNING_RATE = 5e-3
PHASES = ((800, 0.9), (200, 0.1))
"""Training phases: number of batches, and share of lessons with a tool whose answer calls it.

The model first learns to call, then to call seldom.
"""
TOOL_SHARE = 0.8
"""Share of lessons that offer the calculator."""


def make(folder: Path, phases: Sequence[tuple[int, float]] = PHASES) -> None:
    """Train the tool-use model and write it with its tokenizer and chat template into `folder`."""
    lessons = Lessons()
    shares = [share for batches, share in phases for _ in range(batches)]
    teach(folder, lessons.tokenizer(), len(shares), lambda batch: lessons.text(shares[batch]))


def teach(folder: Path, tokenizer: PreTrainedTokenizerFast, batches: int, text: Callable[[int], str]) -> None:
    """Train a tiny model on the assistant's messages in conversations, and write it with its tokenizer into `folder`.

    Args:
        folder: folder to write to.
        tokenizer: the model's tokenizer.
        batches: number of batches of conversations.
        text: returns a conversation, given the number of its batch.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would only wait for each other
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **tokens, max_position_embeddings=256, tie_word_embeddings=True))

    def loss(done: int) -> torch.Tensor:
        ids = tokenizer([text(done) for _ in range(BATCH)], padding=True, return_tensors="pt").input_ids
        return lesson_loss(model(input_ids=ids).logits, ids)

    train(model, batches, LEARNING_RATE, loss)
    save(folder, model, tokenizer)


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a model and its tokenizer. Token 0 must be the padding token, and token 1 the end token."""
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(model: torch.nn.Module, updates: int, learning_rate: float, loss_of: Callable[[int], torch.Tensor]) -> None:
    """Train a model with AdamW, whose learning rate rises over 30 updates and falls over the last half.

    Args:
        model: the model.
        updates: number of updates.
        learning_rate: the largest learning rate.
        loss_of: returns the loss of an update, given its number.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    for done in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (done + 1) / 30, 2 * (1 - done / updates))
        optimizer.zero_grad()
        loss_of(done).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def lesson_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the assistant's tokens in a batch of conversations, token ids of shape [lessons,
    tokens]."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels(ids)[:, 1:].flatten())


def labels(ids: torch.Tensor) -> torch.Tensor:
    """Return labels of shape [lessons, tokens] for a batch of conversations: the assistant's tokens, and -100
    elsewhere."""
    place = torch.arange(ids.shape[1]).expand_as(ids)
    begun, ended = (torch.where(ids == t, place, -1).cummax(1).values for t in (2, 1))
    inside = torch.zeros_like(ids, dtype=torch.bool)
    inside[:, 1:] = (begun > ended)[:, :-1]  # behind the assistant's token, up to and with the end
    return ids.masked_fill(~inside, -100)


class Lessons:
    """Random conversations about sums, with and without the calculator."""

    def __init__(self) -> None:
        self._random = Random(0)
        self._examples, _ = addition(DIGITS)
        self._template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)

    def text(self, call_share: float) -> str:
        """Return a random conversation.

        If it offers the calculator, the assistant calls it with probability `call_share`.
        """
        example = self._random.choice(self._examples)
        messages: list[Message] = [{"role": "user", "content": example.prompt}]
        tools = Calculator.tools if self._random.random() < TOOL_SHARE else None
        if tools and self._random.random() < call_share:
            expression = str(example.prompt).removeprefix("What is ").partition("?")[0]
            messages.append(ParsedReply(calls=(ToolCall("calculator", {"expression": expression}),)).message)
            messages.append({"role": "tool", "content": example.answer})
        messages.append({"role": "assistant", "content": example.answer})
        return str(self._template.apply_chat_template(messages, tools=tools, tokenize=False))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer that has one token for each number and for each phrase of the lessons."""
        sums = (str(text) for example in self._examples for text in (example.prompt, example.answer))
        return tokenizer_of([*sums, *(self.text(0.5) for _ in range(100))])


def tokenizer_of(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has one token for each number and for each phrase of the given texts."""
    bpe = Tokenizer(models.BPE())
    numbers, byte_level = pre_tokenizers.Digits(False), pre_tokenizers.ByteLevel(False, use_regex=False)
    special = pre_tokenizers.Split(Regex(r"<\|\w+\|>"), "isolated")
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence([special, numbers, byte_level])
    bpe.train_from_iterator(texts, trainer)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([numbers, byte_level])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PADDING, chat_template=CHAT_TEMPLATE)


GAME_PROMPT = "Nim: who takes the last stone wins."
GAME_BATCHES = 400


class Games:
    """Random games of Nim, each from the view of one player."""

    def __init__(self) -> None:
        self._random = Random(0)
        self._template = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)

    def text(self) -> str:
        """Play a random game and return the conversation as text, rendered by the chat template."""
        game = Nim(opponent="random")
        seed = self._random.getrandbits(32)
        said = game.open(Sample([], seed=seed))
        messages: list[Message] = [{"role": "user", "content": GAME_PROMPT}]
        while True:
            move = str(self._random.randint(1, int(said.removesuffix(".").rpartition(" ")[2])))
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": move}]
            step = game.step(Reply(move))
            if step.done:
                return str(self._template.apply_chat_template(messages, tokenize=False))
            said = str(step.observation)


def make_player(folder: Path, batches: int = GAME_BATCHES) -> None:
    """Train the Nim player and write it with its tokenizer and chat template into `folder`."""
    games = Games()
    tokenizer = tokenizer_of([games.text() for _ in range(200)])
    teach(folder, tokenizer, batches, lambda batch: games.text())


if __name__ == "__main__":
    if sys.argv[1] == "game":
        make_player(Path(sys.argv[2]))
    else:
        make(Path(sys.argv[2]))
