"""Configuration of a run's rewards."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from relaxd.config.section import Section


def check_address(address: str, *, token_setting: str) -> str:
    """Check the address of a reward service and return it unchanged; "" means no service.

    Raises ValueError if it is malformed, or has credentials or parameters. For these, the error names `token_setting`
    as the setting to use instead.
    """
    if not address:
        return address
    is_url = "://" in address
    try:
        parts = urlsplit(address if is_url else f"//{address}")
        found = bool(parts.hostname) and (is_url or (parts.port is not None and parts.netloc == address))
    except ValueError:  # a port that isn't a number
        found = False
    if found and parts.username is not None:
        raise ValueError(f"it has credentials, which logs would show: leave them out, and set {token_setting}")
    if found and (parts.query or parts.fragment or "?" in address):
        raise ValueError(f"it has parameters, which logs would show: leave them out, and set {token_setting}")
    if not found or parts.scheme not in ("", "http", "https"):
        raise ValueError(f'{address!r} must be "host:port" or begin with http:// or https://')
    return address


def check_variable(name: str) -> str:
    """Check the name of an environment variable that rewards get, and return it. Raises ValueError if it is invalid."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not the name of an environment variable")
    if name.startswith("RELAXD_"):
        raise ValueError(f"{name} is a setting or secret of relaxd, which rewards don't get")
    return name


TokenVariable = Annotated[str, AfterValidator(lambda name: name and check_variable(name))]
"""Name of the environment variable that holds a reward service's token; "" means no token."""


class RewardChoice(Section):
    """A reward that a prompt's metadata can choose (reward.choose_by)."""

    name: str
    """Name of the reward, in the form of reward.name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the reward, like reward.settings."""
    key: str = ""
    """Key of the reward in mappings that it returns, like reward.key."""


class RewardTerm(Section):
    """A term of the run's reward, which is a weighted sum of several rewards."""

    name: str = ""
    """Name of the reward, in the form of reward.name."""
    address: Annotated[str, AfterValidator(partial(check_address, token_setting="address_token"))] = ""
    """Instead of a name: a service of your own, like reward.address."""
    address_token: TokenVariable = ""
    """With address: environment variable with the service's token, like reward.address_token."""
    label: str = ""
    """Label of the term in metrics and in `only_if`. Defaults to the reward's name, without the text before its
    colon."""
    weight: float = 1.0
    """Factor of the term's value in the weighted sum."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the reward, like reward.settings."""
    key: str = ""
    """Key of the reward in mappings that it returns, like reward.key."""
    only_if: str = ""
    """Label of another term: this term counts only if the other term's value is above 0."""
    minimum: float | None = None
    """Minimum value of the term; lower values are raised to it."""
    maximum: float | None = None
    """Maximum value of the term; higher values are lowered to it."""

    @property
    def shown(self) -> str:
        """Label of the term in metrics: `label`, else the reward's name after its colon, else the service's address."""
        return self.label or self.name.rpartition(":")[2] or self.address

    def problems(self) -> Iterator[str]:
        if not self.name and not self.address:
            yield "reward.terms: name is missing: the name of a reward, or address, a service of your own"
        if self.name and self.address:
            yield f"reward.terms: name is {self.name!r}, but there is an address, too: give one of them"
        if self.address_token and not self.address:
            yield "reward.terms: address_token is for a service at address, which is missing"


class RewardConfig(Section):
    """Scoring of answers (docs/rewards.md)."""

    section: ClassVar[str] = "reward"

    name: str = ""
    """Name of a bundled reward (docs/rewards.md lists them), "package.module:function" or "file.py:function": a
    function of a sample or of a group, a class, or verl's compute_score. Its module or file must be in the folder in
    which the services are started, or on PYTHONPATH. `relaxd reward test` tries it."""
    address: Annotated[str, AfterValidator(partial(check_address, token_setting="reward.address_token"))] = ""
    """Instead of a name: a service of your own, in any language. "host:port" speaks relaxd.v1.RemoteReward
    (protos/relaxd/v1/remote_reward.proto); "http://..." is posted JSON (docs/rewards.md)."""
    address_token: TokenVariable = ""
    """With reward.address: environment variable of the reward service, whose value each call sends as a bearer token
    (header authorization). The address itself appears in logs, so it must have no secrets."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The reward's own settings: arguments of a class, keyword arguments of each call of a function, settings_json of a
    service at reward.address."""
    key: str = ""
    """Key of the reward in a mapping that a reward returns; empty means "score", or else "reward". Other numbers in it
    are parts, which are only reported."""
    terms: tuple[RewardTerm, ...] = ()
    """Instead of a name: rewards whose weighted sum is the reward, each in a table [[reward.terms]] with name or
    address, address_token, weight, settings, key, label, only_if, minimum and maximum."""
    choose_by: str = ""
    """Key of a prompt's metadata whose value names its reward, such as "rm_type" or "data_source"; verl's names of data
    sources are known. Prompts without it get the reward of name or terms."""
    choices: dict[str, RewardChoice] = Field(default_factory=dict)
    """With choose_by: rewards by the value of that key, each a name, or a table with name, settings and key. Other
    values must be names of bundled rewards."""
    on_failure: Literal["drop", "zero", "retry"] = "drop"
    """Treatment of a sample that can't be scored. drop: drop its group. zero: give it the reward 0, and every
    sample the part `failed`. retry: score it again up to max_retries times, with growing pauses, then drop its
    group."""
    max_retries: int = Field(default=3, ge=1)
    """Maximum number of times that a failed reward call is repeated, with on_failure = "retry"."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Kill a reward that takes longer than this many seconds for a sample, or for a group if it scores groups. The
    sample fails."""
    workers: int = Field(default=2, ge=1)
    """Number of worker processes per reward replica."""
    max_in_flight: int = Field(default=64, ge=1)
    """With an address: maximum concurrent calls of a reward replica to each service."""
    outage_seconds: float = Field(default=600.0, ge=0)
    """With an address: seconds that samples wait for an unreachable service before they fail."""
    cache_samples: int = Field(default=0, ge=0, le=10_000_000)
    """Maximum number of scores that a reward replica caches, about 1 KiB each; 0 caches none. The cache key is
    everything that the reward gets. Only for a reward that gives the same sample the same score."""
    media: bool = False
    """Let rewards open the images of prompts and of conversations, and videos and sounds of prompts
    (`sample.images()`, `sample.videos()`, `sample.sounds()`, docs/rewards.md). Each replica then reads all of them. A
    service at an address gets none."""
    environment: tuple[Annotated[str, AfterValidator(check_variable)], ...] = ()
    """Environment variables of the reward service to pass to rewards, such as ["OPENAI_API_KEY"], besides those that
    every program needs (PATH, PYTHONPATH, HOME, LANG ...)."""
    sandbox: Literal["auto", "off", "required"] = "auto"
    """Confinement of rewards. auto: the next three settings restrict rewards, as far as the kernel can enforce it
    (docs/rewards.md); the log says what it can't. required: the run doesn't start where network, files, memory or
    processes can't be limited. off: rewards do what the service's user may do."""
    network: bool = False
    """Allow rewards to use the network. A judge and an address don't need it, because the service calls them."""
    writable: tuple[str, ...] = ()
    """Files and folders that rewards may write, in addition to temporary files (tempfile), which end with their
    worker."""
    worker_memory_bytes: int = Field(default=4 << 30, ge=0)
    """Maximum memory of each process of a worker, in bytes (RLIMIT_DATA: what the process allocates, not mapped files).
    0: no limit."""

    @property
    def calls_services(self) -> bool:
        """True if the reward, or one of its terms, is the user's own service."""
        return bool(self.address) or any(term.address for term in self.terms)

    @property
    def shown(self) -> str:
        """Name of the run's reward for messages and logs: its name, its address, its terms or the metadata key that
        chooses it."""
        named = self.name or self.address or " + ".join(term.shown for term in self.terms)
        return named or f"chosen by {self.choose_by}"

    @field_validator("choices", mode="before")
    @classmethod
    def _named_choices(cls, choices: Any) -> Any:
        if not isinstance(choices, dict):
            return choices
        return {value: {"name": one} if isinstance(one, str) else one for value, one in choices.items()}

    def problems(self) -> Iterator[str]:
        if self.address and (self.name or self.terms or self.choose_by):
            yield "reward.address is the whole reward: leave out reward.name, reward.terms and reward.choose_by"
        if self.address_token and not self.address:
            yield "reward.address_token is for a service at reward.address, which is missing"
        if self.name and self.terms:
            yield f"reward.name is {self.name!r}, but there are reward.terms, too: give one of them"
        if not (self.name or self.address or self.terms or self.choose_by):
            yield "reward.name is missing: the name of a reward, or [[reward.terms]] with several"
        if self.terms and (self.settings or self.key):
            yield "reward.settings and reward.key are for reward.name: give each of reward.terms its own"
        if self.choose_by and any(term.address for term in self.terms):
            yield "reward.choose_by can't be combined with reward.terms at an address: give them a name"
        if self.choices and not self.choose_by:
            yield "reward.choices needs reward.choose_by: the key of the metadata whose value chooses"
        if self.on_failure != "retry":
            reason = f'reward.on_failure is "{self.on_failure}": set "retry"'
            yield from self.unused(("max_retries",), reason)
        if self.address:
            reason = "reward.address is a service, which gets no media: leave it out"
            yield from self.unused(("media",), reason)
        if self.sandbox == "off":
            reason = 'reward.sandbox is "off", with which rewards do what the service\'s user may do: set "auto"'
            yield from self.unused(("network", "writable", "worker_memory_bytes"), reason)
        labels = [term.shown for term in self.terms]
        for term in self.terms:
            if labels.count(term.shown) > 1:
                yield f"reward.terms has {term.shown!r} twice: give them different labels"
            if term.only_if and (term.only_if not in labels or term.only_if == term.shown):
                others = ", ".join(label for label in labels if label != term.shown) or "none"
                yield (
                    f"reward.terms: only_if of {term.shown!r} is {term.only_if!r}, not the label of another term; "
                    f"there are {others}"
                )
            if None not in (bounds := (term.minimum, term.maximum)) and bounds[0] > bounds[1]:  # type: ignore[operator]
                yield f"reward.terms: minimum of {term.shown!r} is above its maximum"
