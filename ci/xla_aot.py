#!/usr/bin/env python3
"""Whole steps of the tpu backend, compiled for TPUs on a machine without one.

Writes the steps of a Llama with two layers as torch_xla would compile them on a TPU, Pallas kernels included
(StableHLO; PJRT's CPU device stands in while they are written), and compiles each for every chip that
libtpu describes. Prints a table, and exits with 1 if a step does not compile within a limit of time, or lacks its
kernels.

    pip install -r ci/requirements/xla.txt && pip install --no-deps -C wheel.cmake=false -e .
    python ci/xla_aot.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYERS = 2
CONFIG: dict[str, Any] = {  # Llama 3.2 1B, but for layers and vocabulary
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": LAYERS,
    "vocab_size": 16384,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
DRAW = "drawing tokens"
WRITING = 900
"""Seconds that all programs together may take to be written."""
KERNELS = 2 * LAYERS  # a layer writes its keys and values, and attends


CHIPS = 4
"""Chips that the step of several is for: as many as the smallest slices have."""


def write_steps(folder: Path, dtype: str, chips: int = 1) -> None:
    import torch

    from octavo.backends.xla.backend import TpuBackend, XlaBackend
    from octavo.backends.xla.ops import XlaOps
    from octavo.backends.xla.programs import Forward
    from octavo.core.models.llama import Llama
    from octavo.core.runner import forward_program
    from octavo.core.warm_up import example_batches
    from octavo.plugins import Limits

    limits = Limits(max_num_seqs=32, max_model_len=2048, dtype=dtype, kv_dtype=dtype)
    suffix = "" if chips == 1 else f":x{chips}"
    XlaBackend().start(f"xla:cpu{suffix}", limits)
    ops = XlaOps("CPU", target="TPU", chips=chips)
    shape = Llama.shape(CONFIG, dtype)
    model = Llama(CONFIG, shape, ops)
    backend = TpuBackend()
    plan = backend.plan(shape, f"tpu{suffix}", limits)
    weights = {
        spec.name: ops.pack_weight({n: torch.zeros(s) for n, s in spec.parts}, spec, dtype)
        for spec in model.specs()
    }
    for name, table in model.tables(limits.max_model_len).items():
        weights[name] = table.to(ops.device)
    kv = ops.alloc_kv(shape.kv, 200, plan.block_size)
    forward = Forward(forward_program(model))
    last = {}  # the largest bucket of each lane, and the smallest of the first
    for batch in example_batches(plan.lanes):
        last[batch.kind] = batch
        if chips == 1:
            last.setdefault("smallest prefill", batch)
    for name, batch in last.items():
        text = forward.stablehlo(weights, kv, backend.prepare(batch, None, "tpu"))
        over = "" if chips == 1 else f"{chips} chips, "
        file = folder / f"{over}{dtype}, {name}, {len(batch.token_ids)} tokens.mlir"
        file.write_text(text)
        print(f"wrote {file.name}: {len(text):,} characters", flush=True)
    if dtype == "bfloat16" and chips == 1:
        write_draw(folder, ops)


def write_draw(folder: Path, ops: Any) -> None:
    """How tokens are drawn; only seeds and counters, a number for each row, have 64 bits."""
    import torch

    from octavo.backends.xla import bridge
    from octavo.backends.xla.programs import ROWS
    from octavo.core.sampler import sample_program
    from octavo.plugins import SampleInputs

    kinds = [torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64]
    rows = [bridge.upload(torch.ones(32, dtype=kind)) for kind in kinds]
    logits = bridge.upload(torch.zeros(32, CONFIG["vocab_size"], dtype=torch.bfloat16))
    draw = sample_program(ops)

    def drawn(logits: torch.Tensor, *rows: torch.Tensor) -> list[torch.Tensor]:
        return [draw(logits, SampleInputs(**dict(zip(ROWS, rows, strict=True))))]

    with bridge.plain_tensors():
        text = bridge.stablehlo(drawn, [logits, *rows])
    (folder / f"{DRAW}, 32 rows.mlir").write_text(text)


def compile_steps(folder: Path, limit: float) -> int:
    import tpu_compile

    failed = 0
    compiler = tpu_compile.Compiler(limit)
    print(
        f"{'step':<45} {'chip':<5} {'seconds':>7} {'code MB':>8} {'temporary MB':>13} {'collectives':>11} kernels"
    )
    for file in sorted(folder.glob("*.mlir")):
        several = CHIPS if file.name.startswith(f"{CHIPS} chips") else 1
        for chip in tpu_compile.CHIPS:
            try:
                made = compiler(chip, file.read_text(), several)
            except Exception as error:  # every other step and chip is still worth knowing
                failed += 1
                print(f"{file.stem:<45} {chip:<5} FAILED: {str(error)[:300]}", flush=True)
                continue
            expected = 0 if file.name.startswith(DRAW) else KERNELS
            wrong = "" if made.kernels == expected else f", {expected} expected"
            if bool(made.collectives) != (several > 1):
                wrong += f", {made.collectives} collectives over {several} chips"
            failed += bool(wrong)
            print(
                f"{file.stem:<45} {chip:<5} {made.seconds:>7.1f} {made.code / 1e6:>8.2f} "
                f"{made.temporary / 1e6:>13.1f} {made.collectives:>11} {made.kernels}{wrong}",
                flush=True,
            )
    compiler.close()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stages = ("write", "write-several", "compile")
    parser.add_argument("--stage", choices=stages, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="keep the steps' StableHLO there")
    parser.add_argument(
        "--limit",
        type=float,
        default=300,
        help="seconds that a compilation may take, default %(default)s",
    )
    args = parser.parse_args()
    if args.stage == "write":
        for dtype in ("bfloat16", "float32"):
            write_steps(args.folder, dtype)
        return 0
    if args.stage == "write-several":
        write_steps(args.folder, "bfloat16", CHIPS)
        return 0
    if args.stage == "compile":
        return 1 if compile_steps(args.folder, args.limit) else 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        # Processes of their own: one holds torch_xla's PJRT client, one libtpu's compiler. Neither
        # takes these settings in any other way.
        environments = {
            "write": {"PJRT_DEVICE": "CPU"},
            "write-several": {"PJRT_DEVICE": "CPU"},
            "compile": {
                "JAX_PLATFORMS": "cpu",
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            },
        }
        for stage, variables in environments.items():
            command = [sys.executable, __file__, "--stage", stage, "--folder", str(folder)]
            command += ["--limit", str(args.limit)]
            # What writes has a limit, too; what compiles keeps its own for each program.
            patience = None if stage == "compile" else WRITING
            try:
                if subprocess.run(
                    command, env={**os.environ, **variables}, timeout=patience
                ).returncode:
                    return 1
            except subprocess.TimeoutExpired:
                print(f"FAILED: the steps were not written after {WRITING} s")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
