"""The worker process, which runs rewards one call at a time. The pool kills it at the call's deadline."""
