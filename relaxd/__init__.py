"""relaxd: asynchronous reinforcement-learning post-training for language models, as plain gRPC services."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaxd.alerts.user_messages import notify
    from relaxd.api import Run, RunError, configure, open_run, run
    from relaxd.rewards.logged import log_metric

__all__ = ["PROTOCOL_VERSION", "Run", "RunError", "__version__", "configure", "log_metric", "notify", "open_run", "run"]
__version__ = "0.1.0"

PROTOCOL_VERSION = 2
"""Version of the wire protocol and of the board's layout. Services of different versions refuse each other."""


def __getattr__(name: str) -> Any:
    """Import a public name of the package when it is first used, so that services never load `relaxd.api`."""
    if name not in __all__:
        raise AttributeError(f"module 'relaxd' has no attribute {name!r}")
    if name == "log_metric":
        from relaxd.rewards.logged import log_metric

        return log_metric
    if name == "notify":
        from relaxd.alerts.user_messages import notify

        return notify
    from relaxd import api

    return getattr(api, name)
