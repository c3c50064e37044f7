"""The chunked form that long tests compare with, held against the scan token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sonata_aot.aot.measure.ssd_chunked import scan_in_chunks
from ssd_cases import indices, operands, options
from ssd_reference import scan

LENGTHS = (0, 1, 63, 64, 65, 130, 300)


def same(arguments: dict[str, Any], kept: torch.Tensor | None = None) -> None:
    found, wanted = scan_in_chunks(**arguments), scan(**arguments)
    assert isinstance(found, tuple)
    assert isinstance(wanted, tuple)
    assert len(found) == len(wanted)
    for mine, its in zip(found, wanted, strict=True):
        if kept is not None and mine.shape[:2] == kept.shape:
            mine, its = mine[kept], its[kept]
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_everything_at_once(seqlen: int) -> None:
    required = operands(seqlen=seqlen, seed=seqlen)
    same({**required, **options(required), "dt_softplus": True, "return_final_states": True})
    same({**required, "dt_limit": (0.1, 0.5), "return_final_states": True})


@pytest.mark.parametrize("lengths", [(300,), (1, 63, 64, 65, 107), (200, 0, 100), (70, 130)])
def test_sequences(lengths: tuple[int, ...]) -> None:
    seqlen = sum(lengths)
    required = operands(batch=1, seqlen=seqlen)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    more = {"seq_idx": indices(*lengths), "cu_seqlens": bounds}
    wanted = {"return_final_states": True, "return_varlen_states": True}
    same({**required, **options(required), **more, **wanted})


def test_empty_sequences_without_tokens() -> None:
    required = operands(batch=1, seqlen=0)
    bounds = torch.zeros(3, dtype=torch.int32)
    same({**required, **options(required), "cu_seqlens": bounds, "return_varlen_states": True})


def test_padding() -> None:
    required = operands(seqlen=200)
    index = torch.zeros(2, 200, dtype=torch.int32)
    index[0, 60:70], index[0, 70:], index[1, 150:] = -1, 2, -1
    same({**required, "seq_idx": index, "return_final_states": True}, kept=index >= 0)
