"""The coordinator's records in Redis, and the store that reads and writes them."""
