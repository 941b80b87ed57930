"""Curricula: choose how often a prompt is given by how well the model has answered it so far."""
