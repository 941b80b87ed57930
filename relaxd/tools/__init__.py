"""Tools beside the core, which imports none of them: model fetch, fit, migrate, rehearse, doctor."""
