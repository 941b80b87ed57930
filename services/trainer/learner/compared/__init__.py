"""What the trained model is compared with: frozen models, the columns that they make, and which one a group is for."""
