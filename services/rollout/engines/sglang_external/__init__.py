"""Client of an SGLang server that runs outside of relaxd; it has no child process."""
