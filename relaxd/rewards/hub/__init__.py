"""Bundled rewards, one file each, listed in `relaxd.rewards.table`. Rewards for mathematics are in
`relaxd.rewards.mathematics`."""
