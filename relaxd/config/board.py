"""[board]: staleness, leases and limits of the sample board."""

from collections import Counter
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from relaxd.config.base import Section
from relaxd.redis_client import parse as parse_redis_url
from relaxd.redis_client import where

LARGE_COLUMN_BYTES = 64 << 10
"""Default of board.large_column_bytes."""


class BoardConfig(Section):
    """The sample board: staleness, leases, limits."""

    max_staleness: int = Field(default=1, ge=0)
    """Maximum versions between the weights that generated a token and those that train on it. 0 is strictly
    on-policy."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Publish this many times the groups that a step needs."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """Redeliver a group whose holder has not renewed its lease for this long."""
    max_deliveries: int = Field(default=5, ge=1)
    """Maximum deliveries of a group to a stage. Then it is poison: dropped, counted and recorded for inspection."""
    max_retries: int = Field(default=2, ge=0)
    """Maximum times to publish the prompt of a stale group again."""
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
    """Write a column of at least so many bytes apart from the script that commits it: no script handles its bytes, and
    it is on a data node, if there are any."""
    data_urls: tuple[str, ...] = Field(default=(), max_length=64)
    """Redis servers for large columns, such as ["redis://data-1:6379/0", "redis://data-2:6379/0"]; empty: they are on
    the board's Redis, or node of a cluster. User, password and certificates are those of the board's Redis."""

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
