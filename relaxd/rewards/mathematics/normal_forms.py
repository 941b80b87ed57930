"""Normal forms of mathematical answers: the content of the last box, plain formulas, MATH's form, and numbers.

Equal answers are equal texts."""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

_BOX = re.compile(r"\\(?:boxed|fbox)")
_TAIL = 1000
"""Number of characters at a text's end in which a box is first searched for, with `rfind`, which is faster than
`re`."""
_SPACES = 40
_OTHERS = (r"\fbox", r"\{", r"\}")
_BEHIND = ("\n", "\t", "{", "}", "$")
"""Characters after which a new box always begins, because the content of a box without braces contains none of them."""
# Every alternative begins with another literal character, so that re skips other text ten times as fast.
_TOKEN = re.compile(r"\\(?:(?:boxed|fbox)(?:\s*\{| +(?P<bare>[^\s{}$]+))|(?<!\\\\)[{}])|\{|\}")


def last_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...} or \\fbox{...}, or None if there is none.

    The last box is the box that begins last: for "\\boxed{\\boxed{5}}" the content is "5". Its braces must be balanced,
    except escaped braces; an unclosed box, as in an answer that was cut off, doesn't count. "\\boxed 5" counts, too.
    Takes time linear in the text.
    """
    found = _boxed_at_end(text)
    if found is not None:
        return found
    first = _BOX.search(text)
    if first is None:
        return None
    opened: list[tuple[int, bool]] = []  # indices after open braces, and whether each belongs to a box
    last = (-1, "")
    for token in _TOKEN.finditer(text, first.start()):  # braces before it close no box
        word = token.group()
        if token["bare"] is not None:
            last = max(last, (token.end(), token["bare"]))
        elif word == "}":
            start, is_box = opened.pop() if opened else (-1, False)
            if is_box and start > last[0]:
                last = start, text[start : token.start()]
        elif word.endswith("{") and word != r"\{":
            opened.append((token.end(), word != "{"))
    return last[1].strip() if last[0] >= 0 else None


def _boxed_at_end(text: str) -> str | None:
    """Fast path: return the content of a \\boxed{...} near the end if it surely is the last box, or else None."""
    start = text.rfind(r"\boxed", max(0, len(text) - _TAIL))
    if start < 0 or not text.startswith("{", start + 6):
        return None
    before = text[max(0, start - _SPACES) : start]
    said = before.rstrip(" ")
    # It may be in another box's content without braces: that of "\\boxed \\boxed{5}" is "\\boxed".
    if not said:
        inside = start > _SPACES
    else:
        inside = said.endswith(("boxed", "fbox")) if said != before else not said.endswith(_BEHIND)
    if inside:
        return None
    if any(text.find(other, start) >= 0 for other in _OTHERS):
        return None
    depth, place = 0, start
    while (end := text.find("}", place)) >= 0:
        depth += text.count("{", place, end) - 1
        if not depth:
            return text[start + 7 : end].strip()
        place = end + 1
    return None


# ruff: noqa: RUF001 (signs that look like others are what this is about)


_DEEPEST = 32
"""Maximum nesting depth to which LaTeX fractions and roots are converted; deeper ones stay unchanged."""
_LARGE = {"million": 6, "billion": 9, "trillion": 12}
_LARGE_NUMBER = re.compile(rf"([0-9]{{1,12}})(\.[0-9]{{1,12}})?\s*({'|'.join(_LARGE)})s?(?![a-z])", re.IGNORECASE)
UNIT = r"(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es|s)?"
"""Pattern of names of units, which normal forms omit."""
_UNITS = re.compile(rf"(?<![a-z\\]){UNIT}(?![a-z])\s*(?:\^\s*\{{?[0-9]+\}}?)?", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[!,;: ]|\\?\$|\\?%|\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°"
)
_SYMBOLS = {
    r"\cdot": "*", r"\times": "*", r"\div": "/", r"\pi": "pi", r"\infty": "infinity", r"\cup": "∪", r"\le": "≤",
    r"\ge": "≥", r"\{": "{", r"\}": "}", "×": "*", "·": "*", "÷": "/", "π": "pi", "∞": "infinity", "√": "sqrt",
    "−": "-", "–": "-", "⁄": "/", "∕": "/",
}  # fmt: skip
_SYMBOL = re.compile(r"\\(?:cdot|times|div|pi|infty|cup)(?![a-z])|\\(?:le|ge)q?(?![a-z])|\\[{}]|[×·÷π∞√−–⁄∕]")
_FRAC = re.compile(r"\\[td]?frac\{([^{}]*)\}\{([^{}]*)\}")
_SHORT_FRAC = re.compile(r"\\[td]?frac\s*([0-9a-z])\s*([0-9a-z])", re.IGNORECASE)
_HALF_SHORT_FRAC = re.compile(r"\\[td]?frac\s*(?:([0-9a-z])\s*(?=\{)|(\{[^{}]*\})\s*([0-9a-z]))", re.IGNORECASE)
_ROOT = re.compile(r"\\sqrt\s*\[([^\[\]{}]*)\]\s*\{([^{}]*)\}")
_SQRT = re.compile(r"\\sqrt\s*(?:\{([^{}]*)\}|([0-9a-z]))", re.IGNORECASE)
_POWER = re.compile(r"([\^_])\{([^{}]*)\}")
_FUNCTION = re.compile(r"\\(sin|cos|tan|ln|log|exp)(?![a-z])")
_MIXED = re.compile(r"(?<![0-9.)^])([0-9]+)(?:\s+([0-9]+)/([0-9]+)|\s*\(([0-9]+)/([0-9]+)\))(?![0-9.])")
_THOUSANDS = re.compile(r"(?<![0-9,.])([0-9]{1,3}(?:,(?:\\!)?[0-9]{3})+)(?![0-9,])")
_SUPERSCRIPTS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+")


def plain(answer: str) -> str:
    """Convert an answer from LaTeX and Unicode to a plain formula such as "(1/2)"; unknown parts stay unchanged."""
    text = _SUPERSCRIPTS.sub(lambda match: f"^{unicodedata.normalize('NFKC', match[0])}", answer.strip())
    text = _SYMBOL.sub(lambda match: _SYMBOLS[match[0].removesuffix("q")], text)
    # Compatibility forms: digits of full width, and ½, which becomes "1⁄2" and then "1/2".
    text = re.sub(r"[¼-¾⅐-⅞]", lambda match: f" {unicodedata.normalize('NFKC', match[0])}", text)
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/")
    text = _TEXT.sub(r" \1 ", text.replace("\\\\", "\\").replace("{,}", ","))
    if not _inside_brackets(text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", "").replace("\\!", ""), text)
    text = _LAYOUT.sub("", text.replace("\n", " "))
    text = re.sub(r"\s+(?:or|and)\s+", ",", text)
    text = _LARGE_NUMBER.sub(_digits, text)
    text = _UNITS.sub("", text)
    text = _FUNCTION.sub(r"\1", _plain_fractions(text).lower())
    text = _MIXED.sub(lambda match: f"({match[1]}+{match[2] or match[4]}/{match[3] or match[5]})", text)
    return _without_outer(re.sub(r"\s+", "", text).rstrip("."))


def _digits(match: re.Match[str]) -> str:
    """Write a number such as "2.5 million" with all its digits, so that it is recognised as a whole number."""
    value = Decimal(match[1] + (match[2] or "")).scaleb(_LARGE[match[3].lower()])
    return f"{value.normalize():f}"


def _plain_fractions(text: str) -> str:
    """Convert LaTeX's fractions, roots and powers to formulas with brackets, such as "(1/2)", from the inside out."""
    text = _SHORT_FRAC.sub(r"(\1/\2)", text)
    text = _HALF_SHORT_FRAC.sub(lambda m: rf"\frac{{{m[1]}}}" if m[1] else rf"\frac{m[2]}{{{m[3]}}}", text)
    for _ in range(_DEEPEST):
        before = text
        text = _FRAC.sub(lambda match: f"({_group(match[1])}/{_group(match[2])})", text)
        text = _ROOT.sub(r"((\2)^(1/(\1)))", text)
        text = _SQRT.sub(lambda match: f"sqrt({match[1] or match[2]})", text)
        text = _POWER.sub(lambda match: f"{match[1]}{_group(match[2])}", text)
        if text == before:
            break
    return text


def _group(text: str) -> str:
    text = text.strip()
    return text if re.fullmatch(r"[0-9.]+|[a-zA-Z]", text) else f"({text})"


def _inside_brackets(text: str) -> bool:
    text = text.strip()
    return text[:1] in "([{" and "," in text


def _without_outer(text: str) -> str:
    """Return a formula without brackets around the whole, unless they enclose a list."""
    while len(text) > 1 and text[0] + text[-1] in ("()", "{}") and "," not in text and _closes_at_end(text):
        text = text[1:-1]
    return text


def _closes_at_end(text: str) -> bool:
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


_WHOLE_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_MATHD_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{\s[^{}]*\}.*|\\(?:text|mathrm|mbox)\{[^{}]*\}$", re.DOTALL)
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°")
_DROPPED = re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\\?\$|\\?%|\\[,;:]|\n")
_NAME = re.compile(r"\A\s*\S{1,2}\s*=(?!=)")
_SHORT_SQRT = re.compile(r"\\sqrt\s*([^\s{\[\\])")
_MATHD_SHORT_FRAC = re.compile(r"\\frac(?:([0-9a-zA-Z])|\{([^{}]*)\})\s*(?:([0-9a-zA-Z])|\{([^{}]*)\})")
_SLASH = re.compile(r"(-?)([0-9]+)/(-?[0-9]+)")


def normalize(answer: str) -> str:
    """Return MATH's normal form of an answer in LaTeX.

    It drops text that doesn't change the value: layout, degrees, dollars, percent, units at the end, a leading "x =",
    and blanks. "0.5" and "a/b" of whole numbers become \\frac{}{}. Numbers keep their digits: "0.50" and "0.5" differ.
    """
    answer = answer.strip()
    if whole := _WHOLE_TEXT.fullmatch(answer):
        answer = whole[1].strip()
    answer = _DEGREES.sub("", answer.replace("\\\\", "\\"))
    answer = _DROPPED.sub("", re.sub(r"\\[td]frac", r"\\frac", answer)).strip()
    answer = _MATHD_UNITS.sub("", answer) or answer
    if answer.count("=") == 1:
        answer = _NAME.sub("", answer, count=1)
    answer = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", answer)
    answer = _SHORT_SQRT.sub(r"\\sqrt{\1}", answer)
    answer = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", answer)  # "7 3/4" is not "73/4"
    answer = _MATHD_SHORT_FRAC.sub(_frac, answer)
    if slash := _SLASH.fullmatch(answer):
        answer = f"{slash[1]}\\frac{{{slash[2]}}}{{{slash[3]}}}"
    return r"\frac{1}{2}" if answer == "0.5" else answer


@lru_cache(1024)  # the samples of a group share it
def reference(answer: str, reward: str) -> str:
    """Return a reference answer, or the content of its box if it has one.

    Raises ValueError if it is empty, because every reply would then get the same reward.
    """
    boxed = last_boxed(answer)
    found = answer.strip() if boxed is None else boxed
    if not found:
        raise ValueError(f"answer is {answer!r}: the reward {reward} needs a reference answer")
    return found


def _frac(match: re.Match[str]) -> str:
    above, below = match[1] or match[2], match[3] or match[4]
    return f"\\frac{{{above or ''}}}{{{below or ''}}}"


MAX_LETTERS = 60
"""Maximum length of a number, in characters, that the fast path accepts; equals the formula parser's MAX_DIGITS."""
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_WRITTEN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|" + _DECIMAL + ")(?:/[0-9]+)?"
_SUFFIX = rf" *\\?%|\^\\circ|\^\{{\\circ\}}|°|(?:\\,)? *(?:{UNIT}|\\(?:text|mathrm)\{{ *{UNIT} *\}})"
_NUMERAL = re.compile(
    rf"(?:\\?\$ *)?(?P<sign>-?)(?:(?P<written>{_WRITTEN})"
    r"|\\[dt]?frac(?:(?P<a>[0-9])(?P<b>[0-9])|\{(?P<minus>-?)(?P<above>[0-9]+)\}\{(?P<below>[0-9]+)\}))"
    rf"(?:{_SUFFIX})? *\$?"
)
_RATIONAL = re.compile(rf"(-?)(\()?(?:({_DECIMAL})|\((-{_DECIMAL})\))(?:/({_DECIMAL}))?(?(2)\))")


def numeral(answer: str) -> str | None:
    """Return the plain form of an ordinary number, faster than `plain`; None for any other answer.

    Ordinary numbers are whole numbers, decimals and fractions of whole numbers, also with \\frac, thousands' commas,
    dollars, percent, degrees and units.
    """
    if len(answer) > MAX_LETTERS or not (match := _NUMERAL.fullmatch(answer.strip())):
        return None
    sign = match["sign"]
    if match["written"]:
        return f"{sign}{match['written'].replace(',', '')}"
    above, below = match["above"] or match["a"], match["below"] or match["b"]
    fraction = f"(-{above})/{below}" if match["minus"] else f"{above}/{below}"
    return f"-({fraction})" if sign else fraction


def rational(text: str) -> Fraction | None:
    """Return the value of a plain formula that is a decimal or a fraction of decimals; None otherwise."""
    if len(text) > MAX_LETTERS or not (match := _RATIONAL.fullmatch(text)):
        return None
    sign, _, above, negative, below = match.groups()
    divisor = Fraction(below or 1)
    if not divisor:
        return None
    value = Fraction(above or negative) / divisor
    return -value if sign else value
