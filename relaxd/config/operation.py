"""[board], [weights], [health] and [rehearsal]: cooperation of a run's services. [alerts] and [tracking]: reports to
people and trackers."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator

from relaxd.alerts.notifications import parse_quiet_hours
from relaxd.alerts.rules import parse_rule
from relaxd.config.section import Section
from relaxd.importing import check_known_or_own
from relaxd.redis_client import parse as parse_redis_url
from relaxd.redis_client import where

LARGE_COLUMN_BYTES = 64 << 10
"""Default of board.large_column_bytes, the minimum size of a large column, in bytes."""

EXPERTS = 128
"""Number of experts per layer among which the scripted engine chooses."""


class BoardConfig(Section):
    """Settings of the sample board: staleness of samples, leases of groups, and limits."""

    max_staleness: int = Field(default=1, ge=0)
    """Maximum number of versions by which the weights that generated a token may be older than those that train on it.
    0 is strictly on-policy."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Number of groups to publish for a step, relative to the number that the step trains on."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Seconds after which a group is redelivered if its holder has not renewed the lease."""
    max_deliveries: int = Field(default=5, ge=1)
    """Maximum deliveries of a group to a stage. A group that exceeds it is poison: dropped, counted, recorded for
    inspection."""
    max_retries: int = Field(default=2, ge=0)
    """Maximum number of times that the prompt of a stale group is published again."""
    max_consecutive_drops: int = Field(default=0, ge=0)
    """Pause the run when more groups than this fail without a trained step in between. 0 means two steps' groups, but
    at least 64. Groups that the algorithm filters do not count."""
    max_filtered_steps: int = Field(default=50, ge=0)
    """Pause the run when the algorithm filters this many steps' groups without a trained step in between, for example
    because all rewards are equal: the task is too easy or too hard. The pause names the most frequent reason. 0 never
    pauses."""
    high_water_bytes: int = Field(default=0, ge=0)
    """Maximum bytes of open groups in Redis; above, only groups that the open step needs are published. 0 means four
    fifths of Redis's maxmemory, or a fifth of its machine's memory if it has none."""
    max_group_bytes: int = Field(default=256 << 20, ge=1 << 10, le=16 << 30)
    """Maximum bytes in Redis of a prompt, or of one stage's columns of a group. A larger one fails."""
    large_column_bytes: int = Field(default=LARGE_COLUMN_BYTES, ge=1, le=1 << 20)
    """Minimum bytes of a large column. It is written before the script that commits it, so that no script handles its
    bytes, and stored on a data node, if there are any."""
    data_urls: tuple[str, ...] = Field(default=(), max_length=64)
    """Redis servers for large columns, such as ["redis://data-1:6379/0", "redis://data-2:6379/0"]; empty: large columns
    are on the board's Redis. User, password and certificates are those of the board's Redis."""

    @field_validator("data_urls")
    @classmethod
    def _data_nodes_differ(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if urlsplit(url).password:
                raise ValueError("a URL has a password, which the run's records would show: leave it out")
            if parse_redis_url(url).nodes:
                raise ValueError(f"{where(url)} can't be a data node: name servers, each with a URL of its own")
        places = [where(url) for url in urls]
        twice = [place for place, times in Counter(places).items() if times > 1]
        if twice:
            raise ValueError(f"{twice[0]} is named twice: each data node must be a server of its own")
        return urls


class HealthConfig(Section):
    """Detection and recovery of dead or stuck replicas (docs/reliability.md).

    First, the replica is restarted in place. If that does not help, the run is paused and all replicas of the role are
    restarted (a rebuild). After that, the run fails.
    """

    stuck_seconds: float = Field(default=300.0, gt=0)
    """Seconds without progress after which a replica that holds groups is stuck. Its own deadlines are added
    (reward.timeout_seconds and roles.judge.timeout_seconds, trainer.collective_timeout_seconds,
    weights.timeout_seconds)."""
    start_seconds: float = Field(default=900.0, gt=0)
    """Seconds without progress after which a starting replica is stuck. Reading its model is progress."""
    failed_seconds: float = Field(default=60.0, gt=0)
    """Seconds that a failed replica has to recover by itself before it is restarted."""
    max_sync_failures: int = Field(default=4, ge=1)
    """Number of consecutive failed weight synchronisations after which an engine is restarted."""
    restart_timeout_seconds: float = Field(default=30.0, gt=0)
    """Seconds that a replica has to register again after its death or restart. After that, its launcher restarts it.
    The time doubles with each restart, up to role_timeout_seconds."""
    max_restarts: int = Field(default=3, ge=1)
    """Maximum restarts of a replica within restart_window_seconds, and maximum consecutive attempts to restart it."""
    restart_window_seconds: float = Field(default=600.0, gt=0)
    """Window of max_restarts, in seconds. A replica that exceeded max_restarts is restarted once more after the
    window."""
    first_backoff_seconds: float = Field(default=1.0, ge=0)
    """Pause, in seconds, before a replica's second restart within the window, and between two rebuilds of a role. It
    doubles each time."""
    role_timeout_seconds: float = Field(default=300.0, gt=0)
    """Seconds without replicas after which a role is rebuilt. A role is also rebuilt if all its replicas exceeded
    max_restarts."""
    max_rebuilds: int = Field(default=2, ge=0)
    """Maximum rebuilds of a role without a committed step in between; one more fails the run."""


FEWEST_PORTS = 2
"""Minimum number of ports for a trainer, besides its service's port: for the rendezvous of its ranks and of the weight
group."""


CPU_TRANSPORTS = ("gloo", "gloo_chain")
"""Values of weights.transport for engines on CPUs."""


class WeightsConfig(Section):
    """Synchronisation of weights from the trainer to the engines."""

    transport: Literal["gloo", "gloo_chain", "nccl", "cuda_ipc"] = "gloo"
    """Transport of the weights. gloo: between CPUs. gloo_chain: the same, but each engine passes the weights on to the
    next one, which is faster where many hosts have slow links (docs/weights.md). nccl: between GPUs. cuda_ipc: between
    trainer and engines that share GPUs (run.colocate)."""
    interval: int = Field(default=1, ge=1)
    """Send new weights to the engines after every `interval` steps, and after the last one. When an engine joins, it
    and all others get the newest weights. At most board.max_staleness + 1, or steps would lack groups that are fresh
    enough."""
    ports: str = ""
    """Ports on which the trainer's ranks and the weight group meet, such as "29500-29599"; empty: any free ones. gloo
    and NCCL choose the ports of the connections between ranks themselves (docs/deploy.md)."""
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Size of a bucket of tensors, in bytes: a bucket is sent while the next is gathered."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Seconds after which a broadcast of weights is aborted and repeated without the late engines."""
    connect_timeout_seconds: float = Field(default=10.0, gt=0)
    """Deadline for connecting the processes of a weight group, in seconds."""
    verify: Literal["first", "always", "never"] = "first"
    """Compare a checksum of every tensor between trainer and engine: at an engine's first synchronisation with a
    trainer, always or never. An engine whose values differ does not serve and is synchronised again. With always,
    samples have receipts, and groups written by weights that were never sent are dropped (docs/weights.md).
    """
    pause: Literal["in_place", "retract", "abort", "drain"] = "in_place"
    """Treatment of running requests during a synchronisation: in_place keeps them and their key-value cache, retract
    keeps their tokens and recomputes the cache under the new weights (sglang), abort ends them, drain waits for them.
    """

    @property
    def has_receipts(self) -> bool:
        """True if samples have receipts, which name the weights that wrote each sample."""
        return self.verify == "always"

    @property
    def port_range(self) -> range | None:
        """Ports on which the trainer's ranks and the weight group meet; None: any free ports."""
        if not self.ports:
            return None
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str) -> str:
        if ports and not re.fullmatch(r"\d{1,5}-\d{1,5}", ports, re.ASCII):
            raise ValueError(f'weights.ports is "{ports}": it must be like "29500-29599"')
        return ports

    def problems(self) -> Iterator[str]:
        yield from self._ports_suffice()

    def _ports_suffice(self) -> Iterator[str]:
        ports = self.port_range
        if ports is None:
            return
        if not 1024 <= ports.start < ports.stop <= 65536:
            yield f'weights.ports is "{self.ports}": it must be FIRST-LAST, from 1024 to 65535'
        if len(ports) < FEWEST_PORTS:
            yield (
                f'weights.ports is "{self.ports}", which are {len(ports)}: a trainer needs {FEWEST_PORTS}, one for its '
                "ranks and one for the weight group; give it some more, for a trainer that takes its place"
            )


class RehearsalConfig(Section):
    """Speeds and lengths that `relaxd rehearse` assumes (docs/rehearse.md). Other runs ignore them."""

    median_tokens: int = Field(default=0, ge=0)
    """Median length, in tokens, of an answer; in conversations, of a message of the model. Lengths are log-normal, cut
    off at rollout.max_new_tokens. 0 means an eighth of that limit, in conversations divided by turns."""
    spread: float = Field(default=1.0, ge=0)
    """Standard deviation of the logarithm of answer lengths, turns and tool_seconds: with 1.0, one answer in six is
    longer than 2.7 medians."""
    turns: int = Field(default=4, ge=1)
    """Median number of the model's messages in a conversation (section agent). Conversations are cut off at
    agent.max_turns."""
    tool_seconds: float = Field(default=1.0, ge=0)
    """Median seconds in which the environment, or a program's tool, answers a message."""
    observation_tokens: int = Field(default=200, ge=1)
    """Approximate number of tokens of an answer of the environment or a tool. In runs whose conversations may have
    media, also of an image, a video or a sound."""
    tokens_per_second: float = Field(default=3000.0, gt=0)
    """Tokens per second that one rollout replica generates when it has many samples in progress."""
    sample_tokens_per_second: float = Field(default=60.0, gt=0)
    """Maximum tokens per second that are generated for a sample, however few samples are in progress."""
    train_tokens_per_second: float = Field(default=50_000.0, gt=0)
    """Tokens per second that the whole trainer trains, forward and backward. Forward passes alone are three times as
    fast."""
    update_seconds: float = Field(default=1.0, ge=0)
    """Seconds that an optimizer update takes."""
    sync_seconds: float = Field(default=2.0, ge=0)
    """Seconds that a weight synchronisation takes, until all engines have the new weights."""
    tensors: int = Field(default=400, ge=1)
    """Number of tensors of the model. When a weight group forms, every engine gets the list of these tensors."""
    moe_layers: int = Field(default=0, ge=0)
    """Number of layers with experts, for rollout.return_routed_experts and trainer.routing_replay."""
    experts_per_token: int = Field(default=0, ge=0)
    """Number of experts per token in each layer with experts."""
    reward_seconds: float = Field(default=0.0, ge=0)
    """Seconds that it takes to compute the reward of a sample."""
    success: float = Field(default=0.5, ge=0, le=1)
    """Share of samples with reward 1; all others get 0."""
    redis_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Bytes of memory (maxmemory) of the Redis that the real run will have."""

    @property
    def experts(self) -> tuple[int, int]:
        """Number of layers with experts, and number of experts per token in each such layer; (0, 0) for a model without
        experts."""
        return self.moe_layers, self.experts_per_token


RULES = (
    "reward_mean < 0.5 x highest over 20 steps",
    "entropy < 0.1 x highest over 20 steps",
    "tokens_per_second < 0.5 x highest over 20 steps",
)
"""Default alarm rules on metrics (alerts.rules). A healthy run of any task stays far from their limits."""


class AlertsConfig(Section):
    """Alarms, and notifications of them (docs/alerts.md). The addresses to notify are secrets, not settings."""

    rules: tuple[str, ...] = RULES
    """Rules on metrics, each an alarm while it holds: "METRIC < NUMBER" or "METRIC > NUMBER", also "< 0.5 x highest",
    "> 2 x lowest" and "over N steps", whose median is compared (5 by default)."""
    wait_seconds: float = Field(default=900.0, ge=1)
    """Seconds after which a wait, such as for Redis or a missing replica, raises an alarm."""
    min_free_gb: float = Field(default=5.0, ge=0)
    """Free space on the disk of the run's folder below which an alarm is raised, in GB. 0: no alarm."""
    urls_file: str = ""
    """File on the coordinator's machine with the addresses to notify, one Apprise URL in a line. By default those in
    RELAXD_ALERT_URLS of the coordinator's environment."""
    quiet_hours: str = ""
    """Daily hours in which notifications wait, such as "22:00-07:00". The end of the run doesn't wait."""
    time_zone: str = ""
    """Time zone of the quiet hours, such as "Europe/Berlin". By default that of the coordinator's machine."""
    repeat_seconds: float = Field(default=3600.0, ge=0)
    """Minimum seconds between two notifications that the same alarm began. If the alarm begins again sooner, neither
    this beginning nor its end is notified."""

    def problems(self) -> Iterator[str]:
        for number, rule in enumerate(self.rules):
            try:
                parse_rule(rule)
            except ValueError as error:
                yield f'alerts.rules.{number} = "{rule}": {error}'
            if rule in self.rules[:number]:
                yield f'alerts.rules.{number} = "{rule}": it is listed twice: remove one'
        try:
            parse_quiet_hours(self.quiet_hours)
        except ValueError as error:
            yield f'alerts.quiet_hours = "{self.quiet_hours}": {error}'
        try:
            if self.time_zone:  # a machine without the database of time zones needs none of them
                ZoneInfo(self.time_zone)
        except (ValueError, OSError, LookupError):
            yield f'alerts.time_zone = "{self.time_zone}": it must be a name such as "Europe/Berlin"'
        if "://" in self.urls_file:
            yield (
                "alerts.urls_file is an address, which would be kept with the run: write it into a file, and name that"
            )


TRACKERS = ("tensorboard", "wandb", "mlflow", "clearml", "trackio")
"""Names of the bundled trackers."""


class TrackingConfig(Section):
    """Trackers, which show a run's numbers outside of relaxd (docs/tracking.md)."""

    section: ClassVar[str] = "tracking"

    trackers: tuple[str, ...] = ()
    """Trackers that get the numbers of each step: "tensorboard", "wandb", "mlflow", "clearml", "trackio", or one of
    your own as "package.module:Class" or "file.py:Class"."""
    python: str = ""
    """Python interpreter that has the trackers' packages, if it isn't that of the coordinator. It needs Python 3.11 and
    nothing of relaxd."""
    project: str = "relaxd"
    """Name of the run's project in W&B, ClearML and Trackio, or of its experiment in MLflow."""
    name: str = ""
    """Name of the run in W&B, MLflow, ClearML and Trackio. By default the run's id."""
    samples: bool = True
    """Also show the samples that the run keeps (telemetry.samples_per_step) in the trackers."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Mode of W&B. online: send to W&B, with the key WANDB_API_KEY of the coordinator's environment. offline: write
    files into the run's folder, which `wandb sync` sends later."""
    wandb_entity: str = ""
    """User or team of W&B. By default the owner of the key."""
    mlflow_url: str = ""
    """Address of the MLflow server, such as "http://mlflow:5000". Its secrets are in the coordinator's environment:
    MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    clearml_mode: Literal["online", "offline"] = "online"
    """Mode of ClearML. online: send to the ClearML server that clearml.conf or CLEARML_API_HOST, CLEARML_API_ACCESS_KEY
    and CLEARML_API_SECRET_KEY of the coordinator's environment name. offline: write files into the run's folder, which
    `Task.import_offline_session` sends later."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings for trackers of your own. relaxd passes them on without checking them."""

    def problems(self) -> Iterator[str]:
        for number, name in enumerate(self.trackers):
            there_are, own = "there are", "A tracker of your own"
            check_known_or_own(f"tracking.trackers.{number}", name, TRACKERS, there_are, own)
            if name in self.trackers[:number]:
                yield f'tracking.trackers.{number} = "{name}": it is listed twice: remove one'
        if not self.trackers:
            others = [name for name in type(self).model_fields if name != "trackers"]
            yield from self.unused(others, "tracking.trackers is empty: name a tracker")
        needs = {
            "wandb": ("wandb_mode", "wandb_entity"),
            "mlflow": ("mlflow_url",),
            "clearml": ("clearml_mode",),
        }
        for tracker, names in needs.items():
            if tracker not in self.trackers:
                yield from self.unused(names, f'tracking.trackers has no "{tracker}": add it')
        if not set(self.trackers) - set(TRACKERS):
            yield from self.unused(("options",), "tracking.trackers has no tracker of your own: name it")
        if "mlflow" not in self.trackers:
            return
        url = urlsplit(self.mlflow_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            yield (
                f'tracking.mlflow_url is "{self.mlflow_url}": set the address of an MLflow server, such as '
                '"http://mlflow:5000"'
            )
        if "@" in url.netloc:
            yield (
                "tracking.mlflow_url has a password or token, which would be kept with the run: set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the coordinator's environment instead"
            )
