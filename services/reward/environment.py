"""The environment of reward workers, which run people's code: what programs need to run, and no secret."""

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
"""Variables that every worker gets. Proxies are not among them: their URLs may have a password."""
PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_")


class MissingVariableError(Exception):
    """reward.environment names a variable that the reward service doesn't have."""


def worker_environment(variables: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment that a worker gets.

    Args:
        variables: further ones to pass on (the run's reward.environment).
        environment: the service's own, instead of os.environ.

    Raises MissingVariableError when one of `variables` is not set.
    """
    environment = os.environ if environment is None else environment
    if missing := [name for name in variables if name not in environment]:
        raise MissingVariableError(
            f"reward.environment names {', '.join(missing)}, which the reward service's environment doesn't have: set "
            "it where that service is started"
        )
    return {
        name: value
        for name, value in environment.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES) or name in variables
    }
