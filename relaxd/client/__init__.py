"""The Python client of the coordinator, and the command line's only way to call services."""
