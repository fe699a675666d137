"""The host KV cache keeps pages of KV below GPU memory: in host memory and in storage."""
