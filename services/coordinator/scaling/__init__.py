"""Scale requests: more replicas or fewer, kept in Redis and carried out one replica at a time.

Launchers start and remove what is asked for.
"""
