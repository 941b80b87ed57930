"""Parts from which `services.trainer.model` builds transformer layers: attention, MLPs, and kernels in Triton."""
