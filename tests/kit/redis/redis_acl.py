"""The ACL that we recommend, on a Redis of the tests."""

from pathlib import Path

import redis

ACL = Path(__file__).parents[3] / "deploy" / "redis-acl.conf"
USER = "relaxd"


def apply_acl(url: str, password: str) -> None:
    """Give a Redis the users of deploy/redis-acl.conf."""
    lines = [line.split() for line in ACL.read_text().splitlines() if line.startswith("user ")]
    with redis.Redis.from_url(url) as admin:
        for _, name, *rules in sorted(lines, key=lambda words: words[1] == "default"):
            rules = [f">{password}" if rule == ">CHANGE-ME" else rule for rule in rules]
            admin.execute_command("ACL", "SETUSER", name, *rules)
