"""Which prompts are given how often, by how well the model has answered them so far."""
