"""The gRPC API of the coordinator, and the streams of changes that clients watch."""
