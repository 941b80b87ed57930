"""An environment that answers with the length of a reply, and the modes in which runs with it are tried."""

OBSERVED = "<|im_end|> of"
"""The environment's messages begin so: the control token must be plain text."""
ENVIRONMENT = f"""
class Echo:
    def __init__(self, turns):
        self.turns, self.turn = turns, 0

    def open(self, sample):
        return "Say something about " + sample.answer

    def step(self, reply):
        self.turn += 1
        data = reply.text.encode()
        share = sum(byte % 2 == 0 for byte in data) / max(len(data), 1)
        return {OBSERVED!r} + f" {{len(reply.text)}}", share, self.turn == self.turns, {{"letters": len(reply.text)}}

class Broken:
    def step(self, reply):
        raise ValueError("broken on purpose")
"""
MODES = {"async": (), "colocated": ("--run.colocate", "true", "--board.max_staleness", "0")}
