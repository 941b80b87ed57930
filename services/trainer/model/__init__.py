"""The policy as a Megatron model: architectures, layers, and weights from and to Hugging Face folders.

Each family of models has one file in `architectures`; docs/models.md says how to add another.
"""
