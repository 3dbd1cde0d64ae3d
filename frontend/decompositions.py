"""The few ATen decompositions made while tracing: what has to be gone before there is MLIR."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch._decomp
from torch import Tensor
from torch._export.utils import _collect_all_valid_cia_ops, _get_decomp_for_cia

aten = torch.ops.aten

_ROUNDING: dict[Any, Any] = {torch.float32: np.float32, torch.float16: np.float16}


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The number of that dtype nearest to `value`, ties to even."""
    if dtype is torch.bfloat16:
        bits = int(np.float32(value).view(np.uint32))
        bits += 0x7FFF + (bits >> 16 & 1)
        return float(np.uint32(bits & 0xFFFF0000).view(np.float32))
    return float(_ROUNDING.get(dtype, float)(value))


Decompositions = Mapping[Any, Callable[..., Any]]

TABLE: dict[Any, Callable[..., Any]] = {}


# PyTorch's decomposition goes through index_copy, which refuses negative indices.
_WHOLE = {aten.index_fill}


def torch_decomposition(op: Any) -> Callable[..., Any] | None:
    """PyTorch's own decomposition of an op, if it has one."""
    if not isinstance(op, torch._ops.OpOverload) or op in TABLE or op.overloadpacket in _WHOLE:
        return None
    if op in torch._decomp.decomposition_table:
        return torch._decomp.decomposition_table[op]
    if op in _collect_all_valid_cia_ops():
        return _get_decomp_for_cia(op)
    return None


def _decompose(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE[op] = function
        return function

    return add


@_decompose(aten.dropout.default)
def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """ATen's CPU kernel: x * b / (1 - p), b drawn from Bernoulli(1 - p).

    The draw depends on x's shape alone, so it can be made before the compiled program runs.
    """
    if not train or p == 0:
        return x.clone()
    if p == 1:
        return x * torch.zeros_like(x)
    keep = aten.bernoulli.p(aten.empty.memory_format(x.shape, dtype=x.dtype), 1 - p)
    return x * (keep / (1 - p))


@_decompose(aten.native_dropout.default)
def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """As dropout, with the mask of kept elements beside it."""
    if not train or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = aten.bernoulli.p(aten.empty.memory_format(x.shape, dtype=x.dtype), 1 - p)
    return x * (keep / (1 - p)), keep.to(torch.bool)


@_decompose(aten.gelu.default)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """The tanh form in full (torch-mlir's own is off by 5e-5); the erf form is kept as one op.

    x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), Hendrycks and Gimpel, arXiv:1606.08415.
    """
    if approximate == "none":
        return NotImplemented
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)


def _compare_rounded(op: Any) -> None:
    @_decompose(op)
    def compare(x: Tensor, scalar: Any) -> Tensor:
        """ATen rounds the scalar to the tensor's type first; torch-mlir compares in f64."""
        if not isinstance(scalar, float) or not x.is_floating_point():
            return NotImplemented
        rounded = _rounded(scalar, x.dtype)
        return NotImplemented if rounded == scalar or scalar != scalar else op(x, rounded)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _compare_rounded(getattr(aten, _name).Scalar)


@_decompose(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch normalisation with its new running statistics; statistics of half inputs in f32.

    y = (x - mean) / sqrt(var + eps) * weight + bias over all dims but 1, var biased; the running
    variance takes the unbiased one (torch.nn.BatchNorm2d).
    """
    shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    if training:
        dims = [0, *range(2, x.dim())]
        mean = wide.mean(dims)
        centered = wide - mean.view(shape)
        var = (centered * centered).mean(dims)
        count = x.numel() // x.shape[1]
        new_mean = (1 - momentum) * running_mean + momentum * mean
        new_var = (1 - momentum) * running_var + momentum * (var * (count / (count - 1)))
    else:
        mean, var = running_mean, running_var
        centered = wide - mean.view(shape)
        new_mean, new_var = running_mean.clone(), running_var.clone()
    invstd = torch.rsqrt(var + eps)
    y = centered * invstd.view(shape)
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    new_mean, new_var = new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)
    return y.to(x.dtype), mean, invstd, new_mean, new_var


@_decompose(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x scale + shift, as ATen's CPU kernel: scale = weight / sqrt(var + eps)."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale
    shift = shift if bias is None else shift + bias
    y = wide * scale.view(shape) + shift.view(shape)
    return y.to(x.dtype), x.new_empty(0), x.new_empty(0)


_LONGEST_SUM = 512
"""IREE sums a contraction's terms one after the other; beyond this many, its error (which grows
as the square root of their number) is more than twice that of a BLAS, which sums in blocks."""


def _pieces(depth: Any, dtype: torch.dtype) -> int:
    """Into how many equal pieces to cut a sum over `depth` terms."""
    if not isinstance(depth, int) or depth <= 2 * _LONGEST_SUM or dtype is not torch.float32:
        return 1
    fitting = (n for n in range(2, 65) if depth % n == 0 and depth // n <= _LONGEST_SUM)
    return next(fitting, 1)


def _mm_in_pieces(x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """x @ weight^T, each piece of the sum by itself; x is [m, k], weight [n, k]."""
    depth = x.shape[1] // pieces
    left = x.reshape(-1, pieces, depth).transpose(0, 1)
    right = weight.reshape(-1, pieces, depth).permute(1, 2, 0)
    return torch.bmm(left, right).sum(0)


@_decompose(aten.linear.default)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, long sums in pieces."""
    pieces = _pieces(weight.shape[-1], x.dtype)
    if pieces == 1 or weight.dim() != 2:
        return NotImplemented
    y = _mm_in_pieces(x.reshape(-1, x.shape[-1]), weight, pieces)
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


@_decompose(aten.mm.default)
def mm(a: Tensor, b: Tensor) -> Tensor:
    """a b, long sums in pieces."""
    pieces = _pieces(a.shape[1], a.dtype)
    return NotImplemented if pieces == 1 else _mm_in_pieces(a, b.t(), pieces)


@_decompose(aten.addmm.default)
def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta c + alpha a b, long sums in pieces."""
    pieces = _pieces(a.shape[1], a.dtype)
    if pieces == 1:
        return NotImplemented
    product = _mm_in_pieces(a, b.t(), pieces)
    product = product if alpha == 1 else product * alpha
    return product + (c if beta == 1 else c * beta)


def _bound(x: Tensor, value: Any) -> Tensor:
    return torch.full((), value, dtype=x.dtype)


def _is_exact(x: Tensor, *bounds: Any) -> bool:
    """Whether clamping keeps the type: float bounds make floats of ints."""
    return x.is_floating_point() or not any(isinstance(bound, float) for bound in bounds)


@_decompose(aten.clamp.default)
def clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """By comparisons, which keep NaN; torch-mlir's clamp gives a bound."""
    if not _is_exact(x, min, max):
        return NotImplemented
    x = x if min is None else torch.where(x < min, _bound(x, min), x)
    return x if max is None else torch.where(x > max, _bound(x, max), x)


@_decompose(aten.clamp_min.default)
def clamp_min(x: Tensor, min: Any) -> Tensor:
    """As clamp."""
    return clamp(x, min=min)


@_decompose(aten.clamp_max.default)
def clamp_max(x: Tensor, max: Any) -> Tensor:
    """As clamp."""
    return clamp(x, max=max)


@_decompose(aten.maximum.default)
def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two, NaN if one is; IREE's gives the other one."""
    if not (a.is_floating_point() and a.dtype == b.dtype):
        return NotImplemented
    return torch.where((a > b) | (a != a), a, b)


@_decompose(aten.minimum.default)
def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller of two, NaN if one is; IREE's gives the other one."""
    if not (a.is_floating_point() and a.dtype == b.dtype):
        return NotImplemented
    return torch.where((a < b) | (a != a), a, b)


@_decompose(aten.hardtanh.default)
def hardtanh(x: Tensor, min_val: Any = -1, max_val: Any = 1) -> Tensor:
    """As clamp."""
    return clamp(x, min_val, max_val)


@_decompose(aten.cross_entropy_loss.default)
def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """nll of log_softmax, for targets that are classes; as torch.nn.CrossEntropyLoss."""
    if target.is_floating_point() or label_smoothing:
        return NotImplemented
    log_probabilities = torch.log_softmax(x, 1 if x.dim() > 1 else 0)
    return nll_loss(log_probabilities, target, weight, reduction, ignore_index)


@_decompose(aten.nll_loss_nd.default)
@_decompose(aten.nll_loss.default)
def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """-w[t] x[t], its mean weighted by w, without the ignored targets; as torch.nn.NLLLoss."""
    dim = 1 if x.dim() > 1 else 0
    kept = target != ignore_index
    label = torch.where(kept, target, torch.zeros_like(target))
    picked = -x.gather(dim, label.unsqueeze(dim)).squeeze(dim)
    scale = torch.ones_like(picked)
    if weight is not None:
        scale = weight.gather(0, label.reshape(-1)).reshape(label.shape)
    zero = torch.zeros_like(picked)
    scale, loss = torch.where(kept, scale, zero), torch.where(kept, picked * scale, zero)
    if reduction == 0:
        return loss
    return loss.sum() / scale.sum() if reduction == 1 else loss.sum()


@_decompose(aten.index_copy.default)
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """As index_put, but a negative index is out of range: it is sent past the end."""
    if x.dim() == 0:
        return NotImplemented
    dim %= x.dim()
    refused = torch.where(index < 0, x.shape[dim], index)
    return aten.index_put(x, [*[None] * dim, refused], source)


@_decompose(aten.index_add.default)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    """As scatter_add, which refuses negative indices too; `index` holds along the other dims."""
    if x.dim() == 0:
        return NotImplemented
    shape = [1] * x.dim()
    shape[dim] = -1
    scaled = source if alpha == 1 else source * alpha
    return x.scatter_add(dim, index.to(torch.int64).view(shape).expand_as(source), scaled)


@_decompose(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale + mask) v and the log of the sums, in the layout of the CPU kernel."""
    wide = [t.to(torch.float32) if t.dtype.itemsize < 4 else t for t in (query, key, value)]
    scores = wide[0] @ wide[1].transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    out = torch.softmax(scores, -1) @ wide[2]
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.to(query.dtype), torch.logsumexp(scores, -1)
