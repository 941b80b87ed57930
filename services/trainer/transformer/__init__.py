"""Parts of the transformer layers in `services.trainer.model`: attention, MLPs, gated delta nets, kernels.

`attention_kernels.py` chooses the kernel of attention; `sequence_layout.py` says where each token is; `mlp.py` combines
router, experts and shared expert.
"""
