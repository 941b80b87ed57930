"""What the trained model is compared with: frozen models, and the columns that they make."""
