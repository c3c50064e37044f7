"""The five stages of the SSD scan, a kernel each."""
