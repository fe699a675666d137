"""spec_decode.kernels."""
