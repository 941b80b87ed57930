"""The coordinator: runs, replicas, admission gate, weight synchronisation. All its state is in Redis."""
