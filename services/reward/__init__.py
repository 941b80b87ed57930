"""The reward service: scores samples in worker processes that it kills at their deadline."""
