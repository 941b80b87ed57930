"""Bundled rewards, one file each, listed in `relaxd.rewards.table`. Those of mathematics are in another folder."""
