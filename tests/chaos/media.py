"""Prompts and conversations with media, which many groups share, and an auditor of those in a run's step files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from relaxd.config import DataConfig
from relaxd.data.vision import VisionModel, normalise_shown, read_vision
from relaxd.envs.environment import Reply, Sample
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from relaxd.media.prompt_media import MediaRecord, StoredMedia, contents_of_group
from relaxd.media.sources import MediaError
from services.trainer.batch.step_plan import read_step_file
from tests.chaos.environment import Moody
from tests.kit.media_server import media_server
from tests.kit.ports import free_port
from tests.kit.sounds import encoded_sound, sound
from tests.kit.vision import clip, encoded, encoded_clip, picture

ITEMS = 6
"""Number of items of each kind, all of one size: log-probs alone tell one from another."""
MOST_DIFFERENCE = 1e-3
"""Of log-probs of engine and trainer, in float32, of tokens of the same weights. With another picture it is 1 or so."""
Item = tuple[str, int]
"""Kind and number."""


def item(kind: str, number: int) -> bytes:
    """Return the file of an item."""
    if kind == IMAGE:
        return encoded(picture(64, 64, number))
    if kind == VIDEO:
        return encoded_clip(clip(4, 64, 64, number), 2.0, "avi")  # the same bytes in each process, unlike Matroska
    return encoded_sound(sound(0.5, number))


def shown_in(number: int) -> list[list[Item]]:
    """Return the items shown after each message of the model in a conversation whose first item has this number."""
    other = (number + 1) % ITEMS
    return [[(IMAGE, number), (AUDIO, other)], [(VIDEO, number), (IMAGE, other), (IMAGE, number)]]


class MediaHost:
    """An HTTP server with the pictures, which can be away."""

    def __init__(self) -> None:
        self.name = f"127.0.0.1:{free_port()}"
        self._serving = ExitStack()

    def start(self) -> None:
        """Serve them."""
        files = {path_of(IMAGE, number): item(IMAGE, number) for number in range(ITEMS)}
        self._serving.enter_context(media_server(int(self.name.partition(":")[2]), files))

    def stop(self) -> None:
        """Refuse connections."""
        self._serving.close()


def path_of(kind: str, number: int) -> str:
    """Return the path of an item at its host."""
    return f"{kind}-{number}"


class Pictures:
    """A source of prompts, each with one or two items, whose kinds and numbers are its answer."""

    kinds: Sequence[str] = (IMAGE,)

    def __init__(self, host: str = "") -> None:
        """`host`: of the items; without one a row has their bytes."""
        self._host = host

    def __len__(self) -> int:
        """Return a number of rows that is larger than that of prompts whose media the coordinator keeps."""
        return 20 * ITEMS

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row, with a column for each kind."""
        kinds, number = self.kinds, index % ITEMS
        items = [(kinds[index % len(kinds)], number)]
        if index % 4 == 0:
            items.append((kinds[(index + 1) % len(kinds)], 1))
        row: dict[str, Any] = {kind: [self._source(*one) for one in items if one[0] == kind] for kind in kinds}
        text = "".join(f"<{kind}>" for kind, _ in items)
        return {"prompt": f"{text}What is here?", "answer": json.dumps(items), **row}

    def _source(self, kind: str, number: int) -> str | bytes:
        return f"http://{self._host}/{path_of(kind, number)}" if self._host else item(kind, number)


class AllKinds(Pictures):
    """The same with images, videos and sounds."""

    kinds = (IMAGE, VIDEO, AUDIO)


class Theatre(Moody):
    """An environment that shows and plays items after the first two messages of the model."""

    def open(self, sample: Sample) -> None:
        """Choose what will be shown by the prompt."""
        self._shown = shown_in(json.loads(sample.answer)[0][1])

    def step(self, reply: Reply) -> tuple[Any, float, bool]:
        """Answer as Moody, and show something."""
        text, reward, done = super().step(reply)
        if done or not text.startswith("turn "):
            return text, reward, done
        parts = [{"type": kind, kind: item(kind, number)} for kind, number in self._shown[self._turn - 1]]
        return {"role": "user", "content": [text, *parts]}, reward, done


def audit_media(run_folder: Path, model: Path, data: DataConfig) -> list[str]:
    """Say which groups were trained with other media than were shown, and where engine and trainer differ."""
    normal = NormalItems(read_vision(model, data))
    wrong, steps = [], sorted((run_folder / "steps").glob("step-*.safetensors"))
    names = ("prompt", "prompt_media", "media_contents", "sequence_media", "sequence_contents", "shares_prompt")
    for path in steps:
        for group_id, columns in read_step_file(path, names=names).groups.items():
            wrong += [f"{path.name}: group {group_id} {problem}" for problem in _otherwise(columns, normal)]
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    gaps = {line["step"]: line["logprob_difference_max"] for line in lines if "logprob_difference_max" in line}
    wrong += [f"step {step}: log-probs differ by {gap:.2g}" for step, gap in gaps.items() if gap > MOST_DIFFERENCE]
    if not gaps or not steps:
        wrong.append(f"{len(steps)} step files, {len(gaps)} differences of log-probs: there is nothing to audit")
    return wrong


class NormalItems:
    """Items in their normal form for a model."""

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision
        self._known: dict[Item, StoredMedia] = {}

    def of(self, items: Sequence[Sequence[Any]]) -> list[StoredMedia]:
        """Return items in their order."""
        keys = [(kind, number) for kind, number in items]
        for key in set(keys) - set(self._known):
            self._known[key] = StoredMedia.of(normalise_shown(key[0], item(*key), self._vision))
        return [self._known[key] for key in keys]


def _otherwise(columns: dict[str, Any], normal: NormalItems) -> Iterator[str]:
    """Say what is otherwise with a group's media."""
    prompt = json.loads(columns["prompt"]["answer"])
    try:
        contents = contents_of_group(columns)
    except MediaError as error:
        yield str(error)
        return
    yield from _differ("its prompt", columns["prompt_media"], contents, [normal.of(prompt)])
    if "sequence_media" not in columns:  # no conversations
        return
    first, second = shown_in(prompt[0][1])
    for number, (own, shares) in enumerate(zip(columns["sequence_media"], columns["shares_prompt"], strict=True)):
        before = [] if shares else prompt
        shown = [normal.of([*before, *rest]) for rest in ([], first, [*first, *second])]  # by the number of turns
        yield from _differ(f"sequence {number}", own, contents, shown)


def _differ(
    what: str, records: Sequence[MediaRecord], contents: Mapping[str, bytes], due: Sequence[Sequence[StoredMedia]]
) -> Iterator[str]:
    """Say whether records are those of none of the lists in `due`, or their bytes others than theirs."""
    found = [record["sha256"] for record in records]
    names = [[one.sha256 for one in items] for items in due]
    if found not in names:
        yield f"has {[one[:12] for one in found]} in {what}, not {[one[:12] for one in names[-1]]}"
        return
    for one in due[names.index(found)]:
        if contents.get(one.sha256) != one.content:
            yield f"has other bytes under the name of {one.sha256[:12]} in {what}"
