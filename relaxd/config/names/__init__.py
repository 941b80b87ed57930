"""The names of settings: the table of all, what other frameworks call them, what an unknown name may have meant."""
