"""Training on answers that are a number of versions old, in one process: the trainer's learner and loss, and an engine.

The engine is transformers' `generate` on its own copy of the model, in a precision of its own; after each step it gets
the new weights. Its answers wait in a queue before they are trained on, as long as the setting says: every token of
step s was written by version max(0, s - 1 - delay).
"""

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from relaxd.algorithms import Filtered, create
from relaxd.config import AlgorithmConfig, TrainerConfig
from relaxd.data.addition import addition
from relaxd.data.tokens import PromptTokenizer
from relaxd.rewards.addition import addition as score_addition
from relaxd.rewards.base import RewardInput
from services.rollout.engines.transformers.weights import named_parameters
from services.trainer.batch.packing import TrainSample, assign, pack
from services.trainer.learner.learner import Learner
from services.trainer.megatron.parallel import shut_down

FIRST_DIGIT = 20
"""Token id of the 0 of the counting task."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all that are compared."""

    model: Path
    task: str
    """counting: a tiny random model learns to write 0 1 2 ... 9 0 1 ...; addition: a language model learns sums."""
    steps: int
    groups: int
    samples: int
    new_tokens: int
    lr: float
    trainer_dtype: str
    engine_dtype: str
    threads: int


@dataclass
class Group:
    """The engine's answers to one prompt."""

    prompt: NDArray[np.int64]
    responses: list[NDArray[np.int64]]
    logprobs: list[NDArray[np.float32]]
    rewards: NDArray[np.float64]
    version: int


def counting_reward(tokens: NDArray[np.int64]) -> float:
    """Half the share of digits, and half the share of tokens that are the digit after the one before them."""
    digit = (tokens >= FIRST_DIGIT) & (tokens < FIRST_DIGIT + 10)
    follows = digit[1:] & digit[:-1] & ((tokens[1:] - tokens[:-1]) % 10 == 1)
    return 0.5 * float(digit.mean()) + 0.5 * float(follows.mean())


class Engine:
    """Answers with transformers."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self._setting = setting
        self._device = device
        dtype = getattr(torch, setting.engine_dtype)
        self._model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=dtype).eval().to(device)
        self._parameters = named_parameters(self._model)
        self._tokenizer = AutoTokenizer.from_pretrained(setting.model)
        self._ends: list[int] = []
        if setting.task == "addition":
            self._examples, _ = addition(2)
            self._prompts = PromptTokenizer(setting.model)
            self._ends = [int(self._tokenizer.eos_token_id)]
        self._model.generation_config.eos_token_id = self._ends or None
        self._model.generation_config.pad_token_id = 0

    def load(self, learner: Learner) -> None:
        """Take over the learner's weights."""
        with torch.no_grad():
            for name, tensor in learner.iter_hf_tensors():
                self._parameters[name].copy_(tensor)

    def answer(self, version: int, seed: int) -> list[Group]:
        """Answer new prompts, `samples` times each. The seed decides which prompts, and what is drawn."""
        setting, random = self._setting, np.random.default_rng(seed)
        if setting.task == "addition":
            examples = [self._examples[i] for i in random.integers(0, len(self._examples), setting.groups)]
            prompts = [tokens.astype(np.int64) for tokens in self._prompts.encode(examples)]
        else:
            prompts = [random.integers(3, 259, 4) for _ in range(setting.groups)]
        width = max(map(len, prompts))
        padded = torch.tensor(np.stack([np.pad(prompt, (width - len(prompt), 0)) for prompt in prompts]))
        attention = torch.tensor([[i >= width - len(prompt) for i in range(width)] for prompt in prompts]).long()
        torch.manual_seed(seed)
        with torch.no_grad():
            output = self._model.generate(
                padded.repeat_interleave(setting.samples, 0).to(self._device),
                attention_mask=attention.repeat_interleave(setting.samples, 0).to(self._device),
                max_new_tokens=setting.new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        tokens = output.sequences[:, width:]
        found = [
            scores.float().log_softmax(-1).gather(-1, tokens[:, place, None])[:, 0]
            for place, scores in enumerate(output.scores)
        ]
        logprobs, answers = torch.stack(found, 1).cpu().numpy(), tokens.cpu().numpy()
        groups = []
        for index, prompt in enumerate(prompts):
            rows = range(index * setting.samples, (index + 1) * setting.samples)
            lengths = [self._length(answers[row]) for row in rows]
            responses = [answers[row, :length] for row, length in zip(rows, lengths, strict=True)]
            if setting.task == "addition":
                right = examples[index].answer
                texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses]
                rewards = [score_addition(RewardInput("", text, right))["reward"] for text in texts]
            else:
                rewards = [counting_reward(tokens) for tokens in responses]
            ours = [logprobs[row, :length] for row, length in zip(rows, lengths, strict=True)]
            groups.append(Group(prompt, responses, ours, np.asarray(rewards), version))
        return groups

    def _length(self, tokens: NDArray[np.int64]) -> int:
        ends = np.flatnonzero(np.isin(tokens, self._ends))
        return int(ends[0]) + 1 if ends.size else len(tokens)


def train(
    setting: Setting, algorithm: AlgorithmConfig, delay: int, seed: int, tell: Callable[[dict[str, Any]], None]
) -> list[dict[str, float]]:
    """Train a model anew.

    Returns:
        For each step its metrics, and "reward": the mean reward of answers that the step's own version wrote, whenever
        they are trained on.
    """
    config = TrainerConfig.model_validate(
        {
            "dtype": setting.trainer_dtype,
            "threads": setting.threads,
            "micro_batch_tokens": 16384,
            "optimizer": {"lr": setting.lr},
        }
    )
    learner = Learner(setting.model, config, algorithm, steps=setting.steps, seed=seed)
    engine = Engine(setting, learner.world.device)
    engine.load(learner)
    waiting = deque(engine.answer(0, 10_000 * seed + step) for step in range(delay))
    lines: list[dict[str, float]] = []
    for step in range(1, setting.steps + 1):
        fresh = engine.answer(step - 1, 10_000 * seed + delay + step)
        waiting.append(fresh)
        metrics = train_step(learner, algorithm, waiting.popleft())
        engine.load(learner)
        reward = float(np.mean([group.rewards.mean() for group in fresh]))
        lines.append({"step": step, "reward": reward, **metrics})
        tell(lines[-1])
    del learner, engine
    shut_down()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return lines


def train_step(learner: Learner, algorithm: AlgorithmConfig, groups: list[Group]) -> dict[str, float]:
    """One optimizer step, as the trainer service does it; groups without variance are left out."""
    made = create(algorithm)
    samples = []
    for group in groups:
        lengths = np.array([len(tokens) for tokens in group.responses], np.int32)
        advantages = made.advantages(group.rewards, lengths)
        if isinstance(advantages, Filtered):
            continue
        weights = made.token_weights(np.ones(int(lengths.sum()), np.uint8), lengths)
        begin = 0
        for tokens, logprobs in zip(group.responses, group.logprobs, strict=True):
            own = slice(begin, begin + len(tokens))
            begin += len(tokens)
            samples.append(
                TrainSample.from_response(
                    group.prompt,
                    tokens,
                    loss_mask=np.ones(len(tokens), np.uint8),
                    rollout_logprobs=logprobs,
                    advantages=advantages.values[own],
                    weight=weights[own],
                    logprobs_comparable=group.version == learner.step,
                )
            )
    for batch in assign([len(sample.tokens) for sample in samples], 16384):
        learner.accumulate([pack([samples[i] for i in batch])])
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    stats = learner.finish(made.normalizer(trained, len(samples)))
    return {"grad_norm": stats.grad_norm, "loss": stats.loss, **stats.metrics}
