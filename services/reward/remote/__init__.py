"""Rewards of services in other languages: reward.address."""
