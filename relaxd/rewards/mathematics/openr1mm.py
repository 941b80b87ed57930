"""Open-R1's reward for multimodal mathematics: compares with math-verify, or as exact text.

If an answer is a sentence, math-verify gets only its formula, as LaTeX between dollars.
"""

import logging

# ruff: noqa: RUF001 (signs that look like others are what this is about)
import re
import unicodedata
from itertools import pairwise

from relaxd.media.messages import tagged
from relaxd.rewards.interface import RewardInput, TooSlow, time_limit
from relaxd.rewards.mathematics.equality import written_out
from relaxd.rewards.mathematics.normal_forms import reference

VERIFY_SECONDS = 3.0
"""Maximum seconds for math-verify to parse and compare two answers; slower ones count as different."""
MAX_LETTERS = 4000
"""Number of characters at a reply's end that math-verify parses, at most."""
_MATH_VERIFY_LOG = logging.getLogger("math_verify")
_CURRENCY = r"\$"
"""LaTeX of a dollar as currency; unlike a plain dollar sign, it doesn't enclose a formula."""
_IN_DOLLARS = re.compile(r"\${1,2}[^$]+\${1,2}")
_TAGS = ("</think>", "<answer>", "</answer>")


def openr1mm(sample: RewardInput) -> dict[str, float]:
    """1 if math-verify accepts the reply, or the text in its <answer> equals the expected one; else 0.

    A reply with more than one </think>, <answer> or </answer> gets 0. Parts: accuracy (equal to the reward), and
    format: 1 if there is exactly one <answer> and one </answer>. Needs the package math-verify.

    Raises:
        ValueError: the answer is empty.
    """
    expected = reference(_untagged(sample.answer), "openr1mm")
    found = tagged(sample.response)
    if any(sample.response.count(tag) > 1 for tag in _TAGS):
        return {"reward": 0.0, "accuracy": 0.0, "format": 0.0}
    same = bool(found) and found[0].strip() == expected
    accuracy = float(same or _is_verified(expected, found[0] if found else sample.response))
    return {"reward": accuracy, "accuracy": accuracy, "format": float(bool(found))}


def _untagged(answer: str) -> str:
    found = tagged(answer)
    return found[-1] if found else answer


def _is_verified(expected: str, response: str) -> bool:
    from math_verify import parse, verify

    _MATH_VERIFY_LOG.setLevel(logging.ERROR)  # it warns that its own time limits are off, which is intended
    expected = expected.replace(_CURRENCY, "")
    if len(_IN_DOLLARS.findall(expected)) > 1:
        expected = expected.replace("$", "")
    reference = _marked(expected)
    if reference is None:  # math-verify would read one number of several
        return False
    reply = response[-MAX_LETTERS:].replace(_CURRENCY, "")
    # Its own limits are off: its handler of SIGALRM would replace ours.
    try:
        with time_limit(VERIFY_SECONDS):
            gold = parse(reference, parsing_timeout=None)
            target = parse(_marked(reply) or reply, parsing_timeout=None)
            return bool(gold) and bool(target) and bool(verify(gold, target, timeout_seconds=None))
    except (TooSlow, RecursionError):
        return False


def _marked(text: str) -> str | None:
    """Return a text whose formulas are marked, by dollars or boxes, as math-verify needs it.

    A text without marks is reduced to the formula that states its answer; None if there is no formula or several.
    """
    return with_improper_fractions(text) if has_marks(text) else formula_of(text)


_NAMES = (
    "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp", "pi",
    "infinity",
)  # fmt: skip
"""Names of mathematical functions and constants that LaTeX writes with a backslash."""
_SMALL = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "by", "do", "for", "get", "gets", "has", "he", "hence", "if", "in",
    "is", "it", "its", "just", "me", "my", "no", "not", "of", "on", "one", "or", "our", "out", "she", "so", "the",
    "then", "thus", "to", "two", "us", "was", "we", "yes", "you",
    "cm", "ft", "hr", "kg", "km", "lb", "lbs", "mg", "min", "ml", "mm", "mph", "oz",
})  # fmt: skip
"""Short English words and units, which are no formulas. Other words of up to three letters may be products of
variables."""
_WORD = re.compile(
    r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*[A-Za-z]{2}[^{}]*)\}|(?<![\\A-Za-z_^{])([A-Za-z]{2,})(?![A-Za-z(]))"
    r"(?:\s*\^\s*\{?[0-9]\}?)?"
)
"""Pattern of a word, or of text such as \\text{cm} in LaTeX, with a power such as ^2 if it is a unit."""
_CONTENT = re.compile(rf"[0-9\\π√∞¼-¾|]|(?<![A-Za-z])(?:{'|'.join(_NAMES)})(?![A-Za-z])|[A-Za-z]\s*[-+*/^=<>(]")
"""Pattern of digits, signs and function names; a piece of a sentence that has a match is taken as a formula."""
_MARKS = re.compile(r"\$|\\boxed|(?<!\\)\\[(\[]")
_STATED = re.compile(r"\b(?i:answer)\s*(?:(?i:is)|:|=)+")
_MIXED = re.compile(
    r"(?<![\w.,/\\^}])([0-9]{1,9})(?:\s+([0-9]{1,9})/([0-9]{1,9})|\s*\\[dt]?frac\s*\{([0-9]{1,9})\}\s*\{([0-9]{1,9})\})"
    r"(?![\w./])"
)
_ROOT = re.compile(r"(?:(?<![\\A-Za-z])sqrt\s*|√\s*)\(")
_SHORT_ROOT = re.compile(r"√\s*([0-9]+|[A-Za-z])")
_MOST_ROOTS = 20
_ROW_GAP = re.compile(r"(?<=\\\\)\s*\[[^\[\]]*\]")
"""Pattern of the spacing after a matrix row, which math-verify can't parse."""
_NAME = re.compile(rf"(?<![\\A-Za-z])({'|'.join(_NAMES)})(?![A-Za-z])")
_POWER = re.compile(r"\^\s*(?:\(([^()]*)\)|(-?[0-9]{2,}|-[0-9a-z]))")
_SIGNS = {
    "π": r"\pi ", "∞": r"\infty ", "−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ",
    "<=": r"\le ", ">=": r"\ge ", "**": "^", r"\infinity": r"\infty", "*": r"\cdot ",
}  # fmt: skip
"""Mathematical signs, such as "π" and "<=", and the LaTeX that replaces them, in this order."""
_SUPERSCRIPTS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+")


def has_marks(text: str) -> bool:
    """Return True if a text has formulas in dollars or boxes, or in brackets such as \\(...\\)."""
    return _MARKS.search(text) is not None


def formula_of(text: str) -> str | None:
    """Return the formula of the sentence that states the answer, between dollars; None if that sentence has no formula
    or several.

    The text after the last "answer is" states the answer, or else the last sentence. Formulas joined by "or" or "and"
    count as one list.
    """
    said = _sentence(text)
    pieces, joints, place = [], [], 0
    for word in _WORD.finditer(said):
        inside = (word[1] or word[2]).strip().lower()
        if word[2] and (inside in _NAMES or (len(inside) < 4 and inside not in _SMALL)):
            continue
        pieces.append(said[place : word.start()])
        joints.append(inside)
        place = word.end()
    pieces.append(said[place:])
    if not joints:
        return f"${_latex(said)}$" if said else None
    found = [number for number, piece in enumerate(pieces) if _CONTENT.search(piece)]
    if not found:
        return None
    if any(set(joints[one:other]) - {"or", "and"} for one, other in pairwise(found)):
        return None
    return f"${', '.join(_latex(_trimmed(pieces[number])) for number in found)}$"


def with_improper_fractions(text: str) -> str:
    """Replace mixed numbers such as "2 1/2" by a fraction, because math-verify would parse a product, or only "1/2"."""
    return _MIXED.sub(_improper, text)


def _improper(mixed: re.Match[str]) -> str:
    whole, above, below = int(mixed[1]), int(mixed[2] or mixed[4]), int(mixed[3] or mixed[5])
    return f"{whole * below + above}/{below}"


def _sentence(text: str) -> str:
    stated = list(_STATED.finditer(text))
    said = text[stated[-1].end() :] if stated else text
    if "\\begin" not in said:
        said = said.strip(" \t\r\n:=*")
        sentences = [one for one in re.split(r"(?<=[.?])\s+|\n", said) if one.strip(" \t\r.*")]
        said = (sentences[0] if stated else sentences[-1]) if sentences else ""
    said = re.sub(r"\*\*(?!\s*[0-9a-z(])|(?<![0-9a-z)])\*\*", "", said, flags=re.IGNORECASE)
    return said.replace("\n", " ").strip(" \t\r*#").rstrip(".").strip()


def _trimmed(piece: str) -> str:
    return re.sub(r"\\[,;: ]\s*\Z", "", piece.strip()).strip(" \t,;:.").lstrip("=)]}").rstrip("=([{").strip()


def _latex(formula: str) -> str:
    """Convert a formula, which may have Python's syntax or Unicode signs, to LaTeX."""
    text = _SUPERSCRIPTS.sub(lambda digits: f"^{{{unicodedata.normalize('NFKC', digits[0])}}}", formula)
    text = re.sub("[¼-¾⅐-⅞]", lambda found: f" {unicodedata.normalize('NFKC', found[0]).replace('⁄', '/')}", text)
    text = written_out(with_improper_fractions(text.strip()))
    text = _with_roots(_SHORT_ROOT.sub(r"\\sqrt{\1}", _ROW_GAP.sub("", text)))
    text = _NAME.sub(r"\\\1 ", text)
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return _POWER.sub(lambda power: f"^{{{power[1] or power[2]}}}", text)


def _with_roots(text: str) -> str:
    """Convert roots such as sqrt(...) to LaTeX; an unclosed root and the text after it stay unchanged."""
    for _ in range(_MOST_ROOTS):
        opened = _ROOT.search(text)
        if opened is None:
            break
        depth, end = 1, opened.end()
        while depth and end < len(text):
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if depth:
            break
        text = rf"{text[: opened.start()]}\sqrt{{{text[opened.end() : end - 1]}}}{text[end:]}"
    return text
