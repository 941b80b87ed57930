"""The teacher service: the teacher of on-policy distillation. `services.trainer.frozen` is what it does."""
