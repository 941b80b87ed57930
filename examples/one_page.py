"""relaxd on one page: `python examples/one_page.py` teaches a tiny random model to write lower-case letters.

What the services do is here once, in one process and in order: give the engine the weights, publish prompts, generate,
reward, compute advantages, train a step. In a real run each of these parts is a service with replicas, all work at the
same time, and the board between them keeps every group until a step that contains it is committed.
"""

import queue
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from relaxd.algorithms import Filtered, create
from relaxd.board import STAGES, Board, NewGroup
from relaxd.config import BoardConfig, GRPOConfig, OptimizerConfig, TrainerConfig
from relaxd.local.embedded_redis import server_command, url, wait_until_up
from relaxd.process.ports import free_port
from services.rollout.engines.request_types import Output, Request, Sampling, Version
from services.rollout.engines.transformers.transformers_engine import TransformersEngine
from services.rollout.service.answers import Answers
from services.rollout.service.group_generator import group_seed
from services.trainer.batch.groups import check_group
from services.trainer.batch.micro_batch import pack
from services.trainer.learner.learner import Learner

STEPS, GROUPS, SAMPLES, NEW_TOKENS, END = 12, 4, 8, 16, 0
TERM = 1  # who may write: a coordinator or trainer that takes over has a higher term, and the old one is fenced off


def make_model(folder: Path) -> Path:
    """Write a random Llama whose tokens are ASCII characters."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=128, max_position_embeddings=64, eos_token_id=END, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def train(folder: Path, redis_url: str) -> float:
    """Run the loop; return the mean reward of the last step."""
    model = make_model(folder / "model")

    # The board: groups wait in Redis for the stages, in this order.
    stages = [STAGES[name] for name in ("rollout", "reward", "advantage", "train")]
    board = Board(redis_url, "one-page", stages, BoardConfig(max_staleness=0))
    board.create(term=TERM, groups_per_step=GROUPS, steps=STEPS)
    trainer_term = board.new_trainer_term()

    # The engine: generates in a thread of its own and reports each sample when it has ended.
    outputs: queue.Queue[Output] = queue.Queue()
    engine = TransformersEngine(
        AutoModelForCausalLM.from_pretrained(model).eval(),
        decode=lambda tokens: "".join(map(chr, tokens)),
        end_ids=[END],
        max_running_samples=64,
        on_output=lambda _, reported: [outputs.put(output) for output in reported],
        on_failure=lambda request_id, reason: print(f"{request_id} failed: {reason}"),
    )

    # The trainer: Megatron, here with one rank.
    settings = GRPOConfig()
    algorithm = create(settings)
    learner = Learner(model, TrainerConfig(optimizer=OptimizerConfig(lr=1e-2)), settings, steps=STEPS)

    for step in range(1, STEPS + 1):
        # New weights: pause between two tokens, copy, go on. Services do this by a broadcast over NCCL or gloo.
        version = learner.step
        engine.pause("in_place", lease_seconds=60, timeout=60)
        with engine.update(Version(TERM, version)):
            engine.touch()
            engine.model.load_state_dict(dict(learner.iter_hf_tensors()), strict=False)
        engine.resume()

        # The coordinator publishes prompts through a gate, which knows how old the oldest weights in use are.
        board.set_gate(term=TERM, oldest_version=version, open=True)
        prompt = np.frombuffer(b"Write: ", np.uint8).astype(np.int32)
        ids = [f"step-{step}-group-{number}" for number in range(GROUPS)]
        columns = {"prompt_tokens": prompt, "prompt": {"text": "Write: "}}
        board.publish(term=TERM, groups=[NewGroup(group_id, columns) for group_id in ids])

        # Rollout: several samples of each prompt make a group.
        deliveries = board.take("rollout", "me", count=GROUPS, block_seconds=5)
        for delivery in deliveries:
            board.begin(delivery, version)
            sampling = Sampling(NEW_TOKENS, seed=group_seed(0, delivery.group_id))
            engine.submit(Request(delivery.group_id, tuple(prompt.tolist()), SAMPLES, sampling))
            samples = Answers(SAMPLES)
            while not samples.ended:
                samples.take(outputs.get(timeout=60))
            board.commit([(delivery, samples.columns(STAGES["rollout"].writes))])

        # Reward: judge each answer.
        deliveries = board.take("reward", "me", count=GROUPS, block_seconds=5)
        for delivery, read in zip(deliveries, board.load(deliveries, ["text"]), strict=True):
            rewards = np.array([sum(map(str.islower, text)) / NEW_TOKENS for text in read["text"]])
            board.commit([(delivery, {"reward": rewards, "reward_parts": {}})])

        # Advantage: how much better than the rest of its group an answer was, for each token.
        deliveries = board.take("advantage", "me", count=GROUPS, block_seconds=5)
        for delivery, read in zip(deliveries, board.load(deliveries, ["reward", "lengths"]), strict=True):
            found = algorithm.advantages(read["reward"], read["lengths"])  # here each sample is one sequence
            if isinstance(found, Filtered):  # such as a group whose answers are all equally good
                board.drop(delivery, reason=found.reason, counts="filtered")
            else:
                board.commit([(delivery, {"advantages": found.values})])

        # Train: pack each group into a micro-batch, add up gradients, step, and write the step into the ledger.
        deliveries = board.take("train", "me", count=GROUPS, block_seconds=5)
        needs = board.needs("train")
        groups = [
            check_group(delivery.group_id, read, needs)
            for delivery, read in zip(deliveries, board.load(deliveries, needs), strict=True)
        ]
        packed = [group.sequences(range(SAMPLES), algorithm.needs.loss, algorithm, 1.0, version) for group in groups]
        learner.accumulate([pack(sequences) for sequences in packed])
        tokens, answers = sum(group.trained_tokens for group in groups), len(groups) * SAMPLES
        stats = learner.finish(algorithm.normalizer(tokens, answers))
        reward = float(np.mean([group.columns["reward"] for group in groups]))
        board.commit_step(
            term=trainer_term, step=step, plan={"groups": [g.group_id for g in groups]}, metrics={"reward": reward}
        )
        print(f"step {step:2}  reward {reward:.2f}  gradient {stats.grad_norm:.2f}  {groups[0].columns['text'][0]!r}")

    board.counts().check()  # published = open + trained + dropped: nothing was lost, nothing trained twice
    engine.stop()
    board.close()
    return reward


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        port = free_port()
        server = subprocess.Popen(server_command(Path(place) / "redis", port), stdout=subprocess.DEVNULL)
        try:
            wait_until_up(url(port), seconds=10)
            train(Path(place), url(port))
        finally:
            server.terminate()
