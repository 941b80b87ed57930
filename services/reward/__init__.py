"""The reward service: scores groups, each sample in a process that can be killed."""
