"""The policy as a Megatron model: architectures, layers, and weights from and to Hugging Face folders.

A new architecture is a row in `mapping.py`.
"""
