"""The trainer of a rehearsal: the real intake, packing, plans, step files and commits, and no model."""
