"""Parts of a transformer, of which `services.trainer.model` makes layers: attention, MLPs, and kernels in Triton."""
