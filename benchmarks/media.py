"""Cost of media on a CPU: of their normal form, their way over the board, and a run's steps.

    python -m benchmarks.media pool     # items/s of the coordinator's threads beside the decoder alone
    python -m benchmarks.media bytes    # bytes into and out of the board's Redis for each prompt
    python -m benchmarks.media steps    # seconds of a step beside the same tokens as text

pool: pictures of 640 x 480 (JPEG), clips of 4 s (H.264, 320 x 240, 24 frames a second, 8 of them sampled) and sounds of
5 s (MP3, 44,100 Hz, stereo) in files. "decoder" is Pillow or PyAV in as many threads: pixels of what is sampled, or
samples. relaxd reads, decodes, resizes, hashes and stores them (`MediaAhead`). Both take turns.

bytes: groups of 8 answers of 256 tokens whose prompts have a picture of 300 tokens, or as much text, go through all
stages on a real board; Redis counts.

steps: `relaxd run` on a Qwen3-VL with random weights whose tower, which is frozen, has a quarter of the decoder's
parameters, as Qwen3-VL 2B's has: 4 groups of 8 answers of 64 tokens, pictures of 256 tokens. "new" has another one in
each group, "again" the same 4 ones in each step, "text" as many tokens of text. Cases take turns. Processor seconds are
those of all processes of a run, a step; the others are medians of its steps from the third one on.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import psutil
import redis
from PIL import Image

from benchmarks.reporting import report
from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA, NewGroup
from relaxd.config import DataConfig, RunConfig
from relaxd.data.examples import Example
from relaxd.data.vision import KEPT, THREADS, MediaAhead, read_vision
from relaxd.media.images import normalise_image
from relaxd.media.kinds import NormalMedia
from relaxd.media.media_tokens import expand
from relaxd.media.placeholders import MediaItem
from relaxd.media.prompt_media import to_columns
from tests.integration.trainer.service_kit import Feeder, make_config
from tests.kit.redis.redis_server import RedisServer
from tests.kit.sounds import encoded_sound, sound, write_omni_model
from tests.kit.vision import encoded, encoded_clip, make_vision_model, write_vision_model

SIZE = (640, 480)
CLIP = (320, 240)
RATE, SECONDS = 24, 4
SOUND_SECONDS = 5
LIMITS = DataConfig(
    source="addition",
    media_keys={"image": "images", "video": "videos", "audio": "sounds"},
    max_image_tokens=1024,
    max_video_tokens=2048,
)
GROUPS, SAMPLES, ANSWER = 32, 8, 256
"""Of `bytes`."""
STEP_GROUPS, STEPS, SIDE = 4, 10, 512
"""Of `steps`: groups, steps, and pixels of a picture's side."""
FIRST = 2
"""Steps that aren't counted."""
RUN_SECONDS = 1200.0
"""Deadline of a run."""
QUESTION = "What is to be seen in it, really?"


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Return noise of four scales, which JPEG makes about as small as a photograph."""
    generator = np.random.default_rng(seed)
    found = np.full((height, width, 3), 128.0)
    for scale, amount in ((64, 45), (16, 20), (4, 7), (1, 2.5)):
        noise = generator.normal(0, amount, (3, height // scale + 2, width // scale + 2)).astype(np.float32)
        layers = [Image.fromarray(one).resize((width, height), Image.Resampling.BICUBIC) for one in noise]
        found += np.stack([np.asarray(one) for one in layers], axis=-1)
    return Image.fromarray(found.clip(0, 255).astype(np.uint8))


# --- pool ---------------------------------------------------------------------------------------------------------


def decode_picture(path: Path) -> int:
    """Decode a picture to RGB; return the number of values."""
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        return np.asarray(image.convert("RGB")).size


def decode_clip(path: Path) -> int:
    """Decode a clip, and the frames that are sampled to RGB; return their number."""
    with av.open(io.BytesIO(path.read_bytes())) as container:
        frames = container.decode(container.streams.video[0])
        return sum(1 for index, frame in enumerate(frames) if index % (RATE // 2) == 0 and frame.to_image())


def decode_sound(path: Path) -> int:
    """Decode a sound; return the number of samples."""
    with av.open(io.BytesIO(path.read_bytes())) as container:
        return sum(frame.samples for frame in container.decode(container.streams.audio[0]))


DECODERS: dict[str, Callable[[Path], int]] = {"image": decode_picture, "video": decode_clip, "audio": decode_sound}


def write_items(folder: Path) -> dict[str, list[Path]]:
    """Write as many items of each kind as the coordinator normalises ahead."""
    contents: dict[str, Callable[[int], bytes]] = {
        "image": lambda seed: encoded(photograph(*SIZE, seed), "JPEG", quality=85),
        "video": lambda seed: encoded_clip(
            [photograph(*CLIP, seed * 1000 + number) for number in range(RATE * SECONDS)],
            *(RATE, "mp4", "libx264", "yuv420p"),
        ),
        "audio": lambda seed: encoded_sound(
            sound(SOUND_SECONDS, seed), "mp3", "libmp3lame", rate=44_100, layout="stereo"
        ),
    }
    found: dict[str, list[Path]] = {kind: [] for kind in contents}
    for kind, content in contents.items():
        few = [content(seed) for seed in range(8)]
        for number in range(KEPT):
            found[kind].append(folder / f"{kind}-{number}")
            found[kind][-1].write_bytes(few[number % len(few)])
    return found


def measure_pool(rounds: int) -> None:
    """Measure items/s of each kind beside the decoder alone."""
    rows = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(THREADS) as threads:
        vision = read_vision(write_omni_model(Path(folder)), LIMITS)
        for kind, paths in write_items(Path(folder)).items():
            examples = [Example("", media=(MediaItem(kind, str(path), path.name),)) for path in paths]
            found: list[list[tuple[float, float]]] = [[], []]
            for _ in range(rounds):
                began = time.perf_counter(), time.process_time()
                assert all(threads.map(DECODERS[kind], paths))
                found[0].append((time.perf_counter() - began[0], time.process_time() - began[1]))
                ahead = MediaAhead(vision)
                began = time.perf_counter(), time.process_time()
                ahead.expect(enumerate(examples))
                media = [ahead.take(index, example)[0] for index, example in enumerate(examples)]
                found[1].append((time.perf_counter() - began[0], time.process_time() - began[1]))
            alone, ours = ([statistics.median(column) for column in zip(*way, strict=True)] for way in found)
            rows.append(
                {
                    "kind": kind,
                    "file, kB": paths[0].stat().st_size / 1e3,
                    "stored, kB": len(media[0].content) / 1e3,
                    "tokens": media[0].size.tokens,
                    "decoder, items/s": len(paths) / alone[0],
                    "relaxd, items/s": len(paths) / ours[0],
                    "ratio": alone[0] / ours[0],
                    "decoder, CPU ms": alone[1] / len(paths) * 1e3,
                    "relaxd, CPU ms": ours[1] / len(paths) * 1e3,
                }
            )
    report("media_pool", rows, threads=THREADS, rounds=rounds)


# --- bytes --------------------------------------------------------------------------------------------------------


class MediaFeeder(Feeder):
    """Publishes prompts with a picture each, or with as much text."""

    images: Sequence[NormalMedia] = ()
    prompts: Sequence[np.ndarray] = ()

    def publish(self, count: int = 1, trace: dict[str, str] | None = None, source: str = "") -> list[str]:
        """Publish the prompts."""
        groups = []
        for number, tokens in enumerate(self.prompts, 1):
            prompt = {"text": QUESTION, "answer": "", "metadata": {"data_source": "s"}, "index": number}
            columns: dict[str, Any] = {"prompt_tokens": tokens, "prompt": prompt}
            if self.images:
                columns[PROMPT_MEDIA], columns[MEDIA_CONTENTS] = to_columns([self.images[number - 1]])
            groups.append(NewGroup(f"g{number}", columns, trace or {}))
        return self.board.publish(term=1, groups=groups)


def traffic(url: str) -> tuple[int, int]:
    """Return the bytes that a Redis has received and sent."""
    with redis.Redis.from_url(url) as client:
        info: Any = client.info("stats")
    return info["total_net_input_bytes"], info["total_net_output_bytes"]


def measure_bytes() -> None:
    """Count the bytes of a group on its way through the stages."""
    rows = []
    with TemporaryDirectory() as folder:
        vision = read_vision(write_vision_model(Path(folder)), LIMITS.model_copy(update={"media_keys": {"image": "i"}}))
        files = [encoded(photograph(*SIZE, seed), "JPEG", quality=85) for seed in range(GROUPS)]
        images = [normalise_image(file, vision.rule) for file in files]
        token, grids = vision.tokens.token, [[one.size.grid] for one in images]
        prompts = [expand([5, token, *range(6, 70)], grid, vision.tokens) for grid in grids]
        for case in ("text", "image"):
            data = {"source": "files", "path": "p.jsonl", "media_keys": {"image": "images"}} if case == "image" else {}
            config: RunConfig = make_config(
                Path(folder),
                data={"source": "addition", **data},
                rollout={"samples_per_prompt": SAMPLES, "max_new_tokens": ANSWER},
                trainer={"groups_per_step": GROUPS, "micro_batch_tokens": 4096},
            )
            (Path(folder) / case).mkdir()
            server = RedisServer(Path(folder) / case).start()
            feeder = MediaFeeder(server.url, config)
            feeder.images = images if case == "image" else ()
            feeder.prompts = prompts if case == "image" else [one % token for one in prompts]
            counts = [traffic(server.url)]
            feeder.publish()
            counts.append(traffic(server.url))
            taken = feeder.begin(GROUPS, 0)
            assert all(feeder.board.load(taken, feeder.board.needs("rollout")))
            counts.append(traffic(server.url))
            feeder.finish(taken, 0, length=ANSWER)
            counts.append(traffic(server.url))
            step = feeder.board.take("train", "benchmark", count=GROUPS, block_seconds=5.0)
            assert all(feeder.board.load(step, feeder.board.needs("train")))
            counts.append(traffic(server.url))
            feeder.board.close()
            server.stop()
            parts = [
                [(after - before) / GROUPS / 1e3 for before, after in zip(*pair, strict=True)]
                for pair in pairwise(counts)
            ]
            rows.append(
                {
                    "prompts": case,
                    "tokens": len(prompts[0]),
                    "published, kB": parts[0][0],
                    "to rollout, kB": parts[1][1],
                    "answers to trainer's columns, kB": sum(parts[2]),
                    "to trainer, kB": parts[3][1],
                    "all, kB": sum(map(sum, parts)),
                }
            )
        stored = statistics.mean(len(one.content) for one in images) / 1e3
        extra = (rows[1]["all, kB"] - rows[0]["all, kB"]) / stored  # type: ignore[operator]
        original = statistics.mean(map(len, files)) / 1e3
    report("media_bytes", rows, file_kb=original, stored_kb=stored, extra_over_stored=extra, samples=SAMPLES)


# --- steps --------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    },
}
TOWER = {
    "depth": 4,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_heads": 3,
    "out_hidden_size": 256,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1, 2],
}
RUN = """
[run]
steps = {steps}
folder = "runs"

[model]
path = "model"

[data]
source = "files"
path = "{case}.jsonl"
max_prompt_tokens = 512
shuffle = false
{media}

[reward]
name = "benchmarks.rewards:coin"
workers = 1

[rollout]
samples_per_prompt = 8
max_new_tokens = 64
threads = 2

[algorithm]
name = "grpo"
drop_zero_variance = false

[trainer]
groups_per_step = {groups}
micro_batch_tokens = 2048
threads = 2

[trainer.optimizer]
lr = 1e-12

[trainer.checkpoint]
every = 0

[board]
max_staleness = 0
"""
MEDIA = f'media_keys = {{ image = "images" }}\nmax_image_tokens = {SIDE * SIDE // 1024}'


def write_runs(folder: Path) -> None:
    """Write the model, pictures, prompts and configuration of each case."""
    make_vision_model(folder / "model", tower=TOWER, noise=0.01, **SHAPE)
    pictures = []
    for number in range(STEP_GROUPS * STEPS):
        pictures.append(folder / f"{number}.jpg")
        pictures[-1].write_bytes(encoded(photograph(SIDE, SIDE, number), "JPEG", quality=85))
    filler = "x" * (SIDE * SIDE // 1024)  # a letter is a token, as each mark around the picture's are
    cases: dict[str, list[dict[str, Any]]] = {
        # Other ones in each group: the trainer packs equal prompts once.
        "text": [
            {"prompt": f"{number:02d}{filler}{QUESTION}", "answer": str(number)} for number in range(len(pictures))
        ],
        "new": [{"prompt": "<image>" + QUESTION, "images": [str(path)]} for path in pictures],
        "again": [{"prompt": "<image>" + QUESTION, "images": [str(path)]} for path in pictures[:STEP_GROUPS]],
    }
    for case, rows in cases.items():
        (folder / f"{case}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        media = "" if case == "text" else MEDIA
        config = RUN.format(steps=STEPS, case=case, groups=STEP_GROUPS, media=media)
        (folder / f"{case}.toml").write_text(config)


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and all below it."""
    found = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            found += times.user + times.system
    return found


def run_case(folder: Path, case: str, run: str) -> dict[str, float]:
    """Run a case; return the processor seconds of a step, and medians of metrics."""
    words = ["run", f"{case}.toml", "--run-id", run, "--state", str(folder / f"state-{run}")]
    paths = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    file = folder / "runs" / run / "metrics.jsonl"
    at: dict[int, float] = {}
    with (folder / f"{run}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "relaxd.cli", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    tree, began = psutil.Process(process.pid), time.monotonic()
    while process.poll() is None:
        if time.monotonic() - began > RUN_SECONDS:
            process.terminate()
            sys.exit(f"{run} did not end in {RUN_SECONDS:.0f} s: {(folder / f'{run}.log').read_text()[-2000:]}")
        done = file.read_bytes().count(b"\n") if file.is_file() else 0
        at.setdefault(done, processor_seconds(tree))
        time.sleep(0.1)
    if process.returncode:
        sys.exit(f"{run} failed: {(folder / f'{run}.log').read_text()[-2000:]}")
    lines = [line for line in map(json.loads, file.read_text().splitlines()) if line.get("step", 0) > FIRST]
    first, last = min(step for step in at if step >= FIRST), max(step for step in at if step < STEPS)
    names = ("step_seconds", "generate_seconds", "train_seconds", "tokens")
    medians = {name: statistics.median(line[name] for line in lines) for name in names}
    return {"processor_seconds": (at[last] - at[first]) / (last - first), **medians}


def measure_steps(rounds: int) -> None:
    """Run each case in turn."""
    found: dict[str, list[dict[str, float]]] = {"text": [], "new": [], "again": []}
    with TemporaryDirectory() as place:
        folder = Path(place)
        write_runs(folder)
        for number in range(rounds):
            for case, runs in found.items():
                runs.append(run_case(folder, case, f"{case}-{number}"))
    rows: list[dict[str, Any]] = []
    for case, runs in found.items():
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        base = rows[0] if rows else medians
        ratio = medians["processor_seconds"] / base["processor_seconds"]
        rows.append({"case": case, **medians, "processor ratio": ratio})
    report("media_steps", rows, rounds=rounds, steps=STEPS)


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("pool", "bytes", "steps"))
    parser.add_argument("--rounds", type=int, default=3, help="how often, of pool and steps")
    options = parser.parse_args()
    if options.part == "pool":
        measure_pool(options.rounds)
    elif options.part == "bytes":
        measure_bytes()
    else:
        measure_steps(options.rounds)


if __name__ == "__main__":
    main()
