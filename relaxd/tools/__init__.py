"""Tools that the core doesn't import: model fetch, fit, migrate, rehearse, doctor."""
