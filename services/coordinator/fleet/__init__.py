"""Who is there: registered replicas, their leases and GPUs, and channels to them.

Waiting for any change of that is `changes.py`.
"""
