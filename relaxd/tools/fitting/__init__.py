"""Bytes that a run will hold on its GPUs, on the host and on disk, by arithmetic from settings and config.json."""
