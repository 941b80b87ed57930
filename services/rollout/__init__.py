"""The rollout service: one inference engine, fed by the board and by Generate."""
