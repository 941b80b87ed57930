"""Commands that need no run: settings, data, rewards, models, evaluation and rehearsal before one begins."""
