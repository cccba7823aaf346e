"""What is compiled ahead of time, for chips that are not here."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvfunc.models.config import ModelConfig
from kvfunc.pallas import MOST_ROWS
from kvfunc.rope import Rope

from ..kvfunc.shapes import GPT_OSS_20B, LLAMA_3_1_8B, SMOLLM2_135M, Shape

KERNEL = {"tpu": "tpu_custom_call", "cuda": "triton_kernel_call"}  # as a custom call
FP8 = "float8_e4m3fn"

SHAPES = {
    "SmolLM2-135M": SMOLLM2_135M,
    "Llama-3.1-8B-and-Qwen3-8B": LLAMA_3_1_8B,
    "GPT-OSS-20B": GPT_OSS_20B,
    "Phi-3-mini": Shape(32, 32, 96),
    "Phi-2": Shape(32, 32, 80),
    "Gemma-2-9B": Shape(16, 8, 256, window=4096, softcap=50.0),
}
MODELS = {
    "SmolLM2-135M": ModelConfig(
        vocab_size=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_width=1536,
        norm_eps=1e-5, tied=True, rope=Rope.default(64, 100_000.0), context_length=8192),
    "Llama-3.1-8B": ModelConfig(
        vocab_size=128256, width=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
        mlp_width=14336, norm_eps=1e-5, tied=False, context_length=131072,
        rope=Rope.llama3(128, 500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_context=8192)),
}
TPUS, GPUS = ("v5e", "v6e", "tpu7x"), ("a800", "h200")


@dataclasses.dataclass(frozen=True)
class Attention:
    """`segment_attention` by the kernel that is made for the chip, or by XLA.

    Args:
      chip: what it is compiled for.
      model: whose shape it has.
      queries: a decode bucket or a chunk of a prompt.
      dtype: of K and V.
      rows: of the table.
      xla: whether it is XLA's.
      chips: over how many the KV heads are spread, with shard_map.
      fault: which of `compile.FAULTS` it has; then it must not compile.
    """

    slots: ClassVar[int] = 32768

    chip: str
    model: str
    queries: int
    dtype: str = "bfloat16"
    rows: int = 1024
    xla: bool = False
    chips: int = 1
    fault: str | None = None

    @property
    def name(self) -> str:
        parts = [self.model, self.dtype, f"{self.queries}-queries", f"{self.rows}-rows", self.chip]
        parts += ["xla"] * self.xla + [f"{self.chips}-chips"] * (self.chips > 1)
        return "-".join(parts + [self.fault] * (self.fault is not None))

    @property
    def kernels(self) -> int:
        """How many are called: one for the rows of few queries, one for the others; on TPUs for
        each part of a table that is longer than SMEM.
        """
        parts = -(-self.rows // MOST_ROWS) if self.chip in TPUS else 1
        return 0 if self.xla else 2 * parts

    @property
    def pool_bytes(self) -> int:
        """Of K and V in bfloat16."""
        shape = SHAPES[self.model]
        return 2 * 2 * self.slots * shape.kv_heads * shape.head_dim


@dataclasses.dataclass(frozen=True)
class Step:
    """The engine's step with weights and KV of bfloat16.

    Args:
      chip: what it is compiled for.
      model: one of `MODELS`.
      layers: how many of them.
      slots: of the pool.
    """

    queries: ClassVar[int] = 512
    rows: ClassVar[int] = 8192

    chip: str
    model: str
    layers: int
    slots: int = 32768

    @property
    def name(self) -> str:
        of = MODELS[self.model].layers
        return f"{self.model}-step-{self.layers}-of-{of}-layers-{self.queries}-queries-{self.chip}"

    @property
    def config(self) -> ModelConfig:
        return dataclasses.replace(MODELS[self.model], layers=self.layers)

    @property
    def kernels(self) -> int:
        return 2 * self.layers

    @property
    def pool_bytes(self) -> int:
        return 2 * 2 * self.layers * self.slots * self.config.kv_heads * self.config.head_dim


SMOL, LLAMA, GPT, PHI_3, PHI_2, GEMMA = SHAPES

# On TPUs a case takes 3 to 30 s: each shape, type, size and chip is there, but not all together.
# One layer of a large pool is enough to see whether the pool is copied.
LARGE_POOL = {"tpu": Step("v5e", "Llama-3.1-8B", 1, slots=131072),
              "cuda": Step("a800", "Llama-3.1-8B", 1, slots=131072)}
TPU = [
    Attention("v5e", GEMMA, 512),
    Attention("v5e", SMOL, 512, "float32"),
    Attention("v5e", SMOL, 16, FP8),
    Attention("v5e", GPT, 16),
    Attention("v6e", LLAMA, 16),
    Attention("v6e", PHI_3, 16),
    Attention("v6e", PHI_2, 512),
    Attention("v6e", SMOL, 512, "int8"),
    Attention("v6e", LLAMA, 512, chips=8),
    Attention("tpu7x", GPT, 512),
    Attention("tpu7x", LLAMA, 16, rows=32768),
    Attention("tpu7x", LLAMA, 16, "int8"),
    Attention("tpu7x", SMOL, 512, FP8),
    *(Attention(chip, SMOL, 16, xla=True) for chip in TPUS),
    LARGE_POOL["tpu"],
    *(Step(chip, SMOL, 30) for chip in TPUS),
]
CUDA = [
    *(Attention(chip, model, queries) for model in SHAPES
      for chip, queries in zip(GPUS, (16, 512), strict=True)),
    Attention("a800", LLAMA, 512, chips=8),
    Attention("a800", SMOL, 512, "float32"),
    Attention("h200", SMOL, 16, "int8"),
    *(Attention(chip, SMOL, 512, FP8) for chip in GPUS),
    *(Attention(chip, SMOL, 16, xla=True) for chip in GPUS),
    LARGE_POOL["cuda"],
    *(Step(chip, SMOL, 30) for chip in GPUS),
]
BEYOND_VMEM = Attention("v5e", LLAMA, 512, fault="blocks-beyond-vmem")
BEYOND_SHARED_MEMORY = Attention("a800", GEMMA, 512, fault="blocks-beyond-shared-memory")
BEYOND_REGISTERS = Attention("a800", GEMMA, 512, fault="blocks-beyond-registers")
FP8_AS_IT_IS = Attention("a800", SMOL, 16, FP8, fault="fp8-as-it-is")
CASES = {"tpu": [*TPU, BEYOND_VMEM],
         "cuda": [*CUDA, BEYOND_SHARED_MEMORY, BEYOND_REGISTERS, FP8_AS_IT_IS]}
