"""Conversion of other frameworks' configurations to relaxd's."""
