"""An SGLang server that somebody else runs, used through its HTTP interface.

It has no child process.
"""
