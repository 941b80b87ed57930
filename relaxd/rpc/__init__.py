"""gRPC servers and clients: health, reflection, deadlines, authentication, errors, tracing."""
