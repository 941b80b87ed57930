"""The `relaxd` command."""
