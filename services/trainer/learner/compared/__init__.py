"""Frozen models beside the trained one: the columns that they make, and the choice of a model for a group."""
