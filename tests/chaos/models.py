"""What the step files of a run have of other models than the policy, computed again once the run is over.

- Log-probs of the reference and the teacher, which never change: by transformers.
- A critic service's values, its numbers in each step, its weights in each checkpoint: a critic that nobody disturbs is
  trained on all step files, from the first to the last. Values that another version of the critic has given differ, and
  so does everything after a step on which the critic was trained twice, or never.

`python -m tests.chaos.models RUN_FOLDER` prints what is wrong as a JSON list.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 2e-4
"""Of a log-prob or a value: the order of sums differs. One more update changes values by a hundred times as much."""
AUDIT_SECONDS = 7200.0
"""Limit of an audit, which takes as long as training the critic on every step."""


def audit_models(run_folder: Path) -> list[str]:
    """Compute it in a process of its own, which may have a Megatron world. Returns what is wrong."""
    command = [sys.executable, "-m", "tests.chaos.models", str(run_folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=AUDIT_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"the models could not be audited within {AUDIT_SECONDS:g} s"]
    if done.returncode:
        return [f"the models could not be audited: {done.stderr[-2000:]}"]
    wrong: list[str] = json.loads(done.stdout.splitlines()[-1])
    return wrong


def audit_frozen(run_folder: Path, config: Any) -> Iterator[str]:
    """Compare the log-probs of reference and teacher in every step file that is there."""
    import torch
    from transformers import AutoModelForCausalLM

    from services.trainer.batch.step_plan import read_step_file

    sources = {
        "reference": ("ref_logprobs", config.model.path),
        "teacher": ("teacher_logprobs", config.roles.teacher.model),
    }
    found = (sources[role] for role in config.frozen_roles())
    models = {name: AutoModelForCausalLM.from_pretrained(path).eval() for name, path in found}
    for path in sorted((run_folder / "steps").glob("step-*.safetensors")):
        groups = read_step_file(path).groups
        rows, prompts, owners = [], [], []
        for group_id, columns in groups.items():
            prompt, ends = columns["prompt_tokens"], np.cumsum(columns["lengths"])
            for begin, end in zip(ends - columns["lengths"], ends, strict=True):
                rows.append(torch.from_numpy(np.concatenate([prompt, columns["tokens"][begin:end]]).astype(np.int64)))
                prompts.append(len(prompt))
                owners.append((group_id, slice(begin, end)))
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # at the end, where causal models don't look
        for name, model in models.items():
            with torch.no_grad():
                every = (model(padded).logits / config.rollout.temperature).log_softmax(-1)
            for of_row, row, prompt, (group_id, own) in zip(every, rows, prompts, owners, strict=True):
                due = of_row[prompt - 1 : len(row) - 1].gather(-1, row[prompt:, None])[:, 0].numpy()
                if (error := np.abs(due - groups[group_id][name][own]).max(initial=0.0)) > TOLERANCE:
                    yield f"{path.name}: {name} of group {group_id} are wrong by {error:.2g}"


class UndisturbedCritic:
    """A critic that is trained on all steps of a run, and compared with the one that was killed now and then."""

    def __init__(self, run_folder: Path, config: Any) -> None:
        from services.trainer.critic_rank import CriticLearner

        self._folder, self._config = run_folder, config
        self._learner = CriticLearner(config)
        lines = (run_folder / "ledger.jsonl").read_text().splitlines()
        self._plans = [json.loads(line)["plan"] for line in lines]
        self._most = config.roles.critic.max_value_staleness

    def audit(self) -> Iterator[str]:
        """Train on every step, and say what is otherwise in the files of those around it."""
        for step in range(len(self._plans)):
            for number in range(step + 1, min(len(self._plans), step + 1 + self._most) + 1):
                yield from self._compare(number)
            file = self._read(step + 1)
            for group_id, columns in file.groups.items():
                if not 0 <= step - columns["critic_state"]["step"] <= self._most:
                    yield f"step {step + 1}: group {group_id} has values of the critic of {columns['critic_state']}"
            self._learner.train(file)
            yield from self._compare_checkpoint(step + 1)

    def _read(self, step: int) -> Any:
        from services.trainer.batch.step_plan import read_committed

        return read_committed(self._folder, step, self._plans[step - 1])

    def _compare(self, number: int) -> Iterator[str]:
        """Compare a step's values, and the critic's numbers, where they are of the step that this critic has."""
        from services.trainer.batch.micro_batch import pack

        learner, file = self._learner, self._read(number)
        for group_id, columns in file.groups.items():
            state = columns["critic_state"]
            if state["step"] != learner.step:
                continue
            if state["metrics"] != learner.metrics:
                yield f"step {number}: the critic of step {learner.step} had {state['metrics']}, not {learner.metrics}"
            group = learner._group(group_id, file)
            every = range(len(columns["lengths"]))
            rows = group.sequences(every, (), learner._algorithm, self._config.rollout.temperature, None)
            batch, begin = pack(rows), 0
            (due,) = learner.values([batch])
            for end, length in zip(batch.cu_seqlens[1:], columns["lengths"].tolist(), strict=True):
                found = columns["values"][begin : begin + length]
                if (error := np.abs(due["values"][end - length : end] - found).max(initial=0.0)) > TOLERANCE:
                    yield f"step {number}: values of group {group_id}, of critic {learner.step}: wrong by {error:.2g}"
                begin += length

    def _compare_checkpoint(self, step: int) -> Iterator[str]:
        """Compare the weights' checksum with that of a checkpoint of this step, if there is one."""
        path = self._folder / "critic" / "checkpoints" / f"step-{step:06d}" / "state.json"
        if path.is_file() and (saved := json.loads(path.read_text())["weights_checksum"]) != self._learner.checksum():
            yield f"the critic's checkpoint of step {step} has the checksum {saved}, not {self._learner.checksum()}"


def main() -> None:
    """Audit a folder."""
    from relaxd.config import RunConfig

    run_folder = Path(sys.argv[1])
    config = RunConfig.model_validate_json((run_folder / "config.json").read_text())
    wrong = list(audit_frozen(run_folder, config))
    if config.roles.critic.placement == "service":
        wrong += UndisturbedCritic(run_folder, config).audit()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
