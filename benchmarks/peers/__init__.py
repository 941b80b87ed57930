"""Whole training runs of relaxd, verl and TRL on the same GPU with the same model, prompts and answers."""
