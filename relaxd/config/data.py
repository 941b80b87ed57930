"""[data]: the sources of a run's prompts, their curriculum and their tables."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from relaxd.config.section import Section, own_function
from relaxd.importing import check_known_or_own

HOST = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
"""Form of a host in a URL, with or without a port."""
SAMPLERS = ("uniform", "hard", "learnable")
"""Names of relaxd's bundled samplers."""


class CurriculumConfig(Section):
    """Curriculum: how often each prompt is given, depending on the model's past answers to it (docs/curriculum.md)."""

    sampler: str = "uniform"
    """Frequencies of the prompts. uniform: all alike. hard: in proportion to 1 - pass rate (Kimi k1.5, arXiv
    2501.12599). learnable: in proportion to pass rate x (1 - pass rate) (arXiv 2502.12272). Untried prompts get the
    highest frequency. Or a class of your own, "package.module:Class" or "file.py:Class"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own sampler class."""
    min_weight: float = Field(default=0.1, gt=0, le=1)
    """With hard and learnable: minimum frequency of a prompt, relative to the highest."""
    min_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Pass rate below which a prompt is left out as too hard, after `tries` tries. 0 leaves out none."""
    max_pass_rate: float = Field(default=1.0, ge=0, le=1)
    """Pass rate above which a prompt is left out as solved, after `tries` tries. 1 leaves out none."""
    tries: int = Field(default=2, ge=1)
    """Number of scored groups of a prompt before it may be left out."""
    retest: float = Field(default=0.05, ge=0, le=1)
    """Share of the visits to left-out prompts that still take place, because the model has changed since."""
    replay: float = Field(default=0.0, ge=0, lt=1)
    """Share of all visits that go to an earlier hard prompt instead of the next prompt."""
    replay_below: float = Field(default=0.5, gt=0, le=1)
    """Pass rate up to which an earlier prompt counts as hard and may be replayed. Left-out prompts aren't replayed."""
    memory: int = Field(default=4, ge=1)
    """Approximate number of groups that a pass rate averages: each later group counts 1/memory."""
    min_reward: float = 0.0
    """Mean reward of a group that counts as a pass rate of 0; lower means count as 0, too."""
    max_reward: float = 1.0
    """Mean reward of a group that counts as a pass rate of 1; higher means count as 1, too."""
    exhausted: Literal["repeat", "end"] = "repeat"
    """Behaviour when fewer prompts than trainer.groups_per_step remain. repeat: give all prompts again, until enough
    of them have a pass rate within the limits. end: end the run."""
    filter: Annotated[str, own_function("data.curriculum.filter")] = ""
    """Your own filter of groups, "package.module:function" or "file.py:function": gets a list of the group's samples
    with their rewards, and returns whether to train on the group. If not, the group is dropped and replaced."""

    @property
    def is_own(self) -> bool:
        """True if the sampler is the user's own."""
        return self.sampler not in SAMPLERS

    @property
    def leaves_out(self) -> bool:
        """True if the curriculum may leave out prompts because of their pass rates."""
        return self.min_pass_rate > 0 or self.max_pass_rate < 1

    @property
    def chooses(self) -> bool:
        """True if the curriculum's visits may differ from the data's epochs."""
        return self.sampler != "uniform" or self.leaves_out or self.replay > 0

    @field_validator("sampler")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_known_or_own("data.curriculum.sampler", name, SAMPLERS, "relaxd has", "Your own")

    def problems(self) -> Iterator[str]:
        place = "data.curriculum"
        if self.min_pass_rate >= self.max_pass_rate:
            yield (
                f"{place}.min_pass_rate is {self.min_pass_rate}: it must be less than max_pass_rate = "
                f"{self.max_pass_rate}, or every prompt would be left out"
            )
        if self.min_reward >= self.max_reward:
            yield f"{place}.min_reward is {self.min_reward}: it must be less than max_reward = {self.max_reward}"
        if self.is_own and self.replay:
            own = f'a sampler of your own ("{self.sampler}")'
            yield f"{place}.replay is {self.replay}: {own} replays prompts itself: set 0"
        if self.settings and not self.is_own:
            yield f'{place}.settings are for a sampler of your own, but sampler is "{self.sampler}"'


class ReasoningGymConfig(Section):
    """A task of reasoning-gym (pip install 'relaxd[reasoning]'), for data.source = "reasoning_gym"."""

    task: str = ""
    """Name of the task, such as "spell_backward"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, named as in its configuration class, such as max_word_len = 5."""
    size: int = Field(default=2000, ge=1)
    """Number of training prompts, generated when the run starts: thousands a second in most tasks, a few in some."""
    held_out: int = Field(default=200, ge=0)
    """Number of held-out prompts for evaluation, none of which is trained on."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts. Separate from run.seed, so that runs with different seeds share held-out prompts."""
    instruction: str = ""
    """Text added as a paragraph after the question, such as "Answer with the word only."."""


SOURCES = ("addition", "files", "jsonl", "reasoning_gym")
"""Names of relaxd's bundled sources of prompts, for data.source."""


class DataSource(Section):
    """A source of prompts in data.sources, where several sources are mixed."""

    path: Path
    """File or folder with the source's prompts, in the forms of data.path."""
    name: str = ""
    """Name of the source. Prompts without metadata.data_source get this name there."""
    weight: float = Field(default=1.0, gt=0)
    """Number of visits to each of the source's prompts in an epoch. With 0.5 an epoch visits half of the prompts, and
    the next epoch the other half."""
    prompt_key: str = ""
    """Column of the source's prompts; empty: that of data.prompt_key."""
    answer_key: str = ""
    """Column of the source's reference answers; empty: that of data.answer_key."""
    metadata_key: str = ""
    """Overrides data.metadata_key unless empty; "*" means all columns except prompt and answer."""
    tools_key: str | None = None
    """Overrides data.tools_key if set; empty means that the source's prompts have no tools."""
    prompt_function: Annotated[str | None, own_function("prompt_function")] = None
    """Overrides data.prompt_function if set; empty means no function. If only prompt_key is set, data.prompt_function
    doesn't apply."""
    system_prompt: str | None = None
    """Overrides data.system_prompt if set; empty means no system prompt."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Maximum length of answers to this source's prompts, in tokens, at most rollout.max_new_tokens; 0 means
    rollout.max_new_tokens."""
    top_p: float = Field(default=0.0, ge=0, le=1)
    """Nucleus sampling (top-p) of answers to this source's prompts; 1 turns it off, 0 means rollout.top_p."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample answers to this source's prompts from the k likeliest tokens; 0 turns it off. Defaults to
    rollout.top_k."""
    stop: tuple[str, ...] | None = None
    """Strings that end answers to this source's prompts. Defaults to rollout.stop."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end answers to this source's prompts. Defaults to rollout.stop_token_ids."""
    min_new_tokens: int | None = Field(default=None, ge=0)
    """Minimum length of answers to this source's prompts, in tokens. Defaults to rollout.min_new_tokens."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters of the source that differ from the run's, by name, as JSON values."""
        found: dict[str, Any] = {name: value for name in ("max_new_tokens", "top_p") if (value := getattr(self, name))}
        for name in ("top_k", "stop", "stop_token_ids", "min_new_tokens"):
            if (value := getattr(self, name)) is not None:
                found[name] = list(value) if isinstance(value, tuple) else value
        return found

    def problems(self) -> Iterator[str]:
        if "" in (self.stop or ()):
            yield "one of data.sources has an empty stop string, which would end every answer at once"
        if wrong := [token for token in self.stop_token_ids or () if token < 0]:
            yield f"one of data.sources has the stop token id {wrong[0]}: token ids are not negative"


class DataConfig(Section):
    """The source of prompts (docs/data.md)."""

    section: ClassVar[str] = "data"

    source: str
    """Source of prompts. addition: generated sums. files: prompts in files; jsonl: another name for files.
    reasoning_gym: a task of that package. Or a class of your own, "package.module:Class" or "file.py:Class"
    (docs/data.md)."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a source class of your own."""
    path: Path | None = None
    """File with prompts (JSON lines, a JSON array, Parquet, Arrow or CSV, by its ending), a folder of such files, a
    folder that the package datasets saved, or a data set of the Hugging Face hub, "owner/name" or
    "owner/name/config:split". "PATH@[0:100]" selects some of the rows. Each row has "prompt" (text or a list of chat
    messages), optionally "answer", and any other columns, which the reward gets as metadata."""
    eval_path: Path | None = None
    """Held-out prompts, in the forms of path. Without them there is no evaluation."""
    sources: tuple[DataSource, ...] = ()
    """Instead of path: several sources that are mixed, each in a table [[data.sources]] with path, weight, name, and
    perhaps columns, system_prompt, prompt_function and sampling parameters (docs/data.md)."""
    temperature: float | None = Field(default=None, gt=0)
    """With sources, instead of their weights: an epoch visits each source in proportion to its number of prompts to the
    power of 1 / temperature, with as many visits in total as there are prompts. 1: each prompt once; above 1 small
    sources are visited more often, and with a very large temperature all sources equally often. (The sampling
    temperature is rollout.temperature.)"""
    prompt_key: str = "prompt"
    """Column of the prompt. Dots lead into objects, as in "extra_info.question"."""
    answer_key: str = "answer"
    """Column of the reference answer, such as "reward_model.ground_truth". A row may lack it only if the name is
    "answer"."""
    metadata_key: str = ""
    """Column with an object that the reward gets as metadata; "*" or empty means all columns except prompt and
    answer."""
    tools_key: str = ""
    """Column with tools for the chat template, which rows may lack: a list of objects, or its JSON text. Empty: no
    tools."""
    tools_file: Path | None = None
    """verl's file of tools (YAML). For prompts without tools in tools_key, the chat template gets the schemas of this
    file. No tool is called while an answer is generated; the reward verl_tools calls them (docs/rewards.md)."""
    media_keys: dict[str, str] = Field(default_factory=dict)
    """Columns with the media of prompts, by kind, such as { image = "images", audio = "sounds" }, which rows may lack:
    a list of items, or a single one. Each <image>, <video> or <audio> in a prompt's text stands for the next one
    (docs/media.md)."""
    original_key: str = ""
    """Column with a prompt's whole picture, such as "images", which prompts without media may lack: an item, or a list
    whose first item counts. Tools such as zoom and rewards get it as metadata.original (docs/media.md). Empty means
    none."""
    media_hosts: tuple[str, ...] = ()
    """Hosts from which items at http(s) addresses may be fetched, also after redirects, such as ["images.example.org",
    "store:9000"]. Add the port unless it is the scheme's default. Empty: addresses are refused."""
    media_wait_seconds: float = Field(default=600.0, ge=0)
    """Seconds that a started run waits for a host of media_hosts that doesn't answer, before it ends."""
    min_image_tokens: int = Field(default=0, ge=0)
    """Enlarge images to at least about this many tokens; 0 means the model's minimum."""
    max_image_tokens: int = Field(default=0, ge=0)
    """Shrink images to at most this many tokens; 0 means the model's maximum."""
    video_fps: float = Field(default=0.0, ge=0, le=60)
    """Frames per second to take from a video; 0 means the model's rate. A video given as a list of frames is assumed to
    have this rate."""
    video_sound: bool = False
    """Also give the model a video's own sound, if its file has sound. The sound's tokens stand between those of the
    frames, by time. For models that take video and sound (docs/media.md)."""
    max_video_frames: int = Field(default=0, ge=0)
    """Take at most this many frames from a video, evenly spread over it; 0 means the model's maximum."""
    max_video_tokens: int = Field(default=0, ge=0, le=40_000)
    """Shrink a video's frames until it has at most this many tokens; 0 means the model's maximum."""
    max_audio_seconds: float = Field(default=300.0, gt=0, le=3600)
    """Maximum length of a sound, in seconds; each second takes 13 tokens. A longer sound is refused, not cut."""
    prompt_function: Annotated[str, own_function("data.prompt_function")] = ""
    """Your own function "package.module:function" or "file.py:function", which gets a row as a dict and returns the
    prompt: text, or a list of chat messages. prompt_key isn't read then."""
    continue_final_message: bool = True
    """For prompts that end in a message of the assistant, such as "<think>": true has the model continue the message,
    false refuses the prompt."""
    system_prompt: str = ""
    """Text of a system message for prompts without one."""
    digits: int = Field(default=2, ge=1, le=6)
    """Number of digits of each number of the addition source."""
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    """The task of the reasoning_gym source."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Maximum length of a prompt, in tokens."""
    overlong: Literal["error", "skip"] = "error"
    """Treatment of prompts longer than max_prompt_tokens: error refuses to start and names the prompt; skip leaves them
    out and counts them."""
    deduplicate: bool = False
    """Leave out repeated prompts and prompts of evaluation sets, regardless of case and white space. In a source with
    more than 20,000 prompts, each prompt is compared when it is visited (docs/data.md)."""
    shuffle: bool = True
    """Shuffle prompts in each epoch, seeded by run.seed."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Curriculum, which determines how often each prompt is given."""

    @property
    def is_own(self) -> bool:
        """True if prompts come from the user's own source."""
        return self.source not in SOURCES

    @property
    def has_files(self) -> bool:
        """True if prompts come from files."""
        return self.source in ("files", "jsonl")

    @field_validator("source")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return check_known_or_own("data.source", name, SOURCES, "there are", "A source of your own")

    @field_validator("media_keys")
    @classmethod
    def _are_read(cls, keys: dict[str, str]) -> dict[str, str]:
        if not keys:
            return keys
        from relaxd.media.placeholders import KINDS  # with numpy, which few configurations need

        for kind, column in keys.items():
            if kind not in KINDS:
                raise ValueError(f"data.media_keys has {kind!r}: the kinds that relaxd reads are {', '.join(KINDS)}")
            if not column:
                raise ValueError(f"data.media_keys.{kind} is empty: it must name a column, or be left out")
        return keys

    @field_validator("media_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not HOST.fullmatch(host):
                raise ValueError(
                    f"data.media_hosts has {host!r}: it must be the name of a host in lower case, such as "
                    '"images.example.org", with its port if URLs name one, such as "store:9000"; no scheme, path or *'
                )
        return hosts

    def problems(self) -> Iterator[str]:
        if self.has_files and self.path is None and not self.sources:
            yield f'data.path is missing: source = "{self.source}" needs the path of a file'
        if self.path is not None and self.sources:
            yield "data.path is set, but there are data.sources, too: give one of them"
        if self.temperature is not None:
            if not self.sources:
                yield (
                    f"data.temperature is {self.temperature:g}, but there are no data.sources to mix: add them, or "
                    "leave it out (the sampling temperature is rollout.temperature)"
                )
            if weighted := [n for n, one in enumerate(self.sources) if one.weight != 1]:
                yield (
                    f"data.temperature is {self.temperature:g}, but data.sources.{weighted[0]}.weight is set, too: "
                    "give one of them"
                )
        if self.sources and not self.has_files:
            yield f'data.sources are for source = "files", but it is "{self.source}"'
        if self.path is not None and self.is_own:
            yield f'data.path is for source = "files", but it is "{self.source}": use data.settings'
        if self.settings and not self.is_own:
            yield f'data.settings are for a source of your own, but data.source is "{self.source}"'
        if self.source == "reasoning_gym" and not self.reasoning_gym.task:
            yield (
                'data.reasoning_gym.task is missing: source = "reasoning_gym" needs the name of a task, such as '
                '"spell_backward"'
            )
