"""Makes the tiny model of examples/two-players.toml, which plays random legal moves of Nim.

`python -m relaxd.tools.game_beginner FOLDER` trains it on random games. It runs as a separate process, so that the
command line needs no torch.
"""

import sys
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from relaxd.data.examples import Message
from relaxd.envs.environment import Reply, Sample
from relaxd.envs.nim import Nim
from relaxd.tools.tool_beginner import CHAT_TEMPLATE, teach, tokenizer_of

PROMPT = "Nim: who takes the last stone wins."
BATCHES = 400


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
        messages: list[Message] = [{"role": "user", "content": PROMPT}]
        while True:
            move = str(self._random.randint(1, int(said.removesuffix(".").rpartition(" ")[2])))
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": move}]
            step = game.step(Reply(move))
            if step.done:
                return str(self._template.apply_chat_template(messages, tokenize=False))
            said = str(step.observation)


def make(folder: Path, batches: int = BATCHES) -> None:
    """Train the model and write it with its tokenizer and chat template into `folder`."""
    games = Games()
    tokenizer = tokenizer_of([games.text() for _ in range(200)])
    teach(folder, tokenizer, batches, lambda batch: games.text())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
