"""Parts that algorithms are made of: baselines, clipping, corrections, tokens left out, KL, aggregation."""
