"""Tree attention over the latents of MLA."""
