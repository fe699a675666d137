"""How large trees are: shapes, plans, and what is learned while serving."""
