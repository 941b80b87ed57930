"""What the coordinator keeps in Redis: records, and the store that reads and writes them.

Every write is fenced.
"""
