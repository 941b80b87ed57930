"""Columns as payloads: their encoding, their keys, their way to Redis and back."""
