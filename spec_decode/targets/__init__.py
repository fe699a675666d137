"""What each family of target models does before and after a pass over a tree."""
