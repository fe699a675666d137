"""Host KV cache: pages of KV below GPU memory, in host memory and in storage."""
