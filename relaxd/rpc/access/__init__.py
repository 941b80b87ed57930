"""Authorisation: tokens, each for a role (`tokens`), and what a role may do (`callers`)."""
