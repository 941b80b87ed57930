"""Protocols by which programs ask for messages, a file each."""
