"""Small programs of many kinds: values, dtypes, shapes, strides and memory as in eager.

Through compile_module; with `-m full` through torch.compile too (both routes capture alike, which
frontend/test_capture.py holds them to).
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from flambeau.tests.support import ROUTES, build, check, check_gradients
from torch import nn

torch.manual_seed(0)  # for the weights of modules in the table

R = torch.randn
U = torch.rand


def ints(high, *shape):
    return torch.randint(0, high, shape)


class Attention(nn.Module):
    """Multi-head attention whose weights come back too."""

    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)
        self.options = options

    def forward(self, x, **kwargs):
        return self.inner(x, x, x, **self.options, **kwargs)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(7.0), 1 / 100 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin


class GroupedQuery(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = nn.Parameter(R(4, 5, 3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        outputs = torch.einsum("bi,eio->beo", x, self.experts)
        picked = outputs.gather(1, chosen[..., None].expand(-1, -1, 3))
        return (picked * weights[..., None]).sum(1)


class Recurrence(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, outputs = x.new_zeros(x.shape[0], 6), []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(state)
        return torch.stack(outputs, 1)


def windowed_mask(x):
    i = torch.arange(x.shape[-1])
    return x.masked_fill((i[:, None] - i).abs() > 2, -math.inf).softmax(-1)


def rotate_complex(x, angles):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def newton(x):
    y = x / 2
    for _ in range(5):
        y = (y + x / y) / 2
    return y


def masked_mean(x, mask):
    return (x * mask).sum(1) / mask.sum(1).clamp(min=1)


CASES = {
    # Scans, rolls and rearrangements
    "cumsum": (lambda x: (x.cumsum(0), x.cumsum(-1)), lambda: (R(5, 33),)),
    "cumsum reversed": (lambda x: x.flip(1).cumsum(1).flip(1), lambda: (R(4, 13),)),
    "cumsum of bool": (lambda x: (x > 0).cumsum(-1), lambda: (R(4, 13),)),
    "cumprod": (lambda x: x.cumprod(1), lambda: (U(3, 7) + 0.5,)),
    "cummax": (lambda x: x.cummax(1), lambda: (R(3, 7),)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), lambda: (R(3, 7),)),
    "roll": (lambda x: (x.roll(2), x.roll((1, -2), (0, 1))), lambda: (R(5, 7),)),
    "rot90 and flip": (lambda x: (x.rot90(), x.fliplr()), lambda: (R(5, 7),)),
    "unfold": (lambda x: x.unfold(1, 4, 3), lambda: (R(3, 13),)),
    "diagonals": (lambda x: (x.diag(), x.diagonal(1), x[0].diag_embed()), lambda: (R(5, 5),)),
    "triangles": (lambda x: (x.tril(-1), x.triu(1), x.long().tril()), lambda: (R(5, 7),)),
    "slices": (lambda x: (x[-100:3], x[1::2, ::3], x[..., -1]), lambda: (R(5, 7),)),
    "stack and split": (
        lambda x, y: (torch.stack([x, y], 1), torch.hstack([x, y]).tensor_split(3, 1)),
        lambda: (R(3, 5), R(3, 5)),
    ),
    "repeat": (lambda x: (x.repeat(2, 3), x.repeat_interleave(2, 1)), lambda: (R(2, 3),)),
    "pixel shuffle": (
        lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
        lambda: (R(1, 8, 3, 5),),
    ),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), lambda: (R(3), R(5))),
    # Contractions
    "einsum": (
        lambda a, b: (torch.einsum("bij,bkj->bik", a, b), torch.einsum("bij->ji", a)),
        lambda: (R(2, 5, 7), R(2, 3, 7)),
    ),
    "einsum with dots": (
        lambda x, w: torch.einsum("i...,i->i...", x, w),
        lambda: (R(5, 1, 7, 3), R(5)),
    ),
    "matmul broadcast": (lambda a, b: a @ b, lambda: (R(2, 1, 5, 7), R(3, 7, 2))),
    "matmul vector": (lambda a, b: (a @ b, b @ a.t(), b @ b), lambda: (R(5, 7), R(7))),
    "empty contraction": (lambda a, b: a @ b, lambda: (R(3, 0), R(0, 4))),
    "integer matmul": (lambda a, b: a @ b, lambda: (ints(9, 3, 5), ints(9, 5, 2))),
    "int8 matmul": (
        lambda a, b: torch.matmul(a, b),
        lambda: (ints(3, 1, 3, 5).to(torch.int8), ints(3, 1, 5, 2).to(torch.int8)),
    ),
    "addmm and baddbmm": (
        lambda m, a, b: (
            torch.addmm(m, a, b, beta=0.5, alpha=2),
            torch.baddbmm(m[None], a[None], b[None]),
        ),
        lambda: (R(3, 7), R(3, 5), R(5, 7)),
    ),
    "outer and cross": (lambda a, b: (a.outer(b), torch.linalg.cross(a, b)), lambda: (R(3), R(3))),
    "cdist": (lambda a, b: torch.cdist(a, b), lambda: (R(5, 3), R(7, 3))),
    # Convolution, pooling, resampling
    "conv1d": (nn.Conv1d(3, 4, 3, padding=1, dilation=2).eval(), lambda: (R(2, 3, 13),)),
    "conv1d grouped, long kernel": (
        nn.Conv1d(8, 8, 16, padding=8, groups=4).eval(),
        lambda: (R(1, 8, 13),),
    ),
    "conv2d depthwise": (
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4).eval(),
        lambda: (R(1, 4, 7, 9),),
    ),
    "conv2d same, reflected": (
        nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect").eval(),
        lambda: (R(1, 2, 7, 5),),
    ),
    "conv3d": (nn.Conv3d(2, 3, 3, padding=1).eval(), lambda: (R(1, 2, 3, 5, 4),)),
    "conv transposed": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2).eval(),
        lambda: (R(1, 4, 5, 7),),
    ),
    "max pool": (
        lambda x: (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, return_indices=True)),
        lambda: (R(2, 3, 9, 8),),
    ),
    "average pool": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda: (R(3, 8, 9),),
    ),
    "adaptive pool": (
        lambda x: (F.adaptive_avg_pool2d(x, (3, 2)), F.adaptive_max_pool2d(x, 2)),
        lambda: (R(1, 2, 7, 5),),
    ),
    "max unpool": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        lambda: (R(1, 2, 6, 8),),
    ),
    "fold": (
        lambda x: F.fold(F.unfold(x, 3, padding=1), (5, 7), 3, padding=1),
        lambda: (R(1, 2, 5, 7),),
    ),
    "grid sample": (
        lambda x, g: (
            F.grid_sample(x, g, align_corners=False),
            F.grid_sample(x, g, padding_mode="border", align_corners=False),
            F.grid_sample(x, g, mode="nearest", align_corners=True),
        ),
        lambda: (R(1, 2, 5, 7), U(1, 3, 4, 2) * 3 - 1.5),
    ),
    **{
        f"interpolate {mode}": (
            lambda x, mode=mode, corners=corners: (
                F.interpolate(x, scale_factor=2, mode=mode, align_corners=corners),
                F.interpolate(x, size=(3, 9), mode=mode, align_corners=corners),
            ),
            lambda: (R(1, 2, 5, 7),),
        )
        for mode, corners in (
            ("nearest", None),
            ("bilinear", False),
            ("bilinear", True),
            ("bicubic", False),
            ("area", None),
        )
    },
    "interpolate antialiased": (
        lambda x: F.interpolate(x, size=(4, 3), mode="bilinear", antialias=True),
        lambda: (R(1, 2, 9, 7),),
    ),
    **{
        f"pad {mode}": (
            lambda x, mode=mode: F.pad(x, (2, 1, 0, 3), mode=mode),
            lambda: (R(1, 2, 5, 7),),
        )
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    "pad negatively": (lambda x: F.pad(x, (-1, 2, 1, -2), value=3.0), lambda: (R(5, 7),)),
    # Indexing
    "gather": (lambda x, i: (x.gather(1, i), x.gather(-1, i)), lambda: (R(3, 5), ints(5, 3, 2))),
    "scatter": (
        lambda x, i, v: (x.scatter(1, i, v), x.scatter_add(1, i, v)),
        lambda: (R(3, 5), torch.tensor([[0, 2], [4, 1], [3, 0]]), R(3, 2)),
    ),
    **{
        f"scatter_reduce {how}": (
            lambda x, i, s, how=how: (
                x.scatter_reduce(0, i, s, how),
                x.scatter_reduce(0, i, s, how, include_self=False),
            ),
            lambda: (R(5), torch.tensor([0, 1, 1, 4]), R(4)),
        )
        for how in ("sum", "prod", "mean", "amax", "amin")
    },
    "index_put accumulated": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda: (R(5, 3), torch.tensor([0, 0, 4, -1]), R(4, 3)),
    ),
    "advanced indexing": (
        lambda x, i, j: (x[i, :, j], x[:, i], x[i[:, None], j], x[None, i]),
        lambda: (R(5, 7, 6), ints(5, 3), ints(6, 3)),
    ),
    "mask assignment": (lambda x: x.masked_fill(x > 0, -1).where(x < 1, 2.0), lambda: (R(5, 7),)),
    "bucketize": (
        lambda x, b: (torch.bucketize(x, b), torch.bucketize(x, b, right=True)),
        lambda: (R(13), torch.linspace(-2, 2, 9)),
    ),
    "searchsorted": (
        lambda b, x: torch.searchsorted(b, x),
        lambda: (R(3, 7).sort().values, R(3, 5)),
    ),
    "one hot": (lambda i: F.one_hot(i, 7), lambda: (ints(7, 2, 5),)),
    "embedding bag": (
        lambda i, w: F.embedding_bag(i, w, mode="mean"),
        lambda: (ints(7, 3, 4), R(7, 5)),
    ),
    "embedding with padding": (nn.Embedding(7, 5, padding_idx=0), lambda: (ints(7, 2, 5),)),
    "topk and sort": (
        lambda x: (x.topk(3), x.sort(descending=True), x.argsort(0), x.kthvalue(2)),
        lambda: (R(4, 9),),
    ),
    "sort is stable": (lambda x: x.sort(stable=True), lambda: (ints(3, 33),)),
    "nonzero": (lambda x: torch.nonzero(x > 0), lambda: (R(4, 5),)),
    "unique": (lambda x: torch.unique(x), lambda: (torch.tensor([3, 1, 2, 1, 3, 2, 4]),)),
    # Numbers
    "reductions": (
        lambda x: (x.sum(0), x.prod(1), x.amax((0, 1)), x.std(1), x.var(0, correction=0)),
        lambda: (R(5, 7),),
    ),
    "more reductions": (
        lambda x: (x.median(), x.norm(dim=1), x.logsumexp(0), x.min(1), x.argmax(), x.aminmax()),
        lambda: (R(5, 7),),
    ),
    "reductions over nothing": (
        lambda x: (x.sum(0), x.prod(0), x.any(), torch.cat([x, x + 1])),
        lambda: (torch.zeros(0, 3),),
    ),
    "bool reductions": (lambda x: (x.any(-1), x.all(-1), x.sum(-1), ~x), lambda: (R(3, 4) > 0,)),
    "large mean": (lambda x: (x.mean(), x.sum(1)), lambda: (U(300, 4000),)),
    "nan and infinity": (
        lambda x: (
            x.nan_to_num(),
            x.isnan(),
            x.isinf(),
            x.max(),
            x.clamp(-1, 1),
            x.relu(),
            x.maximum(x.flip(0)),
            x.argmax(),
            x.sort(),
            x.sign(),
        ),
        lambda: (torch.tensor([math.nan, math.inf, -math.inf, 1.0, -0.0]),),
    ),
    "softmax of masked rows": (
        lambda x: (x.softmax(-1), x.log_softmax(-1)),
        lambda: (torch.tensor([[-math.inf] * 3, [1.0, 2.0, -math.inf]]),),
    ),
    "large softmax": (lambda x: (x * 1000).softmax(-1), lambda: (R(3, 5),)),
    "denormals": (lambda x: x * 2.0**-124, lambda: (torch.tensor([0.1875, 1.0]),)),
    "rounding": (
        lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.frac(), x.round(decimals=1)),
        lambda: (torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 2.25, -7.9]),),
    ),
    "remainders": (
        lambda x, y: (x % y, x.fmod(y), x // y, torch.div(x, y, rounding_mode="trunc")),
        lambda: (R(13) * 5, torch.tensor([3.0, -2.0, 0.7] * 4 + [1.5])),
    ),
    "powers": (
        lambda x: (x**3, x**0.5, 2**x, x.pow(-2), x.sqrt(), x.rsqrt(), (-x) ** 2),
        lambda: (U(13) + 0.1,),
    ),
    "integer power": (lambda x: (x**3, x**2), lambda: (torch.tensor([-3, 2, 5]),)),
    "transcendental": (
        lambda x: (
            x.exp(),
            x.expm1(),
            x.log1p(),
            x.sin(),
            x.cos(),
            x.tan(),
            x.tanh(),
            x.atan(),
            x.erf(),
            x.sigmoid(),
            x.asin(),
            x.sinh(),
        ),
        lambda: (U(33) * 0.9,),
    ),
    "special functions": (
        lambda x: (x.lgamma(), x.digamma(), torch.special.i0(x), x.erfinv(), torch.sinc(x)),
        lambda: (U(13) * 0.8 + 0.1,),
    ),
    "atan2 and hypot": (lambda x, y: (x.atan2(y), x.hypot(y)), lambda: (R(13), R(13))),
    "activations": (
        lambda x: (
            F.gelu(x),
            F.gelu(x, approximate="tanh"),
            F.silu(x),
            F.mish(x),
            F.elu(x),
            F.selu(x),
            F.softplus(x),
            F.hardswish(x),
            F.leaky_relu(x, 0.1),
            F.glu(x.repeat(2)),
            F.logsigmoid(x),
            F.relu6(x * 4),
        ),
        lambda: (R(33) * 3,),
    ),
    "uint8 wraps": (
        lambda x: ((x + x).to(torch.int16), x * 3, x - 200),
        lambda: (torch.tensor([128, 200, 3], dtype=torch.uint8),),
    ),
    "bits": (
        lambda x, y: (x & y, x | y, x ^ y, ~x, x << 2, x >> 1, x & 3),
        lambda: (ints(99, 13), ints(5, 13)),
    ),
    "casts": (
        lambda x: (x.long(), x.to(torch.int8), x.bool(), x.double(), x.half().float()),
        lambda: (R(13) * 5,),
    ),
    "mixed dtypes": (
        lambda x, i, b: (x + i, i + b, i / 2, x * b, i + 1.5, torch.cat([x, i])),
        lambda: (R(5), ints(9, 5), R(5) > 0),
    ),
    "scalars": (lambda x: ((x * 2).expand(3) + x, x.reshape(1), x[None]), lambda: (R(()),)),
    "newton": (newton, lambda: (U(7) + 1,)),
    "complex": (
        lambda x: (x * 2j, x.abs(), x.conj() + 1, torch.view_as_real(x), x.real * x.imag),
        lambda: (R(5, dtype=torch.complex64),),
    ),
    "rotation by complex numbers": (rotate_complex, lambda: (R(2, 5, 8), R(5, 4))),
    "fft": (
        lambda x: (torch.fft.rfft(x).abs(), torch.fft.irfft(torch.fft.rfft(x), 16)),
        lambda: (R(16),),
    ),
    "stft": (
        lambda x, w: torch.stft(x, 16, 4, window=w, return_complex=True).abs(),
        lambda: (R(64), torch.hann_window(16)),
    ),
    "linear algebra": (
        lambda x: (
            torch.linalg.inv(x @ x.t() + 3 * torch.eye(4)),
            torch.linalg.vector_norm(x, 3),
            torch.linalg.cholesky(x @ x.t() + 3 * torch.eye(4)),
            x.trace(),
        ),
        lambda: (R(4, 4),),
    ),
    "factories": (
        lambda x: (
            torch.arange(1, 10, 3),
            torch.linspace(0, 1, 5),
            torch.eye(3, 4),
            x.new_full((2,), 7),
            torch.full_like(x, 2.5),
            torch.tensor([1.0, 2.0]),
            torch.ones(2, dtype=torch.bool),
        ),
        lambda: (R(3),),
    ),
    # Layers
    "gru cell": (Recurrence(nn.GRUCell(5, 6)), lambda: (R(2, 4, 5),)),
    "rnn cell": (Recurrence(nn.RNNCell(5, 6)), lambda: (R(2, 4, 5),)),
    "gru": (nn.GRU(5, 6, batch_first=True).eval(), lambda: (R(2, 4, 5),)),
    "lstm": (nn.LSTM(5, 6, num_layers=2, bidirectional=True).eval(), lambda: (R(4, 2, 5),)),
    "attention with weights": (Attention().eval(), lambda: (R(2, 7, 16),)),
    "attention without weights": (Attention(need_weights=False).eval(), lambda: (R(2, 7, 16),)),
    "attention masked": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        lambda: (R(2, 2, 5, 8), R(5, 5)),
    ),
    "attention with a boolean mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        lambda: (R(2, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()),
    ),
    "attention causal": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3),
        lambda: (R(1, 2, 5, 8), R(1, 2, 7, 8)),
    ),
    "attention grouped": (GroupedQuery(), lambda: (R(1, 4, 5, 8), R(1, 2, 5, 8), R(1, 2, 5, 8))),
    "attention windowed": (windowed_mask, lambda: (R(2, 7, 7),)),
    "rotary embedding": (Rotary(), lambda: (R(2, 3, 7, 8),)),
    "encoder layer": (
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True).eval(),
        lambda: (R(2, 5, 16),),
    ),
    "experts": (Experts(), lambda: (R(7, 5),)),
    "norms": (
        nn.Sequential(
            nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4)
        ).eval(),
        lambda: (R(2, 4, 5, 7),),
    ),
    "rms norm": (nn.RMSNorm(13), lambda: (R(5, 13),)),
    "layer norm of two dims": (nn.LayerNorm((5, 7)), lambda: (R(3, 5, 7),)),
    "local response norm": (nn.LocalResponseNorm(3), lambda: (R(2, 5, 3, 3),)),
    "weight norm": (
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
        lambda: (R(2, 5),),
    ),
    "bilinear": (nn.Bilinear(3, 5, 2), lambda: (R(4, 3), R(4, 5))),
    "masked mean": (masked_mean, lambda: (R(3, 7), (R(3, 7) > 0).float())),
    # Losses
    "cross entropy": (
        lambda x, t: (
            F.cross_entropy(x, t),
            F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
        ),
        lambda: (R(7, 5), ints(5, 7)),
    ),
    "cross entropy of images": (
        lambda x, t: F.cross_entropy(x, t),
        lambda: (R(2, 5, 3, 4), ints(5, 2, 3, 4)),
    ),
    "nll with weights": (
        lambda x, t, w: F.nll_loss(x.log_softmax(1), t, weight=w, ignore_index=2),
        lambda: (R(7, 5), torch.tensor([0, 1, 2, 3, 4, 2, 0]), U(5) + 0.1),
    ),
    "binary cross entropy": (
        lambda x, t: (
            F.binary_cross_entropy_with_logits(x, t),
            F.binary_cross_entropy(x.sigmoid(), t),
        ),
        lambda: (R(7), U(7)),
    ),
    "regression losses": (
        lambda x, y: (
            F.mse_loss(x, y),
            F.l1_loss(x, y),
            F.smooth_l1_loss(x, y),
            F.huber_loss(x, y),
        ),
        lambda: (R(5, 7), R(5, 7)),
    ),
    "divergence": (
        lambda p, q: F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean"),
        lambda: (R(4, 7), R(4, 7)),
    ),
    "metric losses": (
        lambda a, b, c: (
            F.triplet_margin_loss(a, b, c),
            F.cosine_similarity(a, b),
            F.pairwise_distance(a, c),
        ),
        lambda: (R(5, 7), R(5, 7), R(5, 7)),
    ),
    "ctc": (
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, (7, 7), (3, 2)),
        lambda: (R(7, 2, 5), ints(4, 2, 3) + 1),
    ),
    "normalize": (lambda x: (F.normalize(x), F.normalize(x * 0)), lambda: (R(5, 7),)),
    # Containers
    "nested outputs": (lambda x: {"a": x + 1, "b": [x * 2, (x - 1, None)]}, lambda: (R(3),)),
    "no tensor in": (lambda: torch.ones(3) * 2, lambda: ()),
    "nothing computed": (lambda x: (x, 3), lambda: (R(3),)),
    "unused argument": (lambda x, y: x + 1, lambda: (R(3), R(5))),
}


NOT_ONE_GRAPH = {"gru", "lstm", "ctc"}
"""Dynamo runs these in eager."""


KNOWN_FAULTS = {
    "denormals": "IREE's runtime flushes them to zero on the calling thread",
    "large mean": "IREE sums a row's terms one after the other",
    "complex": "a real view of a complex argument is no view of the same dtype",
    "attention with a boolean mask": "Dynamo expects the layout of another kernel than eager's",
    "attention with weights": "eager's fast path under no_grad has another layout",
    "attention without weights": "eager's fast path under no_grad has another layout",
}


def known(name):
    """The case, marked if it is known to fail: fixing it must take it off the list."""
    marks = []
    if name in KNOWN_FAULTS:
        marks.append(pytest.mark.xfail(strict=True, reason=KNOWN_FAULTS[name]))
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [known(name) for name in CASES if name not in NOT_ONE_GRAPH])
def test_case(name):
    program, make = CASES[name]
    check(program, *make())


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in NOT_ONE_GRAPH else pytest.mark.full) for n in CASES],
)
def test_case_by_torch_compile(name):
    program, make = CASES[name]
    check(program, *make(), route="torch.compile")


GRADIENTS = {
    "conv and norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        lambda: (R(2, 3, 9, 9),),
    ),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: (R(2, 4, 5, 5).requires_grad_(),)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 5), nn.LogSoftmax(-1)),
        lambda: (ints(11, 2, 5),),
    ),
    "attention": (
        lambda: Attention(need_weights=False),
        lambda: (R(2, 5, 16).requires_grad_(),),
    ),
    "recurrence": (lambda: Recurrence(nn.GRUCell(5, 6)), lambda: (R(2, 3, 5).requires_grad_(),)),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, route):
    make, arguments = GRADIENTS[name]
    check_gradients(make(), *arguments(), route=route)


def slope_inside(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x**3).sum(), x)[0]


def test_gradient_taken_inside_the_program():
    fast, x = torch.compile(slope_inside, backend="flambeau"), R(4)
    torch.testing.assert_close(fast(x), 3 * x**2)


RAISING = {
    "select": (lambda x: x.unsqueeze(1).select(1, 1), lambda: (R(3, 4),)),
    "mismatched sizes": (lambda x, y: x + y, lambda: (R(3), R(4))),
    "mismatched matmul": (lambda x: x @ x, lambda: (R(3, 4),)),
    "logcumsumexp of bytes": (
        lambda x: x.logcumsumexp(0),
        lambda: (torch.tensor(0, dtype=torch.uint8),),
    ),
    "integer division by zero": (lambda x: x // (x - x), lambda: (torch.tensor([1, 2]),)),
    "bad view": (lambda x: x.view(7), lambda: (R(3, 4),)),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", RAISING)
def test_what_raises_in_eager_raises(name, route):
    program, make = RAISING[name]
    with pytest.raises(Exception, match=r"."):
        program(*make())
    with pytest.raises(Exception, match=r"."):
        build(program, make(), route=route)(*make())
