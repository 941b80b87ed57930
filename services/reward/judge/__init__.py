"""The judge for rewards' questions: the run's own replicas, or a server at roles.judge.address."""
