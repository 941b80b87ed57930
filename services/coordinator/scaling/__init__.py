"""Scale requests: add or remove replicas, one request at a time for each role."""
