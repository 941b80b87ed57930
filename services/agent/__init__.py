"""The agent service: conversations of the model with an environment, whose turns the run's engines generate."""
