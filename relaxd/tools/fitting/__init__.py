"""Calculation of the bytes that a run will hold on GPUs, hosts and disk, from settings and config.json."""
