"""Skinny GEMV: y = x W^T for decode batches."""
