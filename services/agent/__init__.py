"""The agent service: holds conversations between an environment and the model, which the run's engines serve."""
