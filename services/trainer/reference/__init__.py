"""The reference service: the reference model of a KL term. `services.trainer.frozen` is what it does."""
