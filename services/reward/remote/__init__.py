"""Rewards from services in other languages: reward.address."""
