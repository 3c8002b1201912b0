"""fp8 e4m3 by its bits: exact whatever conversions the chip and the Triton version have.

Both formats have a sign, 4 bits of exponent and 3 of mantissa. e4m3fn: bias 7, largest 448, NaN is
0x7F and 0xFF. e4m3fnuz (gfx942): bias 8, largest 240, NaN is 0x80, no -0. Kernels get the bias, 0
for a cache that is not fp8, and a pointer to bytes.

Source: OCP 8-bit Floating Point Specification; the FNUZ forms are those of arXiv 2206.02915.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_fp8(pairs, TARGET: tl.constexpr):
    """Return the even and odd elements of int16 words of two fp8 e4m3, in TARGET.

    Sign, exponent and mantissa become those of an fp16, whose exponent bias is 15: the result is
    value * 2 ** (bias - 15), subnormals included. NaN becomes a number.
    """
    even = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
    # In int16 0x8000 is the sign: masked with -0x8000. Shifted in of it, nothing is left over.
    odd = (pairs & -0x8000) | ((pairs & 0x7F00) >> 1)
    even = even.to(tl.int16).to(tl.float16, bitcast=True).to(TARGET)
    odd = odd.to(tl.int16).to(tl.float16, bitcast=True).to(TARGET)
    return even, odd


@triton.jit
def decode_fp8(code, BIAS: tl.constexpr):
    """Return the values of fp8 e4m3 bytes in fp32, NaN as NaN."""
    code = code.to(tl.int32)
    # As an fp16, whose exponent bias is 15; the missing power of two is exact.
    half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 2.0 ** (15 - BIAS)
    nan = (code & 0x7F) == 0x7F if BIAS == 7 else code == 0x80
    return tl.where(nan, float("nan"), value)


@triton.jit
def encode_fp8(x, BIAS: tl.constexpr):
    """Return the bits of fp32 x rounded to the nearest fp8 e4m3, ties to even, as uint8.

    What is over the largest value becomes it: 448 for BIAS 7 (e4m3fn), 240 for BIAS 8 (e4m3fnuz,
    which has no -0: its bits are NaN's).
    """
    LARGEST: tl.constexpr = 448.0 if BIAS == 7 else 240.0
    # Spacing of the subnormals; adding 2 ** 23 of them leaves their count in the low bits.
    MAGIC: tl.constexpr = 2.0 ** (21 - BIAS)
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), LARGEST)
    size_bits = size.to(tl.int32, bitcast=True)
    # 20 of the 23 mantissa bits go; the exponent bias falls from 127 to BIAS.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    small = (size + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    sign = (bits >> 24) & 0x80
    if BIAS == 8:
        sign = tl.where(code == 0, 0, sign)
    nan = 0x7F if BIAS == 7 else 0x80
    return tl.where(x != x, nan, code | sign).to(tl.uint8)
