"""verl's tools as a reward: an answer's calls are executed, and what the tools say of them is scored."""
