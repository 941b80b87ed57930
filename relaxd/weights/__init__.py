"""Weights on their way from trainer to engines: groups, buckets, checksums."""
