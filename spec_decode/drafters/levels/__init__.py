"""Trees that the draft grows a level at a time, with one pass of the draft per level."""
