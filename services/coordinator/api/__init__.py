"""The gRPC API of the coordinator. Holds no state."""
