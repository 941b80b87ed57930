"""The sources of prompts: a run's and its evaluation sets', and what makes prompts of their rows."""
