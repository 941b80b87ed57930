"""The judge that rewards ask: the run's own replicas, or a server at roles.judge.address."""
