"""Curricula: they decide how often a prompt is given, by the model's past answers to it."""
