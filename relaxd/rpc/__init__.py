"""Servers, clients and the life of a service: health, reflection, deadlines, authentication, errors, tracing."""
