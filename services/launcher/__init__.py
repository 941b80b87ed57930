"""The launcher for containers and pods, the only service with access to the Docker engine or the API of Kubernetes."""
