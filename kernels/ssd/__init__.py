"""The SSD scan of Mamba2, forward: one pass over the sequence, and the five stages apart."""
