"""The environment of reward workers. They run users' code, so it has no secrets of the service."""

import os
from collections.abc import Mapping, Sequence

PASSED = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "XDG_CACHE_HOME"),
        *("LANG", "LANGUAGE", "TZ", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE"),
    )
)
"""Variables that every worker gets. Proxies are left out, because their URLs may contain a password."""
PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_")


class MissingVariableError(Exception):
    """reward.environment names a variable that is not set in the reward service."""


def worker_environment(variables: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a worker.

    Args:
        variables: further variables to pass on (reward.environment).
        environment: the service's environment; by default os.environ.

    Raises MissingVariableError when one of `variables` is not set.
    """
    environment = os.environ if environment is None else environment
    if missing := [name for name in variables if name not in environment]:
        raise MissingVariableError(
            f"reward.environment names {', '.join(missing)}, not set in the reward service's environment: set it where "
            "that service is started"
        )
    return {
        name: value
        for name, value in environment.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES) or name in variables
    }
