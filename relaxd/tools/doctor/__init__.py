"""`relaxd doctor`: checks of this machine and of what runs on it. Each is a function of `checks.CHECKS`."""
