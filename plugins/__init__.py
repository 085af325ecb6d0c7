"""All that a plug-in author needs, under one import. Importing it imports no torch."""

from __future__ import annotations

from octavo.core.contract import (
    API_VERSION,
    Backend,
    Capabilities,
    Communicator,
    Ctx,
    DecoderSpec,
    ExecutionPlan,
    Handle,
    Inputs,
    KVSpec,
    Lane,
    LayerSpec,
    Limits,
    MemoryInfo,
    ModelShape,
    Ops,
    PackedWeight,
    Probe,
    Program,
    SampleInputs,
    StepOut,
    Transfer,
    WeightSpec,
)
from octavo.core.drafting.drafter import Drafter, SpeculativeConfig
from octavo.core.entry.reasoning import ReasoningParser
from octavo.core.entry.tools.base import CallForm, Tool, ToolParser
from octavo.core.instruments import Instruments, LinearPath, Peaks
from octavo.core.quantization.base import Form, QuantizedTensor, Scheme
from octavo.core.types import Batch
from octavo.plugins.hookspecs import hookimpl, hookspec
from octavo.plugins.overrides import OpOverride

__all__ = [
    "API_VERSION",
    "Backend",
    "Batch",
    "CallForm",
    "Capabilities",
    "Communicator",
    "Ctx",
    "DecoderSpec",
    "Drafter",
    "ExecutionPlan",
    "Form",
    "Handle",
    "Inputs",
    "Instruments",
    "KVSpec",
    "Lane",
    "LayerSpec",
    "Limits",
    "LinearPath",
    "MemoryInfo",
    "ModelShape",
    "OpOverride",
    "Ops",
    "PackedWeight",
    "Peaks",
    "Probe",
    "Program",
    "QuantizedTensor",
    "ReasoningParser",
    "SampleInputs",
    "Scheme",
    "SpeculativeConfig",
    "StepOut",
    "Tool",
    "ToolParser",
    "Transfer",
    "WeightSpec",
    "hookimpl",
    "hookspec",
]
