"""Seeding of libraries that draw from the process's one random generator."""

import threading

SEEDS = 1 << 32
"""Number of seeds: numpy, which libraries seed, too, takes none above."""
seeding = threading.Lock()
"""Held while a conversation is seeded and its first state drawn, so that no other one draws in between."""
