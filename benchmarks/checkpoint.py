"""Time for which a checkpoint blocks training, and rates of saving, restoring and exporting beside those of the disk.

    python -m benchmarks.checkpoint                                             # CPU, SmolLM2-135M's shape, float32
    torchrun --nproc-per-node 2 -m benchmarks.checkpoint --threads 1            # the same, two data-parallel ranks
    THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.checkpoint --gpu                # one GPU, 1.7 B parameters, bf16

Rounds of steps with and without a checkpoint alternate on one learner, with random weights and random tokens. The
checkpoint uses the trainer service's code: memory prepared before the first step, snapshot after a step, writing during
the next ones, seal once it is on disk. A row of the table for each of:

write, training     from the snapshot to a sealed checkpoint on disk, while training goes on (the ranks' files are
                    seen after a step): median
write, alone        the same while no rank trains: median of two
restore             verifying all files and loading them into the learner, none of them in the page cache
export              gathering the weights, writing them as a Hugging Face folder, and fsync

with its bytes and seconds, and its rate beside the raw one: as many files of the same sizes, each written by a thread
of its own with fsync, or read, not from the page cache, by the same ranks, in the same folder. Raw writes go through
the page cache; a checkpoint's don't where the file system can do without. Raw rates are means of two measurements,
before and after those of checkpoints. Below the table:

step                median of the rounds without a checkpoint
stall               time for which training is blocked: median (step metric `checkpoint_seconds`); goal: at most 5 %
  of plan, of copies  its parts: the snapshot's plan, and the wait for its copies in the next optimizer step
first_stall         that of the first checkpoint
longer              extra time of all steps of a round with a checkpoint: stall, and slower steps while it is written,
                    also as a share of 50 steps (the default of trainer.checkpoint.every)
removal             of the checkpoint before, once the new one is sealed, which no row counts: median
largest_part        the largest rank's part, as a share of the checkpoint: what a rank's host copies, writes and reads

At its peak there are two checkpoints, or one and as much again, on the disk; and in the host's memory one copy of the
state.
"""

import argparse
import os
import shutil
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
from relaxd.process.upkeep import freeze_objects
from relaxd.run_folder import checkpoint_path, checkpoint_steps, checkpoints_folder
from services.trainer.batch.disk_files import sync
from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.learner.learner import Learner
from services.trainer.loop import checkpoint_folders as folders
from services.trainer.loop.checkpoint_folders import BoardState, CheckpointState, Ledger
from services.trainer.loop.commanded_rank import CheckpointPart
from services.trainer.megatron.channels import all_ranks_agree
from tests.kit.megatron_world import shut_down

BLOCK_BYTES = 16 << 20
"""Bytes that a thread writes at a time to measure the disk."""
GPU_DEFAULTS = {"shape": "1.7b", "tokens": 16384, "micro_batches": 8}
"""Options of --gpu: steps of about three seconds, 20.6 GB a checkpoint."""
ALONE = 2
"""Checkpoints that are saved while no rank trains."""
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
        learner.prepare_snapshots()
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
        """Seconds until the last checkpoint was sealed."""
        self.removals: list[float] = []
        """Seconds that the removal of each earlier one took."""

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
            self.wrote = time.perf_counter() - self._begun
            folders.rotate(self.folder, 1)
            folders.remove_rotated(self.folder).join()
            self.removals.append(time.perf_counter() - self._begun - self.wrote)

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

    def files(self) -> list[list[int]]:
        """Return the sizes of each rank's files of the newest checkpoint, which is complete."""
        dist.barrier()
        path = checkpoint_path(self.folder, checkpoint_steps(self.folder)[0])
        ranks = range(self.learner.world.size)
        return [[file.stat().st_size for file in path.glob(f"rank-{rank:05d}-*")] for rank in ranks]

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints."""
        dist.barrier()
        if self.learner.world.rank == 0:
            shutil.rmtree(checkpoints_folder(self.folder))
        dist.barrier()

    def export(self) -> tuple[float, list[int]]:
        """Export the model; return the seconds, and the sizes of the files."""
        folder = self.folder / "export"
        dist.barrier()
        began = time.perf_counter()
        self.learner.save_hf(folder)
        files = list(folder.glob("*.safetensors"))
        for file in files:
            sync(file)
        dist.barrier()
        return time.perf_counter() - began, [file.stat().st_size for file in files]

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


def raw_rates(folder: Path, rank: int, files: Sequence[Sequence[int]]) -> list[float]:
    """Return the GB/s at which the ranks write files, with fsync, and at which they read them.

    Args:
        folder: where the files go for a moment.
        rank: this rank.
        files: each rank's sizes. A thread of its own writes and reads each file.
    """
    block = memoryview(os.urandom(BLOCK_BYTES))
    work = [(folder / f"raw-{rank}-{number}", size) for number, size in enumerate(files[rank])]
    rates = []
    with ThreadPoolExecutor(max(1, len(work))) as pool:
        for reading in (False, True):
            for path, _ in work if reading else ():
                leave_page_cache(path)
            dist.barrier()
            began = time.perf_counter()
            moved = [pool.submit(move, path, size, block, reading=reading) for path, size in work]
            for one in moved:
                one.result()
            dist.barrier()
            rates.append(sum(map(sum, files)) / 1e9 / (time.perf_counter() - began))
    for path, _ in work:
        path.unlink()
    return rates


def move(path: Path, size: int, block: memoryview, *, reading: bool) -> None:
    """Write or read a file of so many bytes."""
    into = memoryview(bytearray(len(block)))
    with path.open("rb" if reading else "wb", buffering=0) as file:
        while size > 0:
            part = min(size, len(block))
            done = file.readinto(into[:part]) if reading else file.write(block[:part])  # type: ignore[attr-defined]
            assert done, path
            size -= done
        if not reading:
            os.fsync(file.fileno())


def measure(bench: Bench, rounds: int, steps: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure all of it. Return the rows of the table, and what is said below it."""
    facts, training = measure_stall(bench, rounds, steps)
    rank, size = bench.learner.world.rank, bench.learner.world.size
    files = bench.files()
    raw = [raw_rates(bench.folder, rank, files)]
    alone = statistics.median(bench.save_alone() for _ in range(ALONE))
    load, (export, exported) = bench.load(), bench.export()
    bench.remove_checkpoints()  # the disk need not have room for it and for the raw files
    raw.append(raw_rates(bench.folder, rank, files))
    of_export = [raw_rates(bench.folder, rank, [exported, *([] for _ in range(size - 1))]) for _ in range(2)]
    whole = sum(map(sum, files))
    write, read = (statistics.mean(rates) for rates in zip(*raw, strict=True))
    rows = [
        row("write, training", whole, training, write),
        row("write, alone", whole, alone, write),
        row("restore", whole, load, read),
        row("export", sum(exported), export, statistics.mean(rates[0] for rates in of_export)),
    ]
    for number, name in enumerate(("write", "read")):
        facts[f"raw_{name}"] = ", ".join(f"{rates[number]:.2f} GB/s" for rates in raw)
    facts["raw_write_of_export"] = ", ".join(f"{rates[0]:.2f} GB/s" for rates in of_export)
    if bench.removals[1:]:  # the first checkpoint had none before it
        facts["removal"] = f"{statistics.median(bench.removals[1:]):.1f} s"
    facts["largest_part"] = f"{max(map(sum, files)) / whole:.1%}"
    return rows, facts


def row(what: str, size: int, seconds: float, raw: float) -> dict[str, Any]:
    """Return a row of the table: what has taken some seconds for so many bytes, beside a raw rate in GB/s."""
    rate = size / 1e9 / seconds
    return {"what": what, "GB": size / 1e9, "s": seconds, "GB/s": rate, "raw GB/s": raw, "x raw": rate / raw}


def measure_stall(bench: Bench, rounds: int, steps: int) -> tuple[dict[str, str], float]:
    """Measure rounds of steps, alternately without and with a checkpoint after the first step.

    Returns:
        What is said of the stalls, and the median of the seconds until a checkpoint is written.
    """
    bench.step()
    singles, stalls, writes, spans = [], [], [], []
    for number in range(rounds):
        plain = 0.0
        for saving in (False, True):
            bench.step()
            bench.stalled, began, done = [0.0, 0.0], time.perf_counter(), 0
            if saving:
                bench.begin()
            while done < steps or not bench.complete():
                seconds = bench.step()
                singles += [] if saving else [seconds]
                if saving:
                    bench.complete()
                done += 1
            whole = time.perf_counter() - began
            if saving:
                stalls.append(bench.stalled)
                writes.append(bench.wrote)
                spans.append(whole - done * plain)
            else:
                plain = whole / done
        if bench.learner.world.rank == 0:
            parts = " + ".join(f"{part:.3f}" for part in stalls[-1])
            found = f"step {singles[-1]:.3f} s, stall {sum(stalls[-1]):.3f} s ({parts}), written {writes[-1]:.1f} s"
            print(f"round {number}: {found}", flush=True)
    step, longer = statistics.median(singles), statistics.median(spans)
    of_plan, of_copies = (statistics.median(part) for part in zip(*stalls, strict=True))

    def share(seconds: float) -> str:
        return f"{seconds:.3f} s, {seconds / step:.1%} of a step"

    facts = {
        "step": f"{step:.3f} s",
        "stall": share(statistics.median(map(sum, stalls))),
        "stall_of_plan": f"{of_plan:.3f} s",
        "stall_of_copies": f"{of_copies:.3f} s",
        "first_stall": share(sum(stalls[0])),
        "longer": f"{longer:.3f} s, {longer / (50 * step):.2%} of 50 steps",
    }
    return facts, statistics.median(writes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpu", action="store_true", help=f"refuse to run without a GPU; other defaults: {GPU_DEFAULTS}"
    )
    parser.add_argument("--shape", choices=["smollm2", *SHAPES], default="smollm2")
    parser.add_argument("--layers", type=int, default=30, help="of smollm2: fewer make a quick smoke test")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of one micro-batch")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, on each data-parallel rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a round, at least")
    parser.add_argument("--threads", type=int, default=0, help="on CPU")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    if parser.parse_known_args()[0].gpu:
        if not torch.cuda.is_available():
            parser.error("--gpu: torch sees no GPU")
        parser.set_defaults(**GPU_DEFAULTS)
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
        rows, facts = measure(Bench(learner, batches, Path(shared[0]) / "run"), options.rounds, options.steps)
        parameters = f"{count_parameters(learner) / 1e9:.3f}B"
        if learner.world.rank == 0:
            report(
                f"checkpoint-{options.shape}-{ranks}{'-gpu' if gpu else ''}",
                rows,
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
