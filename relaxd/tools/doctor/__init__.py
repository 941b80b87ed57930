"""`relaxd doctor`: checks of this machine and of its running services. Each is a function of `checks.CHECKS`."""
