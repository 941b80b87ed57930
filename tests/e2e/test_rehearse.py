"""`relaxd rehearse`, with everything that it starts."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import Workplace
from tests.kit.vision import encoded, write_vision_model

CONFIG = """
[run]
steps = 100

[model]
path = "not/here"

[data]
source = "addition"
max_prompt_tokens = 64

[reward]
name = "math"

[rollout]
engine = "sglang"
samples_per_prompt = 4
max_new_tokens = 4096

[trainer]
groups_per_step = 4
micro_batch_tokens = 8192
mini_batches = 2

[algorithm]
old_logprobs = "current"
"""


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_rehearsal_of_a_run_whose_model_isnt_here(workplace: Workplace) -> None:
    (workplace.folder / "mine.toml").write_text(CONFIG)
    words = ("rehearse", "mine.toml", "--rollout", "3", "--seconds", "10", "--time-scale", "20", "--payload-scale", "4")
    code, output = workplace.relaxd(*words, timeout=400)  # a second step must end within the seconds, on any machine
    assert code == 0, output
    assert "3 rollout replicas, time / 20, payloads / 4" in output
    for row in (
        "would it fill steps? │ yes: a step every",
        "disk, a step",
        "processor, coordinator",
        "the control plane",
        "first limit",
    ):
        assert row in " ".join(output.split()), output
    assert list(workplace.folder.glob("rehearsal-*")) == []  # logs stay only if it fails
    assert not Path(workplace.folder / "runs").exists()


CONVERSATIONS = """
[agent]
command = ["not-here"]
max_turns = 5
max_sessions = 16

[rehearsal]
turns = 3
tool_seconds = 2.0
"""


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_rehearsal_of_conversations_has_agents(workplace: Workplace) -> None:
    (workplace.folder / "mine.toml").write_text(CONFIG + CONVERSATIONS)
    words = ("rehearse", "mine.toml", "--rollout", "2", "--agent", "2", "--seconds", "40", "--time-scale", "5")
    code, output = workplace.relaxd(*words, "--payload-scale", "4", timeout=500)
    assert code == 0, output
    assert "2 rollout replicas, 2 agent replicas, time / 5" in output
    rows = " ".join(output.split())
    assert "would it fill steps? │ yes: a step every" in rows, output
    seconds = re.search(r"processor, agent │ ([0-9.]+) s a step", rows)
    assert seconds is not None, output
    assert float(seconds[1]) > 0


@pytest.mark.night
@pytest.mark.timeout(600)
def test_an_interrupted_rehearsal_of_a_runs_own_replica_has_a_result(workplace: Workplace) -> None:
    (workplace.folder / "mine.toml").write_text(CONFIG)
    words = ("rehearse", "mine.toml", "--seconds", "500", "--time-scale", "20", "--payload-scale", "4")
    process = workplace.start(*words)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(r": step [3-9]", line):
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=120)
    output = "".join(lines) + rest
    assert process.returncode == 0, output
    assert "1 rollout replicas, time / 20" in output
    assert "interrupted: measuring what there is" in rest
    assert "would it fill steps?" in rest


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_rehearsal_of_a_run_with_images_counts_their_bytes(workplace: Workplace) -> None:
    write_vision_model(workplace.folder / "seeing")
    noise = np.random.default_rng(0).integers(0, 256, (8, 256, 256, 3), np.uint8)
    rows = []
    for number, pixels in enumerate(noise):
        name = workplace.folder / f"{number}.png"
        name.write_bytes(encoded(Image.fromarray(pixels)))
        rows.append({"prompt": "<image>What is here?", "images": [str(name)]})
    (workplace.folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    images = 'source = "files"\npath = "rows.jsonl"\nmedia_keys = { image = "images" }'
    text = CONFIG.replace('source = "addition"', images).replace("max_prompt_tokens = 64", "max_prompt_tokens = 128")
    (workplace.folder / "mine.toml").write_text(text)
    words = ("rehearse", "mine.toml", "--rollout", "2", "--seconds", "10", "--time-scale", "4")
    code, output = workplace.relaxd(*words, timeout=60)
    assert code != 0
    assert "a run with media (data.media_keys) can't be rehearsed without its rules" in " ".join(output.split())
    words = (*words, "--model.path", str(workplace.folder / "seeing"), "--rollout.max_new_tokens", "256")
    code, output = workplace.relaxd(*words, timeout=400)
    assert code == 0, output
    assert "malformed" not in output
    # Four groups, each with a picture of 64 tokens of 3 KiB, and four answers of up to 256 tokens of at most 41 bytes.
    (size,) = re.findall(r"disk, a step *│ ([0-9.,]+) kB", output)
    media, answers = 4 * 64 * 3072, 4 * 4 * 256 * 41
    assert media < 1000 * float(size.replace(",", "")) < media + answers, output


SEEING = """
[agent]
command = ["not-here"]
media = ["image"]
max_sessions = 16

[rehearsal]
median_tokens = 32
turns = 3
spread = 0.0
tool_seconds = 0.1
observation_tokens = 64
"""


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_rehearsal_of_conversations_with_images_counts_the_bytes_of_what_is_shown(workplace: Workplace) -> None:
    write_vision_model(workplace.folder / "seeing")
    (workplace.folder / "mine.toml").write_text(CONFIG + SEEING)
    words = ("rehearse", "mine.toml", "--rollout", "1", "--agent", "1", "--seconds", "10", "--time-scale", "1")
    changed = ("--model.path", str(workplace.folder / "seeing"), "--rollout.max_new_tokens", "512")
    _, output = workplace.relaxd(*words, *changed, timeout=400)  # a busy machine gives no verdict
    assert "malformed" not in output
    # Four groups, whose four samples see two pictures each, of 64 tokens of 3 KiB.
    ((size, unit),) = re.findall(r"disk, a step *│ ([0-9.,]+) ([kM])B", output)
    media, rest = 4 * 4 * 2 * 64 * 3072, 4 * 4 * 512 * 41
    assert media < {"k": 1e3, "M": 1e6}[unit] * float(size.replace(",", "")) < media + rest, output


AUTOSCALED = """
[rehearsal]
median_tokens = 64
spread = 0.0
tokens_per_second = 400.0
sample_tokens_per_second = 100.0
train_tokens_per_second = 2000.0
update_seconds = 0.1
sync_seconds = 0.05

[autoscale]
mode = "MODE"
max_replicas = 4
out_seconds = 20
"""


@pytest.mark.night
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["on", "dry_run"])
def test_a_rehearsal_has_the_autoscaler_of_the_run(workplace: Workplace, mode: str) -> None:
    (workplace.folder / "mine.toml").write_text(CONFIG + AUTOSCALED.replace("MODE", mode))
    # A step's 2,048 tokens take one engine 5 s and four 1.3 s, like the trainer.
    changed = ("--rollout.max_new_tokens", "64", "--trainer.groups_per_step", "8", "--rollout.max_running_samples", "8")
    words = ("rehearse", "mine.toml", "--rollout", "1", "--seconds", "60", "--time-scale", "2", "--payload-scale", "1")
    code, output = workplace.relaxd(*words, *changed, timeout=400)
    assert code == 0, output
    rows = "".join(re.findall(r"│([^│]*)│\n", output))
    rows = " ".join(rows.split())
    shown = re.search(
        r"(\d+ for [\d a-z,]+)\. Decisions: at \d+ s 1 to ([234])( \(not done\))?: the trainer waits for busy", rows
    )
    assert shown is not None, output
    numbers, wanted, undone = shown.groups()
    counts = [int(number) for number in re.findall(r"(\d+) (?:for \d+ s|at rest)", numbers)]
    if mode == "on":
        assert undone is None
        assert counts[0] == 1
        assert int(wanted) in counts
    else:
        assert undone is not None
        assert counts == [1]
    assert f"with {counts[-1]} rollout replicas" in rows or "not judged" in rows, output
