"""A client of an SGLang server that runs outside of relaxd. Has no child process."""
