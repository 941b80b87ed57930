"""Evaluation: sets of prompts, estimates such as pass@k with their confidence intervals, and their tables."""
