"""The suite's machine for PTX does what its reference says of instructions that only some compilers use."""

from __future__ import annotations

from pathlib import Path

import torch
from ptx_machine import Machine, build

TEXT = """.visible .entry one(
)
{{
	.shared .align 8 .b8 memory[64];
	ld.param.u64 	%rd1, [one_param_0];
	cvta.to.global.u64 	%rd2, %rd1;
	ld.param.u32 	%r1, [one_param_1];
	ld.param.u32 	%r2, [one_param_2];
	{lines}
	st.global.u32 	[%rd2], %r5;
	ret;
}}
"""
A, B = 0x89ABCDEF, 0x12345678
WHOLE = {
    "shf.l.wrap.b32 %r5, %r1, %r2, 12;": 0x4567889A,
    "shf.l.wrap.b32 %r5, %r1, %r2, 44;": 0x4567889A,
    "shf.l.clamp.b32 %r5, %r1, %r2, 44;": A,
    "shf.r.wrap.b32 %r5, %r1, %r2, 12;": 0x67889ABC,
    "shf.r.wrap.b32 %r5, %r1, %r2, 64;": A,
    "shf.r.clamp.b32 %r5, %r1, %r2, 64;": B,
    "bfe.u32 %r5, %r1, 4, 8;": 0xDE,
    "bfe.s32 %r5, %r1, 4, 8;": 0xFFFFFFDE,
    "bfe.u32 %r5, %r1, 28, 8;": 0x8,
    "bfe.s32 %r5, %r1, 28, 8;": 0xFFFFFFF8,
    "bfe.s32 %r5, %r1, 32, 4;": 0xFFFFFFFF,
    "bfe.u32 %r5, %r1, 32, 4;": 0,
    "bfe.s32 %r5, %r1, 0, 0;": 0,
    "bfe.u32 %r5, %r1, 0, 255;": A,
    "mov.b64 %rd3, {%r1, %r2}; | { .reg .b32 tmp; mov.b64 {tmp, %r5}, %rd3; }": B,
    "mov.b64 %rd3, {%r1, %r2}; | mov.b64 {%r5, _}, %rd3;": A,
    "mov.b32 %r3, memory; | st.shared.u32 [%r3+8], %r2; | ld.shared.u32 %r5, [memory+8];": B,
}
# Of a 64-bit register whose upper half nothing was put in: compilers use the lower.
PARTS = {
    "cvt.u32.u64 %r5, %rd3;": A,
    "shr.u64 %rd4, %rd3, 8; | cvt.u16.u64 %rs1, %rd4; | cvt.u32.u16 %r5, %rs1;": 0xABCD,
    "mov.b64 %rd4, %rd3; | mov.b64 {%r5, %r6}, %rd4;": A,
    "shl.b64 %rd4, %rd3, 32; | mov.b64 {_, %r5}, %rd4;": A,
}
HALF = "mov.b64 %rd3, {%r1, %r9}; | "


def text_of(lines: str) -> str:
    return TEXT.format(lines=lines.replace(" | ", "\n\t"))


def arguments(out: torch.Tensor) -> tuple[bytes, ...]:
    return out.data_ptr().to_bytes(8, "little"), A.to_bytes(4, "little"), B.to_bytes(4, "little")


def test_it_does_what_ptx_says(tmp_path: Path) -> None:
    library, out = build(tmp_path), torch.zeros(1, dtype=torch.int32)
    found = {}
    for lines in (*WHOLE, *(HALF + lines for lines in PARTS)):
        Machine(library, {"one": text_of(lines)}).launch("one", 1, 0, *arguments(out))
        found[lines] = int(out) & 0xFFFFFFFF
    assert found == {**WHOLE, **{HALF + lines: value for lines, value in PARTS.items()}}
