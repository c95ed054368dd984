"""AlphaFold: the structure of a protein from its sequence and those related to it."""
