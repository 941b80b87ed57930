"""Weights on their way to the engines: synchronisations, and turns on shared GPUs in colocated runs.

The weights themselves never come here.
"""
