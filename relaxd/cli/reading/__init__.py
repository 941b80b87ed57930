"""Commands that only read a run: they work on its services, and on its folder when these are gone."""
