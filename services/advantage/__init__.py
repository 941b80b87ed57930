"""The advantage service: turns rewards into advantages."""
