"""Sources of prompts, for a run and its evaluation sets, and the conversion of their rows to prompts."""
