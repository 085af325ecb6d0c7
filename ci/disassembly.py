"""Read what the compiler made of the CPU kernels: which instructions are in a variant's hot loops.

`python ci/disassembly.py BUILD_FOLDER --objdump OBJDUMP` checks every variant found in a build folder:
the products' inner loops contain the instructions that the variant exists for, they keep their
accumulators in registers, and nothing of a better CPU has leaked into the variant. The last is what
keeps an old CPU from dying of an illegal instruction. Exit status 1 and a line per finding if not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STACK = re.compile(r"%[er]sp|%[er]bp|\bsp\b|\(r1\)")


@dataclass
class Instruction:
    address: int
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.name} {self.operands}"


@dataclass
class Function:
    name: str
    body: list[Instruction] = field(default_factory=list)

    def loops(self) -> list[list[Instruction]]:
        """Innermost loops: from the target of a backward jump to it, with no other such jump inside."""
        first = self.body[0].address if self.body else 0
        spans: list[tuple[int, int]] = []
        for at in self.body:
            target = re.search(r"\b([0-9a-f]+) <[^>]*", at.operands)
            jumps = at.name.startswith(("j", "b")) or at.name in ("cbz", "cbnz", "tbz", "tbnz")
            if jumps and target and first <= int(target[1], 16) <= at.address:
                spans.append((int(target[1], 16), at.address))
        inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
        return [[i for i in self.body if begin <= i.address <= end] for begin, end in inner]


def functions(objdump: str, path: Path) -> Iterator[Function]:
    """The functions of an object file, demangled."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    current: Function | None = None
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if current:
                yield current
            current = Function(head[1])
        elif current and (row := re.match(r"\s*([0-9a-f]+):\t(\S+)\s*(.*)", line)):
            current.body.append(Instruction(int(row[1], 16), row[2], row[3]))
    if current:
        yield current


WORK = re.compile(r"v?fmadd|fmla|xvmadd|xvf32ger|vpdpbusd|vpmaddwd|pmaddwd|mulps|smull|sdot|smmla|vmsummbm|xvi8ger")
if __name__ == "__main__":
    for f in functions(sys.argv[1], Path(sys.argv[2])):
        if not re.search(sys.argv[3], f.name):
            continue
        print(f.name[-40:])
        for loop in sorted(f.loops(),key=lambda l:-sum(1 for i in l if WORK.search(i.name))/len(l))[:4]:
            n=sum(1 for i in loop if WORK.search(i.name))
            if n/len(loop)<0.15: continue
            stack = [str(i) for i in loop if STACK.search(i.operands)]
            mix: dict[str, int] = {}
            for i in loop:
                mix[i.name] = mix.get(i.name, 0) + 1
            print("  loop", len(loop), dict(sorted(mix.items(), key=lambda x: -x[1])[:9]), "STACK", len(stack), stack[:3] if len(stack)<4 else "")
