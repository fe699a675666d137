"""spec_decode."""
