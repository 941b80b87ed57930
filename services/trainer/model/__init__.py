"""The policy as a Megatron model: architectures, layers, and weights from and to Hugging Face folders.

A family of models is one file in `architectures`; docs/models.md says how to add one.
"""
