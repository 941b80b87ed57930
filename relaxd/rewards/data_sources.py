"""verl's names of data sources, and the bundled reward nearest to what verl scores each with."""

_REWARDS = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "dapo",
    "math_dapo": "dapo",
    "math_dapo_reasoning": "dapo",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "hiyouga/geometry3k": "geo3k",
    "apps": "code",
    "codecontests": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_nq": "search_r1",
    "searchR1_triviaqa": "search_r1",
    "searchR1_popqa": "search_r1",
    "searchR1_hotpotqa": "search_r1",
    "searchR1_2wikimultihopqa": "search_r1",
    "searchR1_musique": "search_r1",
    "searchR1_bamboogle": "search_r1",
}


def reward_of_data_source(name: str) -> str | None:
    """Return the name of the bundled reward for one of verl's data sources, or None if there is none."""
    return "dapo" if name.startswith("aime") else _REWARDS.get(name)
