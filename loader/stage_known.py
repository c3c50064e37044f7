"""What launches of the stages of the SSD scan pass: `load` compares it with the artifacts."""

from __future__ import annotations

from collections.abc import Mapping

from ..artifacts.errors import ManifestError
from .library import Table

_SIZES = "batch seqlen chunks chunk_size"
_STEPS = "steps_batch steps_head steps_chunk decay_batch decay_head decay_chunk"
# What a launch passes, in order, and what it selects a binary by.
_KNOWN = {
    "ssd_chunk_cumsum": (
        f"dt dt_bias rates steps decay {_SIZES} heads dt_kind bias_kind rates_kind softplus low "
        "high dt_batch dt_token dt_head bias_head rates_head",
        "",
    ),
    "ssd_bmm_chunk": (
        f"c b seq_idx out {_SIZES} groups causal out_kind c_batch c_token c_group b_batch b_token "
        "b_group seq_batch seq_token out_row",
        "dtype dstate",
    ),
    "ssd_chunk_state": (
        f"x b steps decay seq_idx states {_SIZES} heads group_heads x_batch x_token x_head b_batch "
        f"b_token b_group {_STEPS} seq_batch seq_token",
        "dtype headdim dstate",
    ),
    "ssd_state_passing": (
        f"states decay initial seq_idx out final {_SIZES} heads dim initial_kind out_kind "
        "states_batch states_chunk states_head decay_batch decay_head decay_chunk initial_batch "
        "initial_head seq_batch seq_token",
        "",
    ),
    "ssd_chunk_scan": (
        f"cb x steps decay c states d z seq_idx out {_SIZES} block_tiles heads group_heads "
        "states_kind d_kind cb_batch cb_chunk cb_group cb_row x_batch x_token x_head "
        f"{_STEPS} c_batch c_token c_group states_batch states_chunk states_head d_head d_channel "
        "z_batch z_token z_head seq_batch seq_token",
        "dtype headdim dstate",
    ),
}


def known_tables(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Those of the stages' kernels.

    Raises:
        ManifestError: the artifacts' kernels are not those that this loader knows.
    """
    found = {name: tables[name] for name in _KNOWN if name in tables}
    for name, table in found.items():
        declaration = table.declaration
        names = " ".join(parameter.name for parameter in declaration.parameters)
        if (names, " ".join(declaration.selectors)) != _KNOWN[name]:
            raise ManifestError(
                f"the artifacts' {name} has other parameters than this loader passes",
                remedy="rebuild the artifacts with this version of sonata-aot",
            )
    return found
