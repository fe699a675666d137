"""graft-bigram: a drafter whose trees come from a table of the tokens that follow each token.

It shows what a drafter has to do: leave the root's best children after vLLM's first pass, and grow
the levels below. ``GRAFT_BIGRAM_TABLE`` names a JSON file, ``{"token": [best next, second best]}``.
A token that the table lacks is followed by itself. The answers are the target's, whatever it says.
"""

from vllm_graft.api import entries, hookimpl


@hookimpl
def graft_drafters() -> list[entries.Drafter]:
    """Offer the drafter, by the name that `graft.tree.drafter` chooses it by."""
    load = "graft_bigram.drafter:BigramTrees"
    return [entries.Drafter("bigram", load, "tokens from a table", methods=("eagle", "eagle3"))]
