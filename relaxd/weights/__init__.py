"""Weight transfer from trainer to engines: groups, buckets, checksums."""
