"""Calls of a user's own sampler, which chooses the prompt of each visit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from relaxd.config.data import CurriculumConfig
from relaxd.importing import ImportProblem, describe_error, import_own
from relaxd.models import DataError

if TYPE_CHECKING:
    from relaxd.data.curriculum.prompt_record import PromptRecord

SETTING = "data.curriculum.sampler"


class Sampler(Protocol):
    """Interface of a user's sampler class, which is made with (prompts, seed, **data.curriculum.settings)."""

    def choose(self, visit: int, record: PromptRecord) -> int:
        """Return the index of the prompt for a visit, 0 <= index < prompts.

        It may be called for the same visit again. A restarted coordinator makes a new sampler; visits and record
        continue.

        Args:
            visit: number of the visit, from 0.
            record: `tries` [prompts], `pass_rate` [prompts] and `left_out` [prompts]; don't change them.
        """


def make_sampler(config: CurriculumConfig, prompts: int, seed: int) -> Sampler:
    """Create a user's own sampler. Raises DataError if its class can't be imported or created, or has no `choose`."""
    try:
        kind = import_own(config.sampler)
    except ImportProblem as error:
        raise DataError(SETTING, f'= "{config.sampler}": {error}') from error
    if not callable(getattr(kind, "choose", None)):
        raise DataError(SETTING, f'= "{config.sampler}" has no method choose(visit, record)')
    try:
        sampler: Sampler = kind(prompts, seed, **config.settings)
    except Exception as error:  # a user's class may raise anything
        reason = describe_error(error)
        raise DataError(
            SETTING, f'= "{config.sampler}" can\'t be made with (prompts, seed, **settings): {reason}'
        ) from error
    return sampler


class OwnSampler:
    """Calls a user's own sampler. A sampler that fails is recreated from its file at the next visit."""

    def __init__(self, config: CurriculumConfig, prompts: int, seed: int) -> None:
        self._config = config
        self._prompts = prompts
        self._seed = seed
        self._name = config.sampler
        self._sampler: Sampler | None = None

    def choose(self, visit: int, record: PromptRecord) -> int:
        """Return the index of the prompt for a visit.

        Raises DataError if the sampler can't be created, fails, or returns no index of a prompt.
        """
        sampler = self._sampler = self._sampler or make_sampler(self._config, self._prompts, self._seed)
        try:
            index = sampler.choose(visit, record)
            if not isinstance(index, int | np.integer) or isinstance(index, bool) or not 0 <= index < self._prompts:
                raise ValueError(f"it chose {index!r}: it must be an index of the {self._prompts} prompts")
        except Exception as error:  # a user's class may raise anything
            self._sampler = None
            raise DataError(SETTING, f'= "{self._name}" failed at visit {visit}: {describe_error(error)}') from error
        return int(index)
