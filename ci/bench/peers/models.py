"""The same weights in the form that each engine reads: all made from one model, in float32."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.environments import Environments
from peers.processes import PeerError, run_logged


class Models:
    """Makes each form once, in `work`/models. A form is there whole or not at all."""

    def __init__(self, work: Path, model: str, environments: Environments) -> None:
        self._folder = work / "models"
        self._log = work / "log"
        self.source = model
        self._environments = environments

    def safetensors(self) -> Path:
        """A folder of float32 safetensors, with config and tokenizer."""

        def make(part: Path) -> None:
            octavo = [sys.executable, "-m", "octavo.core.entry.cli.main"]
            command = [*octavo, "models", "export", self.source, str(part), "--dtype", "float32"]
            run_logged(command, self._log / "model-safetensors.log")

        return self._once("float32", make)

    def gguf(self, kind: str) -> Path:
        """A GGUF file of type `kind` (F32, Q8_0, Q4_1, Q4_K_M, …) for llama.cpp.

        Raises:
            PeerError: the model is not a GGUF, or llama.cpp cannot be built.
        """
        if kind == "F32":
            return self._once("model-F32.gguf", self._dequantize)
        quantize = self._environments.get("llamacpp").binaries / "llama-quantize"
        source = self.gguf("F32")

        def make(part: Path) -> None:
            run_logged(
                [str(quantize), str(source), str(part), kind], self._log / f"model-{kind}.log"
            )

        return self._once(f"model-{kind}.gguf", make)

    def openvino(self, weights: str) -> Path:
        """OpenVINO's form with `weights` fp32, int8 or int4.

        Raises:
            PeerError: the exporter cannot be installed, or it failed.
        """
        tool = Path(self._environments.get("openvino").python).with_name("optimum-cli")
        source = self.safetensors()

        def make(part: Path) -> None:
            export = [str(tool), "export", "openvino", "--model", str(source), str(part)]
            task = ["--task", "text-generation-with-past", "--weight-format", weights]
            log = self._log / f"model-openvino-{weights}.log"
            run_logged([*export, *task], log, {"HF_HUB_OFFLINE": "1"})

        return self._once(f"openvino-{weights}", make)

    def _once(self, name: str, make: Callable[[Path], None]) -> Path:
        path = self._folder / name
        if not path.exists():
            if not self._environments.may_install:
                raise PeerError(f"{path} was not made yet")
            print(f"making {path}", flush=True)
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"part-{name}")
            shutil.rmtree(part, ignore_errors=True)
            part.unlink(missing_ok=True)
            make(part)
            os.replace(part, path)
        return path

    def _dequantize(self, part: Path) -> None:
        """The model's own GGUF with every tensor as float32: no converter, no second rounding."""
        import gguf

        from octavo.core.loading.sources import resolve

        files = resolve(self.source)
        if files.kind != "gguf":
            raise PeerError(f"llama.cpp needs a GGUF model here, and {self.source} is a folder")
        reader: Any = gguf.GGUFReader(files.path)
        architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE).contents()
        writer: Any = gguf.GGUFWriter(part, architecture)
        for field in reader.fields.values():
            if field.name == gguf.Keys.General.ARCHITECTURE or field.name.startswith("GGUF."):
                continue  # the writer's own
            value = field.contents()
            if field.name == gguf.Keys.General.FILE_TYPE:
                value = int(gguf.LlamaFileType.ALL_F32)
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, value, kind, sub_type=inner)
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
            writer.add_tensor(tensor.name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
