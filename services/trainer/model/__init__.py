"""The policy as a Megatron model: architectures, layers, and weights from and to Hugging Face folders.

To add an architecture, add its rules to `mapping.py`.
"""
