"""Which of vLLM's own tests run on our classes, what is put in their place, and what is left out."""
