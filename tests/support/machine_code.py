"""What tests of machine code share."""

from __future__ import annotations

import re

from sonata_aot.aot.sass import parse


def loops(text: str) -> list[tuple[int, int]]:
    """Address of the first instruction and of the branch back, of each loop."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found = []
    for line in text.splitlines():
        if label := re.fullmatch(r"\s*(\.L_x_\d+):\s*", line):
            waiting.append(label[1])
        for instruction in parse(line):
            labels.update(dict.fromkeys(waiting, instruction.address))
            waiting.clear()
            target = re.search(r"\(?(\.L_x_\d+)\)?", instruction.operands)
            if instruction.mnemonic == "BRA" and target and target[1] in labels:
                start = labels[target[1]]
                if start < instruction.address:
                    found.append((start, instruction.address))
    return found
