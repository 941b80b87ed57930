"""Configurations of other frameworks, as relaxd's."""
