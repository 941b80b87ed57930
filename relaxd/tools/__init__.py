"""Tools beside the core, which nothing of the core imports: model fetch, fit, migrate, rehearse, doctor."""
