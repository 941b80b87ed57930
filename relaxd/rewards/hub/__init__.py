"""Bundled rewards, one file each, listed in `relaxd.rewards.table`. Mathematical ones are in another folder."""
