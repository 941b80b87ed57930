"""The launcher for containers and pods. Only it has access to the Docker engine, or to the API of Kubernetes."""
