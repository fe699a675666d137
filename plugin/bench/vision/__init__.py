"""The benchmark of vision encoders."""
