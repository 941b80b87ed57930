"""The trainer service: a Megatron world that turns groups into optimizer steps."""
