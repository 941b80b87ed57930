"""Changes to a scheduler's model that only computes log-probs of given tokens."""

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessor

TEMPERATURE_VARIABLE = "RELAXD_SGLANG_LOGPROB_TEMPERATURE"
"""Environment variable with the temperature of such a model's log-probs; missing for a model that generates."""
ENVIRONMENT = {"SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "true"}
"""SGLang then computes the logits of given tokens piece by piece: those of a whole step would fill gigabytes."""


def set_temperature(model: Any, temperature: float) -> None:
    """Have a model's logits divided by a temperature. SGLang does so for tokens that it samples, not for given ones.

    Raises ValueError: the model computes its logits in a way that can't be changed.
    """
    if temperature == 1.0:
        return
    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no LogitsProcessor of SGLang's, so its log-probs can't be computed under "
            f"rollout.temperature = {temperature:g}: use another engine, or temperature = 1"
        )
    for module in found:
        module._get_logits = _divided(module._get_logits, temperature)


def _divided(get_logits: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    def divided(*arguments: Any, **named: Any) -> Any:
        return get_logits(*arguments, **named).div_(temperature)  # float32, after any soft cap

    return divided
