"""The coordinator: runs, replicas, the admission gate, weight synchronisation. All its state is in Redis."""
