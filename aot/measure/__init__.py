"""Measuring on the GPU at hand: read ceilings, benchmarks, tuning tables.

The only part of the tool that imports torch and the loader; commands import it when they run.
"""
