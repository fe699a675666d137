"""How vision encoders are split for capture."""
