"""Which GPUs this machine has, and what torch and triton are installed for, by looking at files alone."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path


def nvidia_gpus(root: Path = Path("/")) -> dict[str, str]:
    """Device nodes of NVIDIA GPUs with their models' names, as far as the driver tells them."""
    nodes = sorted(
        (p for p in (root / "dev").glob("nvidia[0-9]*")),
        key=lambda p: int(p.name.removeprefix("nvidia")),
    )
    models = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        models.append(found[1].strip() if found else "")
    if not nodes and (root / "dev/dxg").exists():  # Windows' own driver below Linux
        return {"dxg": "a GPU of the Windows host"}
    return {p.name: models[i] if i < len(models) else "" for i, p in enumerate(nodes)}


def amd_gpus(root: Path = Path("/")) -> dict[str, str]:
    """AMD GPUs of the kernel's compute driver, by node, with their arch."""
    if not (root / "dev/kfd").exists():
        return {}
    found = {}
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        try:
            facts = dict(
                line.split(None, 1) for line in path.read_text().splitlines() if " " in line
            )
        except OSError:  # a GPU that this container was not given
            continue
        version = int(facts.get("gfx_target_version", "0"))
        if version:  # processors stand among the nodes with 0
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            found[path.parent.name] = f"gfx{major}{minor:x}{step:x}"
    return found


def torch_build() -> str:
    """ "cuda 13.0", "hip 7.0", "cpu" or "" (not installed), read from torch's files without importing it."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except OSError:
        return "cpu"
    for kind in ("cuda", "hip"):
        built = re.search(rf"^{kind}\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
        if built:
            return f"{kind} {built[1]}"
    return "cpu"


def missing(kind: str, built: str) -> str:
    """Why kernels cannot run on a GPU of this kind ("cuda" or "hip"), or ""."""
    if not built:
        return "torch is not installed"
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'octavo[triton]'"
    if not built.startswith(kind):
        whose = {"cuda": "NVIDIA", "hip": "AMD"}[kind]
        return f"torch is built for {built}: install a torch built for {whose} GPUs"
    return ""
