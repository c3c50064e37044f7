"""Sizes of the SSD scan that published models have: what a default build has kernels for."""

MODELS: dict[tuple[int, int], tuple[str, ...]] = {
    (64, 64): ("Zamba2 2.7B and 7B",),
    (64, 128): (
        "Mamba2 130M to 2.7B",
        "Zonos v0.1 hybrid",
        "Codestral Mamba 7B",
        "Bamba 9B",
        "Zamba2 1.2B",
        "Nemotron-H 4B and 8B",
        "Falcon-H1 0.5B",
    ),
    (64, 256): ("Nemotron-H 47B and 56B", "Falcon-H1 1.5B and 1.5B-Deep"),
    (80, 128): ("Nemotron Nano 2 9B and 12B",),
    (128, 256): ("Falcon-H1 3B, 7B and 34B",),
}
"""Models by (headdim, dstate)."""

HEADDIMS = (32, 64, 80, 96, 128)
"""Every headdim that there can be kernels for."""
DSTATES = (16, 32, 64, 128, 256)
"""Every dstate that there can be kernels for."""
