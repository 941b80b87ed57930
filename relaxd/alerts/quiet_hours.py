"""Quiet hours of notifications: a daily time in which they are held back."""

import re
from dataclasses import dataclass
from datetime import datetime

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True)
class QuietHours:
    """Quiet hours of a day, which may pass midnight. Equal start and end mean that there are none."""

    start: int
    """Minute of the day at which the quiet hours begin."""
    end: int
    """Minute of the day at which the quiet hours end."""

    def include(self, time: datetime) -> bool:
        """Return whether a local time is within the quiet hours."""
        minute = time.hour * 60 + time.minute
        if self.start <= self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


NO_QUIET_HOURS = QuietHours(0, 0)


def parse_quiet_hours(text: str) -> QuietHours:
    """Parse "22:00-07:00"; "" are none. Raises ValueError."""
    if not text:
        return NO_QUIET_HOURS
    match = _HOURS.fullmatch(text)
    if match is None or match[1] + match[2] == match[3] + match[4]:
        raise ValueError('expected two times of the day that differ, such as "22:00-07:00"')
    return QuietHours(int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4]))
