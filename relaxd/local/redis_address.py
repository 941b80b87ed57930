"""The Redis of a stack: its URL in memory, its password in a file of its own."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, Field, field_serializer, model_validator

from relaxd.rpc.credentials import with_password


class RedisAddress(BaseModel):
    """What a model that names a Redis inherits: written to a file, it is without the password."""

    redis: str = Field(repr=False)
    """URL, with the password."""
    redis_password_file: str = ""
    """Where the password is; empty: there is none."""

    @model_validator(mode="after")
    def _add_password(self) -> "RedisAddress":
        if self.redis_password_file and urlsplit(self.redis).password is None:
            self.redis = with_password(self.redis, self.redis_password_file)
        return self

    @field_serializer("redis")
    def _drop_password(self, redis: str) -> str:
        return without_password(redis)[0]


def without_password(redis_url: str) -> tuple[str, str]:
    """The URL without its password, and the password; "" where there is none."""
    parts = urlsplit(redis_url)
    if not parts.password:
        return redis_url, ""
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return parts._replace(netloc=f"{user}@{host}" if user else host).geturl(), unquote(parts.password)


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else may read, not even for a moment."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
