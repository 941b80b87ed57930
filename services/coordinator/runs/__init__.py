"""Runs: start, restore, drive, evaluate, export, delete."""
