"""What AlphaFold learns from (section 1.9): a file for points, one for torsions, one for what the heads say.

All return a number for each sample, [B], in float32 or wider; means are over what a mask of the truth leaves.
"""
