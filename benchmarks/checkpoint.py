"""Time for which a checkpoint blocks training, compared with the same steps without one, and time to load it.

    python -m benchmarks.checkpoint                                             # CPU, SmolLM2-135M's shape, float32
    torchrun --nproc-per-node 2 -m benchmarks.checkpoint --threads 1            # the same, two data-parallel ranks
    torchrun --nproc-per-node 1 -m benchmarks.checkpoint --shape 1.7b --tokens 16384 --micro-batches 8       # GPU, bf16

Rounds of steps with and without a checkpoint alternate on one learner, with random weights and random tokens. The
checkpoint uses the trainer service's code: snapshot after a step, writing during the next ones, seal once it is on
disk. Columns:

step s              median of the rounds without a checkpoint
stall s             time for which training is blocked: median (step metric `checkpoint_seconds`)
  its parts, the snapshot's plan and the wait for its copies in the next optimizer step, are below the table
of a step           stall over step; goal: at most 5 %
longer s            extra time of all steps of a round with a checkpoint: stall, and slower steps while it is written
at every = 50       that, as a share of 50 steps (the default of trainer.checkpoint.every)
write s             from the snapshot to everything on disk, while training goes on (seen after a step)
alone s             the same while no rank trains
  x raw             the rate of that, divided by the raw rate of writing
load s              verifying all files and loading them into the learner, none of them in the page cache
  x raw             the rate of that, divided by the raw rate of reading
export s            gathering the weights, writing them as a Hugging Face folder, and fsync
  x raw             the rate of that, divided by the raw rate of writing
largest part        the largest rank's part, as a share of the checkpoint: what a rank's host copies, writes and reads
raw_write, raw_read GB/s of the same ranks, at the same time, that only write as many bytes and call fsync, and read
                    them, in the same folder after the rounds
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu_models import SHAPES, count_parameters, make_batch, prepare_model
from benchmarks.reporting import report
from relaxd.config import GRPOConfig, TrainerConfig
from relaxd.process.garbage import freeze_objects
from relaxd.run_folder import checkpoint_path, checkpoint_steps
from services.trainer.batch.durable import sync
from services.trainer.batch.row_packing import PackedMicroBatch
from services.trainer.checkpoints import folder as folders
from services.trainer.checkpoints.folder import BoardState, CheckpointState, Ledger
from services.trainer.checkpoints.part import CheckpointPart
from services.trainer.learner.learner import Learner
from services.trainer.megatron.parallel import shut_down
from services.trainer.megatron.rank_channel import all_ranks_agree

BLOCK_BYTES = 16_000_000
"""Bytes that a rank writes at a time to measure the disk."""
MOST_RAW = 8.0
"""GB that all ranks write for that at most."""
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def smollm2(folder: Path, layers: int) -> Path:
    """Write a model of SmolLM2-135M's shape with random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SMOLLM2, "num_hidden_layers": layers})).save_pretrained(folder)
    return folder


class Bench:
    """A learner, driven as by a run's trainer."""

    def __init__(self, learner: Learner, batches: Sequence[PackedMicroBatch], folder: Path) -> None:
        self.learner = learner
        self.part = CheckpointPart(learner)
        self.folder = folder
        self._batches = batches
        self._trained = float(sum(int(batch.loss_mask.sum()) for batch in batches) * learner.world.dp_size)
        self._partial: Path | None = None
        self._begun = 0.0
        self._sealer = ThreadPoolExecutor(1)
        self._sealed: Future[None] | None = None
        self.stalled: list[float] = [0.0, 0.0]
        """Seconds for which the plan and the copies have blocked training."""
        self.wrote = 0.0

    def step(self) -> float:
        """Run one optimizer step; return its seconds."""
        began = time.perf_counter()
        self.learner.accumulate(self._batches)
        before = time.perf_counter()
        while not self.part.copied(0.5):
            pass
        self.stalled[1] += time.perf_counter() - before
        self.learner.finish(self._trained)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def begin(self) -> None:
        """Start a checkpoint."""
        self._begun = time.perf_counter()
        self._partial = folders.partial_path(self.folder, self.learner.step, 1)
        if self.learner.world.rank == 0:
            self._partial.mkdir(parents=True)
        dist.barrier()
        self.part.begin(self._partial)
        self.part.write()
        self.stalled[0] += time.perf_counter() - self._begun

    def complete(self) -> bool:
        """Complete the checkpoint if it is written. Return whether none is in progress."""
        if self._partial is None:
            return True
        if self._sealed is not None:
            if not all_ranks_agree(self._sealed.done(), device=self.learner.world.device):
                return False
            self._sealed.result()
            self._sealed, self._partial = None, None
            self.wrote = time.perf_counter() - self._begun
            return True
        reports = self.part.reports()
        if all_ranks_agree(reports is not None, device=self.learner.world.device) and reports is not None:
            self.part.end()
            self._sealed = self._sealer.submit(self._seal, self._partial, self.learner.step, reports)
        return False

    def _seal(self, partial: Path, step: int, reports: list[dict[str, Any]]) -> None:
        if self.learner.world.rank == 0:
            errors = [report["error"] for report in reports if "error" in report]
            assert not errors, errors
            files = {name: file for report in reports for name, file in report["files"].items()}
            final = checkpoint_path(self.folder, step)
            folders.seal(partial, final, make_state(step), files)
            folders.rotate(self.folder, 1)
            folders.remove_rotated(self.folder)

    def load(self) -> float:
        """Verify and load the newest checkpoint; return the seconds of both."""
        dist.barrier()
        (step,) = checkpoint_steps(self.folder)
        path = checkpoint_path(self.folder, step)
        for file in path.iterdir():
            leave_page_cache(file)
        dist.barrier()
        began = time.perf_counter()
        assert self.part.intact(path)
        self.learner.restore(path, step, same_layout=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - began

    def export(self) -> tuple[float, float]:
        """Export the model; return the seconds, and the GB on disk."""
        folder = self.folder / "export"
        dist.barrier()
        began = time.perf_counter()
        self.learner.save_hf(folder)
        files = list(folder.glob("*.safetensors"))
        for file in files:
            sync(file)
        return time.perf_counter() - began, sum(file.stat().st_size for file in files) / 1e9

    def save_alone(self) -> float:
        """Save a checkpoint while nothing else happens; return the seconds."""
        self.step()  # so that it is of a new step
        dist.barrier()
        self.begin()
        while not self.complete():
            time.sleep(0.005)
        return self.wrote


def make_state(step: int) -> CheckpointState:
    """Return a checkpoint's state.json as of a run."""
    board = BoardState(cursor=0, open_groups=(), published=0, trained=0, dropped=0, dropped_by_reason={})
    sections: dict[str, Any] = {"trainer": {}, "algorithm": {}, "versions": {}}
    return CheckpointState(
        run_id="benchmark", step=step, term=1, ledger=Ledger(step=step), board=board, **sections
    )  # fmt: skip


def leave_page_cache(path: Path) -> None:
    """Let the system forget a file's content, which is on disk, so that it is read from there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def raw_rates(folder: Path, rank: int, ranks: int, size: float) -> tuple[float, float]:
    """Return the GB/s at which all ranks write `size` GB in all, with fsync, and at which they read them.

    Each rank has a file of its own and one thread.
    """
    block = memoryview(os.urandom(BLOCK_BYTES))
    count = max(1, round(size * 1e9 / ranks / len(block)))
    path, rates = folder / f"raw-{rank}", []
    for reading in (False, True):
        if reading:
            leave_page_cache(path)
        dist.barrier()
        began = time.perf_counter()
        with path.open("rb" if reading else "wb", buffering=0) as file:
            into = memoryview(bytearray(len(block)))
            for _ in range(count):
                done = file.readinto(into) if reading else file.write(block)  # type: ignore[attr-defined]
                assert done == len(block)
            if not reading:
                os.fsync(file.fileno())
        dist.barrier()
        rates.append(ranks * count * len(block) / 1e9 / (time.perf_counter() - began))
    path.unlink()
    return rates[0], rates[1]


def measure(bench: Bench, rounds: int, steps: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure rounds of steps, alternately without and with a checkpoint after the first step.

    Returns:
        The row of the table, and what is said below it.
    """
    bench.step()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    singles, stalls, writes, spans = [], [], [], []
    for number in range(rounds):
        for saving in (False, True):
            bench.step()
            bench.stalled, began, done = [0.0, 0.0], time.perf_counter(), 0
            if saving:
                bench.begin()
            while done < steps or not bench.complete():
                singles += [] if saving else [bench.step()]
                if saving:
                    bench.step()
                    bench.complete()
                done += 1
            whole = time.perf_counter() - began
            if saving:
                stalls.append(bench.stalled)
                writes.append(bench.wrote)
                # The same number of steps as without a checkpoint.
                spans.append(whole - done * statistics.mean(seconds[False][-1:]))
            else:
                seconds[False].append(whole / done)
        if bench.learner.world.rank == 0:
            parts = " + ".join(f"{part:.3f}" for part in stalls[-1])
            found = f"step {singles[-1]:.3f} s, stall {sum(stalls[-1]):.3f} s ({parts}), written {writes[-1]:.1f} s"
            print(f"round {number}: {found}", flush=True)
    step, longer, written = (statistics.median(each) for each in (singles, spans, writes))
    stall = statistics.median(map(sum, stalls))
    learner, alone = bench.learner, bench.save_alone()
    (saved,) = checkpoint_steps(bench.folder)
    checkpoint = checkpoint_path(bench.folder, saved)
    parts = [
        sum(file.stat().st_size for file in checkpoint.glob(f"rank-{rank:05d}-*")) for rank in range(learner.world.size)
    ]
    size = sum(parts) / 1e9
    load, (export, exported) = bench.load(), bench.export()
    raw_write, raw_read = raw_rates(bench.folder, learner.world.rank, learner.world.size, min(size, MOST_RAW))
    row = {
        "GB": size,
        "largest part": f"{max(parts) / sum(parts):.1%}",
        "step s": step,
        "stall s": stall,
        "of a step": f"{stall / step:.1%}",
        "longer s": longer,
        "at every = 50": f"{longer / (50 * step):.2%}",
        "write s": written,
        "alone s": alone,
        "write x raw": size / alone / raw_write,
        "load s": load,
        "load x raw": size / load / raw_read,
        "export s": export,
        "export x raw": exported / export / raw_write,
    }
    plan, copies = (statistics.median(part) for part in zip(*stalls, strict=True))
    facts = {
        "stall_of_plan": f"{plan:.3f} s",
        "stall_of_copies": f"{copies:.3f} s",
        "raw_write": f"{raw_write:.2f} GB/s",
        "raw_read": f"{raw_read:.2f} GB/s",
    }
    return row, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["smollm2", *SHAPES], default="smollm2")
    parser.add_argument("--layers", type=int, default=30, help="of smollm2: fewer make a quick smoke test")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of one micro-batch")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, on each data-parallel rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a round, at least")
    parser.add_argument("--threads", type=int, default=0, help="on CPU")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="relaxd-bench-", dir=options.folder) as place:
        if options.shape in SHAPES:
            model = prepare_model(options.shape, None)
        else:
            model = smollm2(Path(place) / "model", options.layers)
        config = TrainerConfig.model_validate(
            {
                "dtype": "bfloat16" if gpu else "float32",
                "ranks": ranks,
                "threads": options.threads,
                "micro_batch_tokens": options.tokens,
            }
        )
        learner = Learner(model, config, GRPOConfig(old_logprobs="current"), steps=1000)
        freeze_objects()
        vocabulary = AutoConfig.from_pretrained(model).vocab_size
        batches = [
            make_batch(vocabulary, options.tokens, options.sequences, seed) for seed in range(options.micro_batches)
        ]
        shared = [place]
        dist.broadcast_object_list(shared)
        row, facts = measure(Bench(learner, batches, Path(shared[0]) / "run"), options.rounds, options.steps)
        parameters = f"{count_parameters(learner) / 1e9:.3f}B"
        if learner.world.rank == 0:
            report(
                f"checkpoint-{options.shape}-{ranks}{'-gpu' if gpu else ''}",
                [row],
                model=f"{options.shape}, {parameters} parameters, {ranks} ranks",
                **facts,
                goal="a stall of at most 5 % of a step",
                device=torch.cuda.get_device_name() if gpu else "cpu",
                tokens_of_a_step=options.tokens * options.micro_batches * learner.world.dp_size,
                rounds=options.rounds,
                torch=torch.__version__,
            )
        dist.barrier()
    shut_down()


if __name__ == "__main__":
    main()
