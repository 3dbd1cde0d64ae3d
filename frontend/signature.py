"""What a captured graph takes and gives back, as plain data: no torch object inside.

Sizes are ints or expressions over symbols ("s0*2"), so a signature can be written as JSON and
evaluated where there is no sympy.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

Size = int | str


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """dtype by torch's name without the prefix, shape and strides in elements."""

    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


@dataclasses.dataclass(frozen=True)
class Input:
    """One argument of the graph.

    `user`: given at each call. `parameter`, `buffer` and `constant`: state of the module, `name`
    its qualified name; `persistent` says whether `state_dict` has it. A tensor has a `tensor`; a
    number that varies has a `symbol`; anything else is a `constant` that may not vary.
    """

    name: str
    kind: Literal["user", "parameter", "buffer", "constant"]
    tensor: TensorSpec | None = None
    symbol: str | None = None
    constant: Any = None
    persistent: bool = True
    mutated: bool = False


@dataclasses.dataclass(frozen=True)
class Output:
    """One leaf of what the model returns.

    `result`: result `index` of the graph. `alias`: a view of storage that the caller sees too, of
    input `index` with `of="input"`, of result `index` with `of="result"`; `offset` is relative to
    where that one begins, `detached` cuts it off from gradients. `same`: the object passed as
    input `index`. `scalar`: an expression over the symbols. `constant`: a JSON value.
    """

    kind: Literal["result", "alias", "same", "scalar", "constant"]
    index: int = 0
    of: Literal["input", "result"] = "input"
    tensor: TensorSpec | None = None
    offset: Size = 0
    value: Any = None
    detached: bool = False


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A size or scalar that varies between calls, and where a call shows its value.

    `input` is the argument; `dim` its dimension, None for a scalar argument. Bounds are inclusive.
    """

    name: str
    input: int
    dim: int | None
    lower: int | None = None
    upper: int | None = None


@dataclasses.dataclass(frozen=True)
class Signature:
    """Inputs in the order of the graph, outputs in the order of the flattened return value.

    `mutations` maps inputs to the result that holds their new value. `checks` says what the
    checks in the graph are of: if there are any, the last result is 0, or the number of one that
    failed, from 1 on.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    mutations: tuple[tuple[int, int], ...]
    symbols: tuple[Symbol, ...]
    checks: tuple[str, ...]

    def to_json(self) -> str:
        """The signature as JSON text, the same for the same signature."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "PowByNatural": lambda a, b: a**b,
    "FloatPow": lambda a, b: a**b,
    "ToFloat": float,
    "TruncToInt": math.trunc,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "RoundToInt": round,
    "Max": max,
    "Min": min,
    "Abs": abs,
}
_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd),
)


@cache
def _compiled(expression: str) -> Any:
    tree = ast.parse(expression, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ValueError(f"{expression!r} is not an expression over sizes")
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) not in _FUNCTIONS:
            raise ValueError(f"{expression!r} calls a function that is not known")
    return compile(tree, "<size>", "eval")


def evaluate(size: Size, symbols: Mapping[str, Any]) -> Any:
    """The value of a size under these symbols. Raises ValueError for what is no such expression."""
    if not isinstance(size, str):
        return size
    return eval(_compiled(size), {"__builtins__": {}, **_FUNCTIONS}, dict(symbols))


def evaluate_all(sizes: Sequence[Size], symbols: Mapping[str, Any]) -> tuple[int, ...]:
    """Each size's value under these symbols."""
    return tuple(evaluate(size, symbols) for size in sizes)
