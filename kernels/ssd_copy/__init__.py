"""Copies inputs of the SSD scan whose rows its kernels do not read as they are."""
