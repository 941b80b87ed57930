"""Parts that algorithms are made of: baselines, clipping, corrections, limits, KL, aggregation."""
