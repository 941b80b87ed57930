# ruff: noqa: RUF001 (signs that look like others are what this is about)
"""The rewards of plain numbers, as tables."""

import pytest

from tests.kit.cases import each
from tests.unit.rewards.scoring import LONG, score


@each(
    ("response", "answer", "accuracy", "well_formed"),
    [
        ("46", "46", 1, 1),
        (" 46\n", "46", 1, 1),
        ("47", "46", 0, 1),
        ("12 + 34 = 46", "46", 1, 1),
        ("12 + 34 = 46. \n", "46", 1, 1),
        ("12 + 34 = 46, so 46", "46", 1, 0),
        ("12 + 34", "46", 0, 0),
        ("46 is 12 + 34", "46", 0, 0),
        ("The answer is...46.", "46", 1, 0),
        ("46 or 47", "46", 0, 0),
        ("46 or 47", "47", 1, 0),
        ("146", "46", 0, 1),
        ("046", "46", 1, 1),
        ("46!", "46", 1, 1),
        # decimals, thousands' commas, fractions, units
        ("46.0", "46", 1, 1),
        ("46.5", "46", 0, 1),
        ("0.3", "0.30", 1, 1),
        ("1,046", "1046", 1, 1),
        ("1046", "1,046", 1, 1),
        ("1,234,567", "1234567", 1, 1),
        ("1,2,46", "46", 1, 0),
        ("1,0466", "1", 0, 0),
        ("1/46", "46", 1, 0),
        ("$46", "46", 1, 0),
        ("46 cm", "46", 1, 0),
        ("(12, 46)", "46", 1, 0),
        # signs
        ("-46", "46", 0, 1),
        ("-46", "-46", 1, 1),
        ("−46", "-46", 1, 1),
        ("−46", "46", 0, 1),
        ("100-54", "54", 1, 0),
        ("100−54", "54", 1, 0),
        # no number
        ("٤٦", "46", 0, 0),
        ("４６", "46", 0, 0),
        ("", "46", 0, 0),
        ("forty-six", "46", 0, 0),
        # long, and made to hang
        ("9" * 5000, "46", 0, 1),
        ("9" * 100_000, "46", 0, 1),
        ("9" * 100_000, "9" * 100_000, 1, 1),
        (LONG + "46", "46", 1, 0),
        ("46 " + LONG, "46", 1, 0),
        ("1 + " * 30_000, "46", 0, 0),
        ("1,111," * 20_000, "46", 0, 0),
        ("1" + " " * 100_000 + "=", "46", 0, 0),
    ],
)
def test_addition_takes_the_last_number(response, answer, accuracy, well_formed):
    assert score("addition", response, answer) == {"reward": accuracy, "accuracy": accuracy, "format": well_formed}


@pytest.mark.parametrize("answer", ["", "forty-six", "1 2", "nan", "1/2"])
def test_addition_refuses_an_answer_that_is_no_number(answer):
    with pytest.raises(ValueError, match="needs a number"):
        score("addition", "46", answer)


@each(
    ("response", "answer", "accuracy", "form"),
    [
        ("#### 72", "72", 1, 1),
        ("so\n#### 72", "48/2 = 24\n#### 72", 1, 1),
        ("####72.", "72", 1, 1),
        ("####\n72", "72", 1, 1),
        ("#### 72 apples", "72", 1, 1),
        ("#### 72\nThat is the answer.", "72", 1, 1),
        ("#### 71", "72", 0, 1),
        ("#### 072", "72", 1, 1),
        # thousands' commas, decimals, dollars, percent, signs
        ("#### $1,072.50", "1072.5", 1, 1),
        ("#### 1,072", "1072", 1, 1),
        ("#### 1072", "1,072", 1, 1),
        ("#### 72.0", "72", 1, 1),
        ("#### 72.5", "72", 0, 1),
        ("#### 72%", "72", 1, 1),
        ("#### -3", "-3", 1, 1),
        ("#### -3", "3", 0, 1),
        ("#### −3", "-3", 1, 1),
        ("#### 72", "$72", 1, 1),
        ("#### 1.2.3", "72", 0, 1),
        # formulas, of which the first number isn't the value
        ("#### 1/2", "1", 0, 0),
        ("#### 72/2", "7", 0, 0),
        ("#### 5-10", "5", 0, 0),
        ("#### 2 + 3", "2", 0, 0),
        ("#### 2^10", "2", 0, 0),
        ("#### 5e3", "5", 0, 0),
        ("#### (1, 2)", "1", 0, 0),
        ("#### 72 - as computed", "72", 1, 1),
        ("#### 72\n- 2 apples are left", "72", 1, 1),
        # two answers, none
        ("#### 71\n#### 72", "72", 1, 1),
        ("#### 72\n#### 71", "72", 0, 1),
        ("#### 72\n#### 72/2", "72", 0, 0),
        ("72", "72", 0, 0),
        ("### 72", "72", 0, 0),
        ("#### none", "72", 0, 0),
        (r"#### \boxed{72}", "72", 0, 0),
        ("#### ７２", "72", 0, 0),
        ("", "72", 0, 0),
        # long, and made to hang
        ("#### 72" + LONG, "72", 0, 0),
        (LONG + "#### 72", "72", 1, 1),
        ("#### " + "7" * 100_000, "72", 0, 0),
        ("####" + " " * 250 + "72", "72", 1, 1),
        ("####" + " " * 100_000 + "72", "72", 0, 0),
        ("#" * 100_000, "72", 0, 0),
        ("#### " + "," * 290, "72", 0, 0),
    ],
)
def test_gsm8k(response, answer, accuracy, form):
    assert score("gsm8k", response, answer) == {"reward": accuracy, "accuracy": accuracy, "format": form}


@each("answer", ["", "none", "####", "#### 1/2", "1/2", "nan", "Infinity"])
def test_gsm8k_refuses_an_answer_that_is_no_number(answer):
    with pytest.raises(ValueError, match="needs a number"):
        score("gsm8k", "#### 1", answer)
