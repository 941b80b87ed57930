"""The deployables: one package per service, none of which imports another."""
