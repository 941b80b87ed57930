"""The rollout service: one inference engine, which serves the board's groups and Generate calls."""
