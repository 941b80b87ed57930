"""relaxd on one page: `python examples/one_page.py` teaches a tiny random model to write lower-case letters.

What the services do is here once, in one process and in order. In a real run each of these parts is a service with
replicas, all work at the same time, and the board between them keeps every group until a step that contains it is
committed. The terms are those of docs/glossary.md.
"""

import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from relaxd.algorithms import Filtered, create
from relaxd.board import STAGES, Board, NewGroup
from relaxd.config import BoardConfig, GRPOConfig, OptimizerConfig, TrainerConfig
from relaxd.local.embedded_redis import temporary_redis
from services.rollout.offline import OfflineEngine
from services.trainer.learner.learner import OfflineLearner

STEPS, GROUPS, SAMPLES, NEW_TOKENS, END = 12, 4, 8, 16, 0
PROMPT = np.frombuffer(b"Write: ", np.uint8).astype(np.int32)


def make_model(folder: Path) -> Path:
    """Write a random Llama whose tokens are ASCII characters."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=128, max_position_embeddings=64, eos_token_id=END, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def train(model: Path, redis_url: str) -> float:
    """Run the loop; return the mean reward of the last step."""
    # The board: groups wait in Redis for these stages, one after the other.
    stages = [STAGES[name] for name in ("rollout", "reward", "advantage", "train")]
    board = Board(redis_url, "one-page", stages, BoardConfig(max_staleness=0))

    # `term`: who may write. A coordinator or trainer that takes over has a higher term, and the board then refuses the
    # old one, which may not know yet that it was replaced. Here nobody takes over: both have their first term.
    term = 1
    board.create(term=term, groups_per_step=GROUPS, steps=STEPS)
    trainer_term = board.new_trainer_term()

    settings = GRPOConfig()
    algorithm = create(settings)
    learner = OfflineLearner(model, TrainerConfig(optimizer=OptimizerConfig(lr=1e-2)), settings, steps=STEPS)
    generator = AutoModelForCausalLM.from_pretrained(model).eval()

    with OfflineEngine(generator, lambda ids: "".join(map(chr, ids)), [END]) as engine:
        for step in range(1, STEPS + 1):
            # 1. The engine gets the learner's weights. Services send them by a broadcast over NCCL or gloo.
            engine.load(term, learner.step, learner.iter_hf_tensors())

            # 2. Publish prompts, through a gate that knows how old the oldest weights in use are.
            # `columns`: what a group has on the board, by name (docs/columns.md). Stages read some and write more.
            board.set_gate(term=term, oldest_version=learner.step, open=True)
            columns = {"prompt_tokens": PROMPT, "prompt": {"text": "Write: "}}
            board.publish(term=term, groups=[NewGroup(f"step-{step}-group-{n}", columns) for n in range(GROUPS)])

            # 3. Rollout: several samples of each prompt make a group.
            # `delivery`: a group that the board has given one replica of a stage, for a while. The replica commits
            # or drops it; if it dies, another one gets it.
            for delivery in board.take("rollout", "me", count=GROUPS, block_seconds=5):
                board.begin(delivery, learner.step)
                answers = engine.answer_group(delivery.group_id, PROMPT.tolist(), SAMPLES, NEW_TOKENS)
                board.commit([(delivery, answers)])

            # 4. Reward: judge each answer.
            deliveries = board.take("reward", "me", count=GROUPS, block_seconds=5)
            for delivery, read in zip(deliveries, board.load(deliveries, ["text"]), strict=True):
                rewards = np.array([sum(map(str.islower, text)) / NEW_TOKENS for text in read["text"]])
                board.commit([(delivery, {"reward": rewards, "reward_parts": {}})])

            # 5. Advantage: how much better than the rest of its group an answer was, for each token.
            deliveries = board.take("advantage", "me", count=GROUPS, block_seconds=5)
            for delivery, read in zip(deliveries, board.load(deliveries, ["reward", "lengths"]), strict=True):
                found = algorithm.advantages(read["reward"], read["lengths"])
                if isinstance(found, Filtered):  # such as a group whose answers are all equally good
                    board.drop(delivery, reason=found.reason, counts="filtered")
                else:
                    board.commit([(delivery, {"advantages": found.values})])

            # 6. Train: one optimizer step on the groups, then its line of the ledger, which takes them off the board.
            deliveries = board.take("train", "me", count=GROUPS, block_seconds=5)
            ids = [delivery.group_id for delivery in deliveries]
            groups = dict(zip(ids, board.load(deliveries, board.needs("train")), strict=True))
            stats = learner.train(groups)
            reward = float(np.mean([group["reward"] for group in groups.values()]))
            board.commit_step(term=trainer_term, step=step, plan={"groups": ids}, metrics={"reward": reward})
            print(f"step {step:2}  reward {reward:.2f}  gradient {stats.grad_norm:.2f}  {answers['text'][0]!r}")

    board.counts().check()  # published = open + trained + dropped: nothing was lost, nothing trained twice
    board.close()
    return reward


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, temporary_redis(Path(place) / "redis") as redis_url:
        share = train(make_model(Path(place) / "model"), redis_url)
        print(f"it learned to write lower-case letters: {share:.0%} of an answer now, by chance {26 / 128:.0%}")
