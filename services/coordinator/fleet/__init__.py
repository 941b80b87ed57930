"""Registered replicas: leases, GPUs, channels, and a signal for changes."""
