"""Names of settings: the table of all settings, their names in other frameworks, suggestions for unknown names."""
