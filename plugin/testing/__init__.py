"""plugin.testing."""
