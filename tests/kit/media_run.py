"""Whole runs on media in bfloat16, from files to synchronised towers, compared with transformers."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis
import torch
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from relaxd.data.vision import read_vision
from relaxd.run_folder import STEPS as STEPS_FOLDER
from relaxd.run_folder import model_path
from services.trainer.batch.step_plan import read_step_file
from tests.chaos.planes.payloads import Payloads
from tests.e2e.conftest import REWARD, Workplace
from tests.kit.finished_runs import check_books, check_receipts, read_summary
from tests.kit.media_prompts import items_of
from tests.kit.sounds import EARS, make_omni_model, omni_logprobs, without_marks
from tests.kit.vision import TOWER, image_logprobs, make_vision_model, with_published_experts, without_media

STEPS = 4
SAMPLES = 8
"""Samples of a group."""
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
EYES = TOWER | {"hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 256}
HEARS = EARS | {"d_model": 128, "encoder_ffn_dim": 256, "output_dim": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
"""Each token has all experts: rounding would send some to others, which would hide the rest."""
TOWERS = (".visual.", ".audio_tower.")
FILE_MARKS = (b"\x89PNG", b"RIFF")
"""Beginnings of media in their normal form: PNG and WAV."""
MEAN, LARGEST = 0.05, 0.3
"""Limits of differences of log-probs in bfloat16, in nats: of a step's tokens on average, and of one token."""
GROWTH = 1.5
"""Maximum ratio of the mean gap at the last step to that at the first."""
STALE = 4.0
"""Minimum ratio of the difference from transformers with the first towers to that with the right ones."""
CONFIG = """
[run]
steps = {steps}
colocate = {colocate}

[model]
path = "model"

[data]
source = "tests.kit.media_prompts:MediaPrompts"
settings = {{ sort = "{sort}" }}
media_keys = {{ {keys} }}
{more}max_prompt_tokens = 256

[reward]
name = "tiny_reward:even_bytes"
workers = 1

[algorithm]
drop_zero_variance = false

[rollout]
dtype = "bfloat16"
samples_per_prompt = {samples}
max_new_tokens = 32
max_running_samples = 32
{engine}

[trainer]
dtype = "bfloat16"
groups_per_step = 4
freeze = []

[trainer.optimizer]
lr = {lr}

[trainer.checkpoint]
every = 1
keep_step_files = "always"
export_every = 1

[board]
max_staleness = 0

[weights]
transport = "{transport}"
verify = "always"
"""
OWN_SOUND = "video_sound = true\nmax_video_tokens = 8\n"
"""Settings of clips with their own sounds; eight tokens are their size, so that none is resized."""
SGLANG = """engine = "sglang"
memory_fraction = 0.3

[rollout.sglang]
attention_backend = "triton"
sampling_backend = "pytorch"
mm_attention_backend = "sdpa"
disable_cuda_graph = true
max_total_tokens = 32768"""
ENGINES = {
    "sglang": (SGLANG, "cuda_ipc", "true"),
    "sglang-apart": (SGLANG, "nccl", "false"),
    "transformers": ('engine = "transformers"\nthreads = 1', "gloo", "true"),
}
"""Settings of an engine, the transport of its weights, and whether it shares the trainer's device."""


def _make_mixture(folder: Path) -> Path:
    mixture = {"tied": False, "model_type": "qwen3_vl_moe", **EXPERTS}
    return with_published_experts(make_vision_model(folder, noise=0.06, tower=EYES, **mixture, **TEXT))


def _make_omni(folder: Path) -> Path:
    folder.mkdir()
    return make_omni_model(folder, noise=0.06, hearing_noise=0.3, tower=EYES, ears=HEARS, **TEXT, **EXPERTS)


def _without_media(answer: list[int], folder: Path) -> list[int]:
    return without_media(answer, read_vision(folder))


@dataclass(frozen=True)
class MediaCase:
    """A model and the media of its run."""

    make: Callable[[Path], Path]
    """Function that writes the model into a folder and returns it."""
    sort: str
    """Sort of prompts (tests/kit/media_prompts.py)."""
    keys: str
    """data.media_keys."""
    reference: Any = AutoModelForImageTextToText
    """Class of transformers that reads the model."""
    rate: float = 2e-4
    """Learning rate: so large that towers of the first step would show in the last one."""
    kept: Callable[[list[int], Path], list[int]] = _without_media
    """Function that returns an answer up to its first token of media: transformers can't compute what follows one."""
    logprobs: Callable[..., torch.Tensor] = image_logprobs
    """Function that computes an answer's log-probs by it."""


CASES = {
    "qwen3_vl": MediaCase(
        lambda folder: make_vision_model(folder, noise=0.06, tower=EYES, **TEXT),
        "images",
        'image = "images"',
        rate=5e-4,
    ),
    "qwen3_vl_moe": MediaCase(_make_mixture, "images", 'image = "images"'),
    "qwen3_omni_moe": MediaCase(
        _make_omni,
        "sounds",
        'video = "videos", audio = "sounds"',
        Qwen3OmniMoeThinkerForConditionalGeneration,
        kept=without_marks,
        logprobs=omni_logprobs,
    ),
}


@dataclass(frozen=True)
class MediaRun:
    """Metrics of a run, and the differences of its last log-probs from transformers'."""

    lines: list[dict[str, Any]]
    """Metrics of its steps."""
    exact: float
    """Mean difference between the engine's log-probs in the last step and those of transformers in float32."""
    stale: float
    """The same if transformers has the towers with which the run began."""

    def facts(self) -> dict[str, object]:
        """Return its figures for a table."""
        first, last = self.lines[0], self.lines[-1]
        found: dict[str, object] = {"steps": STEPS, "step_seconds": float(last["step_seconds"])}
        found["entropy"] = f"{first['entropy']:.2f} to {last['entropy']:.2f}"
        for name, line in (("first", first), ("last", last)):
            found[f"{name}_gap"] = f"{line['logprob_difference']:.4f} to {line['logprob_difference_max']:.4f}"
        return found | {"transformers": self.exact, "first_towers": self.stale}


def check_media_run(run: MediaRun) -> None:
    """Check that the gap is as small at the last step as at the first, and that other towers would show."""
    for line in run.lines:
        assert line["logprob_difference"] < MEAN
        assert line["logprob_difference_max"] < LARGEST
    assert run.lines[-1]["logprob_difference"] < GROWTH * run.lines[0]["logprob_difference"]
    assert run.exact < MEAN
    assert run.stale > STALE * run.exact


def make_place(folder: Path, case: MediaCase, engine: str) -> Workplace:
    """Write a case's model and its configuration."""
    case.make(folder / "model")
    (folder / "tiny_reward.py").write_text(REWARD)
    settings, transport, colocate = ENGINES[engine]
    text = CONFIG.format(
        steps=STEPS,
        samples=SAMPLES,
        sort=case.sort,
        keys=case.keys,
        engine=settings,
        lr=case.rate,
        transport=transport,
        colocate=colocate,
        more=OWN_SOUND if "video" in case.keys else "",
    )
    (folder / "run.toml").write_text(text)
    return Workplace(folder)


def train_on_media(place: Workplace, case: MediaCase, redis_url: str, seconds: float, **environment: str) -> MediaRun:
    """Do a run, and check its books, its payloads and its log-probs.

    Args:
        place: of `make_place`.
        case: the same one.
        redis_url: of a Redis without anything else.
        seconds: until the run is ended, with the tails of all logs.
        environment: of `relaxd run`.
    """
    process = place.start("run", "run.toml", "--run-id", "media", REDIS_URL=redis_url, **environment)
    late = threading.Timer(seconds, process.terminate)
    late.start()
    assert process.stdout is not None
    output, wrong = [], []
    with closing(redis.Redis.from_url(redis_url, socket_timeout=10.0)) as client:
        payloads = Payloads(client, "media")
        for line in process.stdout:
            output.append(line)
            if line.startswith("step "):
                wrong += payloads.audit()
        late.cancel()
        logs = sorted((place.folder / ".relaxd" / "logs").glob("*.log"))
        tails = "".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
        assert process.wait(timeout=60) == 0, "".join(output) + tails
        assert wrong + payloads.end() == []
        assert _media_on(client) == 0  # what is left are the texts of samples
    folder = place.folder / "runs" / "media"
    check_books(read_summary(folder), STEPS, groups_per_step=4)
    check_receipts(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert math.isfinite(line["loss"])
        assert line["grad_norm"] > 0
    return MediaRun(lines, *_compare_last_step(place.folder, folder, case))


def _media_on(client: redis.Redis) -> int:
    """Return the number of payloads in Redis that have media."""
    values = [client.get(key) or b"" for key in client.scan_iter("*:columns:*")]
    return sum(any(mark in value for mark in FILE_MARKS) for value in values)


def _compare_last_step(place: Path, folder: Path, case: MediaCase) -> tuple[float, float]:
    """Return the mean differences of the last step's log-probs from transformers', with its towers and the first."""
    model = case.reference.from_pretrained(model_path(folder, STEPS - 1), dtype=torch.float32).eval()
    answers = list(_answers(folder / STEPS_FOLDER / f"step-{STEPS:06d}.safetensors", place / "model", case))
    assert len(answers) == 4 * SAMPLES
    exact = _difference(model, case, answers)
    _restore_towers(model, case.reference.from_pretrained(place / "model", dtype=torch.float32))
    return exact, _difference(model, case, answers)


Answer = tuple[list[int], list[int], np.ndarray, int]
"""Tokens of a prompt, those of an answer, their log-probs by the engine, and the number of the prompt."""


def _answers(path: Path, model: Path, case: MediaCase) -> Iterator[Answer]:
    """Yield the answers of a step, as far as transformers can compute them."""
    for group in read_step_file(path).groups.values():
        assert len(group["media_contents"]) > 0
        assert set(group["versions"].tolist()) == {STEPS - 1}
        ends = np.cumsum(group["lengths"]).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            tokens = case.kept(group["tokens"][begin:end].tolist(), model)
            logprobs = group["rollout_logprobs"][begin : begin + len(tokens)]
            yield group["prompt_tokens"].tolist(), tokens, logprobs, int(group["prompt"]["answer"])


def _difference(model: PreTrainedModel, case: MediaCase, answers: list[Answer]) -> float:
    """Return the mean difference between the engine's log-probs and transformers'."""
    found = [
        np.abs(case.logprobs(model, prompt, tokens, items_of(case.sort, number)).double().numpy() - logprobs)
        for prompt, tokens, logprobs, number in answers
        if tokens
    ]
    return float(np.concatenate(found).mean())


@torch.no_grad()
def _restore_towers(model: PreTrainedModel, first: PreTrainedModel) -> None:
    """Give a model the towers of another one."""
    before = dict(first.named_parameters())
    for name, parameter in model.named_parameters():
        if any(tower in f".{name}" for tower in TOWERS):
            parameter.copy_(before[name])
