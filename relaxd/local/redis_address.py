"""The Redis of a stack: its URL, with the password kept in a separate file."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, Field, field_serializer, model_validator

from relaxd.rpc.credentials import with_password


class RedisUrlModel(BaseModel):
    """Base of models that hold a Redis URL. Serialised, the URL is without the password."""

    redis: str = Field(repr=False)
    """URL, with the password."""
    redis_password_file: str = ""
    """File with the password; empty: no password."""

    @model_validator(mode="after")
    def _add_password(self) -> "RedisUrlModel":
        if self.redis_password_file and urlsplit(self.redis).password is None:
            self.redis = with_password(self.redis, self.redis_password_file)
        return self

    @field_serializer("redis")
    def _drop_password(self, redis: str) -> str:
        return without_password(redis)[0]


def without_password(redis_url: str) -> tuple[str, str]:
    """Split a URL into the URL without its password, and the password or ""."""
    parts = urlsplit(redis_url)
    if not parts.password:
        return redis_url, ""
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return parts._replace(netloc=f"{user}@{host}" if user else host).geturl(), unquote(parts.password)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its creation on."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
