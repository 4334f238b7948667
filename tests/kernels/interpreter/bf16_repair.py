"""Test-only repair of bfloat16 in Triton's interpreter, which keeps it as uint16: casts truncate, arithmetic uses the bits.

After ``install()`` a cast rounds to nearest even, arithmetic is done in float32 and rounded, and ``tl.dot`` multiplies values.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BUILDER, HANDLE = interpreter.InterpreterBuilder, interpreter.TensorHandle
STOCK = {name: getattr(BUILDER, name) for name in ("cast_impl", "binary_op", "unary_op", "create_dot")}
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def to_float32(bits):
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def to_bf16_bits(values):
    """Round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(handle):
    return handle.dtype.scalar == tl.bfloat16


def _cast_impl(self, src, dst):
    source, target = src.dtype.scalar, dst.scalar
    if source == tl.bfloat16 and target != tl.bfloat16:
        return HANDLE(to_float32(src.data).astype(interpreter._get_np_dtype(dst)), target)
    if target == tl.bfloat16 and source != tl.bfloat16:
        return HANDLE(to_bf16_bits(src.data.astype(np.float32)), target)
    return STOCK["cast_impl"](self, src, dst)


def _binary_op(self, lhs, rhs, op):
    if _is_bf16(lhs) and _is_bf16(rhs) and op not in BITWISE:
        out = op(to_float32(lhs.data), to_float32(rhs.data))
        return HANDLE(out, tl.int1) if out.dtype == np.bool_ else HANDLE(to_bf16_bits(out), tl.bfloat16)
    return STOCK["binary_op"](self, lhs, rhs, op)


def _unary_op(self, arg, op):
    return HANDLE(to_bf16_bits(op(to_float32(arg.data))), tl.bfloat16) if _is_bf16(arg) else STOCK["unary_op"](self, arg, op)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if not (_is_bf16(a) or _is_bf16(b)):
        return STOCK["create_dot"](self, a, b, d, input_precision, max_num_imprecise_acc)
    values = [to_float32(h.data) if _is_bf16(h) else h.data for h in (a, b)]
    return HANDLE((np.matmul(*values, dtype=np.float32) + d.data).astype(d.data.dtype), d.dtype.scalar)


def install():
    BUILDER.cast_impl, BUILDER.binary_op, BUILDER.unary_op, BUILDER.create_dot = _cast_impl, _binary_op, _unary_op, _create_dot


def uninstall():
    for name, stock in STOCK.items():
        setattr(BUILDER, name, stock)
