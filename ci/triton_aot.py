#!/usr/bin/env python3
"""Compile every Triton kernel for every chip, without a GPU, and check what came out.

    ci/triton_aot.py --quick             every variant and every chip at least once (each CI run)
    ci/triton_aot.py                     every variant for every chip
    ci/triton_aot.py --write             the same, and write docs/backends/triton-kernels.md

A kernel must not spill registers, must fit the chip's shared memory, and must multiply matrices of 16-bit
numbers with matrix instructions. A kernel that nothing is compiled of is an error. Results are kept under
build/triton_aot by source, Triton's version, chip and constants.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "ci"))

import triton_chips as chips  # noqa: E402 - it is beside this file

PACKAGE = "octavo.kernels.triton"
PAGE = ROOT / "docs/backends/triton-kernels.md"
DATA = PAGE.with_suffix(".json")
CACHE = ROOT / "build/triton_aot"
JOBS = 2

Task = tuple[str, str, str]
"""Module, name of the variant, arch."""


# ----------------------------------------------------------------------------- what there is to do


def modules(package: str) -> dict[str, Any]:
    """The package's modules by their last name, imported."""
    found = importlib.import_module(package)
    names = sorted(info.name for info in pkgutil.iter_modules(found.__path__))
    return {name: importlib.import_module(f"{package}.{name}") for name in names}


def device_functions(module: Any) -> dict[str, Any]:
    """Functions for a device that a module defines."""
    from triton.runtime.jit import JITFunction

    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    }


def forgotten(found: dict[str, Any]) -> list[str]:
    """Kernels of which no variant is compiled: functions for a device that no other one calls."""
    functions = {
        (module, name): function
        for module, values in found.items()
        for name, function in device_functions(values).items()
    }
    called = {
        word
        for (_, name), function in functions.items()
        for word in re.findall(r"(\w+)\(", function.src)
        if word != name
    }
    compiled = {id(variant.fn) for values in found.values() for variant in variants(values)}
    return sorted(
        f"{module}.{name}"
        for (module, name), function in functions.items()
        if id(function) not in compiled and name not in called and module != "runtime"
    )


def variants(module: Any) -> list[Any]:
    """A module's `AOT`."""
    return list(getattr(module, "AOT", ()))


def product(found: dict[str, Any], archs: Iterable[str]) -> list[Task]:
    """Every variant on every arch that it is offered for."""
    return [
        (module, variant.name, arch)
        for module, values in found.items()
        for variant in variants(values)
        for arch in archs
        if arch in variant.archs
    ]


def quick(found: dict[str, Any], archs: list[str]) -> list[Task]:
    """A part of the product that has each variant on some arch, and each kernel on each arch."""
    tasks: list[Task] = []
    for module, values in found.items():
        kernels: dict[int, list[Any]] = {}
        for variant in variants(values):
            kernels.setdefault(id(variant.fn), []).append(variant)
        for group in kernels.values():
            dealt: list[tuple[Any, str]] = []
            for number, arch in enumerate(archs):
                offered = [variant for variant in group if arch in variant.archs]
                if offered:
                    dealt.append((offered[number % len(offered)], arch))
            for variant in group:
                usable = [arch for arch in archs if arch in variant.archs]
                if usable and all(other is not variant for other, _ in dealt):
                    used = [arch for _, arch in dealt]
                    dealt.append((variant, min(usable, key=used.count)))
            tasks += [(module, variant.name, arch) for variant, arch in dealt]
    return tasks


# --------------------------------------------------------------------------------------- compiling


def key_of(variant: Any, arch: str) -> str:
    """Names a compilation: whatever changes its result changes the name."""
    import triton

    parts = (
        variant.fn.cache_key,
        triton.__version__,
        arch,
        dict(variant.signature),
        sorted(variant.constexprs_for(arch).items()),
        sorted(variant.options_for(arch).items()),
        variant.aligned,
        Path(chips.__file__).read_text("utf-8"),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def keys_of(found: dict[str, Any], tasks: Iterable[Task]) -> dict[Task, str]:
    """`key_of` every task."""
    by_name = {(m, v.name): v for m, values in found.items() for v in variants(values)}
    return {task: key_of(by_name[task[:2]], task[2]) for task in tasks}


def source_of(variant: Any, arch: str) -> Any:
    """What Triton compiles: arguments in order, pointers and `aligned` ones divisible by 16."""
    from triton.compiler import ASTSource

    names = list(variant.fn.arg_names)
    fixed = variant.constexprs_for(arch)
    wrong = set(names) ^ (set(variant.signature) | set(fixed))
    if wrong:
        raise ValueError(f"{variant.name}: arguments that do not match the kernel's: {wrong}")
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {name for name, kind in variant.signature.items() if kind.startswith("*")}
    return ASTSource(
        fn=variant.fn,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in sorted(aligned | set(variant.aligned))
        },
    )


def multiplies_halves(kernel: Any) -> bool:
    """Whether a product of matrices of 16-bit floats stands in the source."""
    return bool(re.search(r"tt\.dot\b[^\n]*x(?:bf16|f16)[,>]", kernel.asm["ttir"]))


def compiled(variant: Any, arch: str) -> dict[str, Any]:
    """Compiles and measures one variant; `faults` says what is wrong with it."""
    import triton

    chip, began = chips.CHIPS[arch], time.monotonic()
    row: dict[str, Any] = {"key": key_of(variant, arch), "faults": []}
    tile = variant.tile(arch)
    row["tile"] = f"{tile.block_m}x{tile.block_n}, stages {tile.num_stages}, warps {tile.num_warps}"
    folder = tempfile.mkdtemp(prefix="triton_aot_")
    triton.knobs.cache.dir = folder
    try:
        options = variant.options_for(arch)
        kernel = triton.compile(
            source_of(variant, arch), target=chips.target(arch), options=options
        )
        use = chips.use_of(kernel, arch)
        halves = multiplies_halves(kernel)
    except Exception as error:
        row["faults"].append(f"does not compile: {type(error).__name__}: {str(error)[-400:]}")
        return row
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row |= use.as_json()
    if use.spills:
        row["faults"].append(f"spills {use.spills} (tile {row['tile']})")
    if use.shared > chip.shared:
        row["faults"].append(f"{use.shared} bytes of shared memory, the chip has {chip.shared}")
    if (halves or variant.tensor_cores) and not use.matrix:
        row["faults"].append("no matrix instruction")
    if halves and not variant.tensor_cores:
        row["faults"].append("multiplies matrices and does not say so (tensor_cores)")
    if not use.occupancy:
        row["faults"].append("not even one program fits the chip")
    row["seconds"] = round(time.monotonic() - began, 2)
    return row


def work(package: str, task: Task) -> dict[str, Any]:
    """`compiled` in a process of the pool."""
    module = importlib.import_module(f"{package}.{task[0]}")
    variant = next(v for v in variants(module) if v.name == task[1])
    return compiled(variant, task[2])


def run_all(package: str, tasks: list[Task], jobs: int) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Tasks and their rows as they come. A compiler that dies takes only its own task down."""
    done: set[Task] = set()
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(work, package, task): task for task in tasks}
        for number, future in enumerate(as_completed(futures), 1):
            try:
                row = future.result()
            except BrokenProcessPool:
                break
            done.add(futures[future])
            yield futures[future], row
            if number % 50 == 0:
                print(f"  {number} of {len(tasks)} compiled", flush=True)
    for task in tasks:
        if task in done:
            continue
        try:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                yield task, pool.submit(work, package, task).result()
        except BrokenProcessPool:
            yield task, {"key": "", "faults": ["the compiler died"]}


def cached_rows(
    package: str, found: dict[str, Any], tasks: list[Task], cache: Path, jobs: int
) -> tuple[dict[Task, dict[str, Any]], int]:
    """Rows of all tasks, and how many had to be compiled. Rows with faults are not kept."""
    keys = keys_of(found, tasks)
    cache.mkdir(parents=True, exist_ok=True)
    files = {task: cache / f"{key}.json" for task, key in keys.items()}
    rows = {task: json.loads(f.read_text()) for task, f in files.items() if f.exists()}
    missing = [task for task in tasks if task not in rows]
    for task, row in run_all(package, missing, jobs):
        rows[task] = row
        if not row["faults"]:
            fresh = files[task].with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(row))
            fresh.replace(files[task])
    return rows, len(missing)


# ------------------------------------------------------------------------------------------ the page

HEAD = """\
# Triton kernels on every chip

Made by `ci/triton_aot.py --write` with Triton {triton}: {compiled} of {offered} compilations, of {variants} variants
for {archs} chips. **Compiled, not executed**: these numbers come from the compilers. No kernel in the tables
spills a register, all fit their chip's shared memory, and those marked *matrix* multiply with the chip's
matrix instructions.

A cell is registers · shared memory in KiB · occupancy: registers of a thread (NVIDIA) or vector registers
of a lane (AMD); which share of the warps a multiprocessor or compute unit can hold are there when it runs
this kernel only. "–": not offered there, or not compiled for this page.
"""


def cell(row: dict[str, Any] | None) -> str:
    """A compilation in the page's table."""
    if row is None:
        return "–"
    return f"{row['registers']} · {row['shared'] / 1024:.3g} · {100 * row['occupancy']:.0f}%"


def page(data: dict[str, Any]) -> str:
    """docs/backends/triton-kernels.md from what stands in its JSON."""
    rows: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in data["rows"]:
        rows.setdefault(row["module"], {}).setdefault(row["variant"], {})[row["arch"]] = row
    archs = data["archs"]
    head = HEAD.format(
        triton=data["triton"],
        compiled=len(data["rows"]),
        offered=data["offered"],
        variants=sum(len(names) for names in rows.values()),
        archs=len(archs),
    )
    lines = [head]
    for module, names in rows.items():
        lines += [f"## {module}", "", f"| variant | {' | '.join(archs)} |"]
        lines.append("|---|" + "---|" * len(archs))
        for name, cells in names.items():
            matrix = " *matrix*" if any(row["matrix"] for row in cells.values()) else ""
            shown = " | ".join(cell(cells.get(arch)) for arch in archs)
            lines.append(f"| {name}{matrix} | {shown} |")
        lines.append("")
    if data["faults"]:
        lines += ["## Not as it should be", "", *(f"- {fault}" for fault in data["faults"])]
    return "\n".join(lines).rstrip() + "\n"


def as_data(rows: dict[Task, dict[str, Any]], tasks: list[Task], offered: int) -> dict[str, Any]:
    """What the page is made from. offered: compilations of the whole product."""
    import triton

    kept = ("key", "tile", "registers", "scalars", "shared", "matrix", "occupancy")
    return {
        "triton": triton.__version__,
        "archs": list(chips.CHIPS),
        "offered": offered,
        "rows": [
            {"module": module, "variant": name, "arch": arch}
            | {field: rows[module, name, arch][field] for field in kept}
            for module, name, arch in tasks
            if not rows[module, name, arch]["faults"]
        ],
        "faults": [
            f"{name} {arch}: {fault}"
            for module, name, arch in tasks
            for fault in rows[module, name, arch]["faults"]
        ],
    }


def as_text(data: dict[str, Any]) -> str:
    """The JSON, a compilation a line."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in data["rows"])
    head = json.dumps({k: v for k, v in data.items() if k != "rows"}, ensure_ascii=False)
    return f'{head[:-1]}, "rows": [\n{rows}\n]}}\n'


# ----------------------------------------------------------------------------------------------- main


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part that covers all of each")
    parser.add_argument("--archs", default=",".join(chips.CHIPS), help="only these, with commas")
    parser.add_argument("--kernels", default="", help="only modules or variants with this in them")
    parser.add_argument("--package", default=PACKAGE, help="where the kernels are")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of earlier results")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes that compile")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} and its JSON")
    parser.add_argument("--list", action="store_true", help="print a line for each compilation")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """0 when all is as it should be, 1 otherwise; the page is written either way, and says which."""
    import triton

    options = parsed(arguments)
    archs = options.archs.split(",")
    unknown = set(archs) - set(chips.CHIPS)
    if unknown:
        print(f"no chip {', '.join(sorted(unknown))}; there are {', '.join(chips.CHIPS)}")
        return 1
    found = modules(options.package)
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: what is interpreted is never compiled; unset it")
        return 1
    faults = [f"{name}: no variant of it is compiled" for name in forgotten(found)]
    tasks = quick(found, archs) if options.quick else product(found, archs)
    tasks = [task for task in tasks if options.kernels in f"{task[0]} {task[1]}"]
    if not tasks:
        print(f"nothing to compile: no kernel of {options.package} fits the options")
        return 1
    if options.write and (options.kernels or archs != list(chips.CHIPS)):
        print("--write takes every kernel and every chip: leave --kernels and --archs out")
        return 1

    if options.write and options.quick:  # the page also shows what earlier runs have compiled
        every = product(found, archs)
        keys = keys_of(found, every)
        known = {task for task in every if (options.cache / f"{keys[task]}.json").exists()}
        tasks = [task for task in every if task in known | set(tasks)]

    began = time.monotonic()
    rows, fresh = cached_rows(options.package, found, tasks, options.cache, options.jobs)
    for task in tasks:
        row = rows[task]
        faults += [f"{' '.join(task[1:])}: {fault}" for fault in row["faults"]]
        if options.list and "registers" in row:
            spilled = f" SPILLS {row['spills']}" if row["spills"] else ""
            print(f"{task[2]:8}{task[1]:48}{cell(row):24}{row['matrix']:12}{row['tile']}{spilled}")
    took = time.monotonic() - began
    print(
        f"{len(tasks)} kernels for {len(archs)} chips, {fresh} of them compiled now, in {took:.0f} s"
    )
    if options.write:
        data = as_data(rows, sorted(tasks), len(product(found, archs)))
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        DATA.write_text(as_text(data), "utf-8")
        PAGE.write_text(page(data), "utf-8")
    elif DATA.exists():
        known = {row["key"] for row in json.loads(DATA.read_text("utf-8"))["rows"]}
        stale = sum(rows[task]["key"] not in known for task in tasks)
        if stale:
            print(f"{PAGE.name} is older than {stale} of them: --write makes it anew")
    if faults:
        print(f"{len(faults)} faults:", *faults, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
