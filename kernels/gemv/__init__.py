"""Skinny GEMV on the tensor cores, for 1 to 8 rows of x."""
