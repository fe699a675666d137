"""Which of vLLM's own tests run on our classes, and what is put in their place."""
