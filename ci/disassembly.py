"""What the compiler made of the CPU kernels: which instructions are in a variant's hot loops.

Three things are checked in the object of each variant. The products' inner loops contain the
instructions that the variant exists for. They keep their accumulators in registers. And nothing of a
better CPU has leaked in: on a CPU that lacks it, that would end the process.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# A vector register to or from the stack. Row pointers may live there: they are loaded beside the
# arithmetic. objdump writes the operands of x86 in AT&T order; rbp points at the frame only where
# the offset is negative.
X86_STACK = r"(-?0x[0-9a-f]+)?\(%rsp|-0x[0-9a-f]+\(%rbp"
SPILL = re.compile(
    rf"%[xyz]mm\d+,({X86_STACK})|^({X86_STACK})[^)]*\),%[xyz]mm|^[qv]\d+.*\[(sp|x29)|^vs?\d+,\d+\(r1\)"
)


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    operands: str


@dataclass
class Function:
    name: str
    body: list[Instruction] = field(default_factory=list)

    def loops(self) -> list[list[Instruction]]:
        """Innermost loops: from the target of a backward jump to the jump, with none inside."""
        first = self.body[0].address if self.body else 0
        spans = []
        for at in self.body:
            target = re.search(r"\b([0-9a-f]+) <", at.operands)
            jumps = at.name.startswith(("j", "b", "cbz", "cbnz", "tbz", "tbnz"))
            if jumps and target and first <= int(target[1], 16) <= at.address:
                spans.append((int(target[1], 16), at.address))
        inner = [
            s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)
        ]
        return [[i for i in self.body if begin <= i.address <= end] for begin, end in inner]


def functions(objdump: str, path: Path, env: dict[str, str] | None = None) -> Iterator[Function]:
    """The functions of an object file, demangled."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    current: Function | None = None
    for line in text.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if current:
                yield current
            current = Function(head[1])
        elif current and (row := re.match(r"\s*([0-9a-f]+):\t(?:\{\w+\} )?(\S+)\s*(.*)", line)):
            current.body.append(Instruction(int(row[1], 16), row[2], row[3]))
    if current:
        yield current


@dataclass(frozen=True)
class Expected:
    """Regular expressions for "name operands" of instructions."""

    floats: str  # the float32 product's multiply-add, in its largest tile
    ints: str  # the int8 product's
    never: str  # what no instruction of the variant may be


# zmm, the upper sixteen registers and mask registers are AVX-512's.
AVX512 = r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b"
SVE, I8MM, BF16 = r"\bz\d+\.", r"^([su]mmla|us?dot|us?mmla) v", "^bf(dot|mmla|cvt)"
EXPECTED = {
    "x86_64": {
        "baseline": Expected("mulps .*%xmm", "pmaddwd .*%xmm", "^v|%[yz]mm"),
        "avx2": Expected("vfmadd231ps .*%ymm", "vpmaddwd .*%ymm", f"^vpdp|{AVX512}"),
        "avx2_vnni": Expected("vfmadd231ps .*%ymm", "vpdpbusd .*%ymm", AVX512),
        "avx512": Expected("vfmadd231ps .*%zmm", "vpmaddwd .*%zmm", "^vpdp"),
        "avx512_vnni": Expected("vfmadd231ps .*%zmm", "vpdpbusd .*%zmm", "^vdpbf16|%tmm"),
    },
    "aarch64": {
        "baseline": Expected("fmla v", "smull v", f"^[su]dot v|{I8MM}|{BF16}|{SVE}"),
        "dotprod": Expected("fmla v", "sdot v", f"{I8MM}|{BF16}|{SVE}"),
        "i8mm": Expected("fmla v", "smmla v", f"{BF16}|{SVE}"),
    },
    # binutils from 2.40 on put dm before the names of outer products.
    "ppc64le": {
        "baseline": Expected(
            "xvmaddasp", "vmsummbm", r"ger|^p?(l|st)xvx? |^(lxvwsx|xxspltib|mtvsrws)"
        ),
        "power9": Expected(
            "xvmaddasp", "vmsummbm", r"ger|^(p(l|st)xv|(l|st)xvp|paddi|xxsplti[wd3])"
        ),
        "power10": Expected("(dm)?xvf32gerpp", "(dm)?xvi8ger4pp", "^dmxxext"),
    },
}


def check(machine: str, isa: str, all_functions: list[Function]) -> tuple[list[str], str]:
    """Findings, and a line that says what the hot loops are made of."""
    expected = EXPECTED[machine][isa]
    findings: list[str] = []
    described = []
    # FloatTile stands for FirstFloatTile too: the compiler keeps one where they are the same.
    for tile, pattern in (
        ("FloatTile::operator()", expected.floats),
        ("UnpackedTile::operator()", expected.floats),
        ("int_panel", expected.ints),
    ):
        tiles = [
            (int(m[1]), f)
            for f in all_functions
            if (m := re.search(re.escape(tile) + r"<(\d+)>", f.name))
        ]
        if not tiles:
            findings.append(f"{isa}: no {tile}")
            continue
        rows = max(n for n, _ in tiles)

        def count(loop: list[Instruction], pattern: str = pattern) -> int:
            return sum(bool(re.match(pattern, f"{i.name} {i.operands}")) for i in loop)

        for function in [f for n, f in tiles if n == rows]:
            best = max(function.loops(), key=lambda loop: count(loop) / len(loop), default=[])
            hits = count(best)
            if hits < 4:
                findings.append(f"{isa}: {pattern!r} is not what {tile} of {rows} rows loops over")
                continue
            spills = [f"{i.name} {i.operands}" for i in best if SPILL.search(i.operands)]
            if spills:
                findings.append(f"{isa}: {tile} of {rows} rows spills in its loop: {spills[:3]}")
            name = next(i.name for i in best if re.match(pattern, f"{i.name} {i.operands}"))
            described.append(f"{name} {hits} of {len(best)}")
    for function in all_functions:
        for i in function.body:
            if re.search(expected.never, f"{i.name} {i.operands}"):
                findings.append(f"{isa}: {i.name} {i.operands} in {function.name[:60]}")
    return findings[:20], ", ".join(described)


def check_build(
    machine: str, folder: Path, objdump: str, env: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """All variants in a build folder: findings, and for each variant what its loops are made of."""
    findings: list[str] = []
    described: dict[str, str] = {}
    for isa in EXPECTED[machine]:
        objects = list(folder.glob(f"CMakeFiles/octavo_{isa}.dir/**/*.o"))
        if len(objects) != 1:
            findings.append(
                f"{isa}: built as {len(objects)} objects in {folder}; the compiler may be too old for it"
            )
            continue
        found, described[isa] = check(machine, isa, list(functions(objdump, objects[0], env)))
        findings += found
    # What is shared by all variants may use nothing but the platform's baseline.
    for path in folder.glob("CMakeFiles/octavo_cpu.dir/**/*.o"):
        never = EXPECTED[machine]["baseline"].never
        findings += [
            f"{path.name}: {i.name} {i.operands}"
            for f in functions(objdump, path, env)
            for i in f.body
            if re.search(never, f"{i.name} {i.operands}")
        ][:5]
    return findings, described
