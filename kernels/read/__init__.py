"""A kernel that only reads, to measure what reading costs."""
