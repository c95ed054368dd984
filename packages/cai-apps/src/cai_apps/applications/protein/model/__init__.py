"""The model of AlphaFold 2, a file for each of its parts.

Algorithms and sections are numbered as in the supplement of Jumper et al., Nature 596 (2021). Sizes: B samples,
S sequences of an alignment, R residues, T templates, N heads; m is an alignment [B, S, R, c_m], z a pair
[B, R, R, c_z], s a sequence [B, R, c_s]. Masks are 1 where there is something, else 0.
"""
