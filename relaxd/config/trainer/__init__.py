"""The trainer's settings, and the divisions of a model among its ranks that they describe."""
