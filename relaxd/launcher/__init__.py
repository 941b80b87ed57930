"""The gRPC server that all launchers share. Each brings its own host: local processes, or containers."""
