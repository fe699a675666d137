"""Tree attention of a layer: which kernel computes it, and how it joins the platform's own."""
