"""Protocols of programs' requests for messages, one file each."""
