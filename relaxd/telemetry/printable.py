"""Text from outside, such as a model's answer or an exception's text, for logs and terminals."""

import re

_DANGEROUS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""Control characters (ESC begins terminal commands), line separators, direction marks, and lone surrogates."""
_NAMES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str, keep: str = "") -> str:
    r"""Return text with control characters, except those in `keep`, as in JSON: `\n`, `\u001b`."""

    def _escaped(match: re.Match[str]) -> str:
        found = match[0]
        return found if found in keep else _NAMES.get(found) or f"\\u{ord(found):04x}"

    return _DANGEROUS.sub(_escaped, text)


def escape_lines(text: str, indent: str = "") -> str:
    """Escape the lines of a text one by one; all after the first begin with `indent`."""
    return escape(text, keep="\n\t").replace("\n", f"\n{indent}")
