"""Trees on recurrent layers: the gated delta rule, Kimi Delta Attention and Mamba-2."""
