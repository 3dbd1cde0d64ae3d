"""Real architectures by name, with random weights from seeded configs: nothing is downloaded."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

Inputs = dict[str, Tensor]
SIZES = ("small", "full")


@dataclass(frozen=True)
class Model:
    """A class of transformers with its configs: `full` as published, `small` for tests.

    `inputs(config, shape)` makes the arguments; `shapes` gives the shape of each size for
    `build` and for `other`.
    """

    architecture: str
    config: str
    inputs: Callable[[Any, tuple[int, ...]], Inputs]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    full: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    by_keyword: bool = False

    def build(self, size: str = "full") -> tuple[nn.Module, tuple[Tensor, ...], Inputs]:
        """The module in eval mode, and the positional and keyword arguments of a call."""
        config = self._config(size)
        path, _, name = self.architecture.rpartition(".")
        architecture = getattr(importlib.import_module(path), name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = architecture(config).eval()
            _randomize(module)
        return module, *self._arguments(config, self.shapes[size][0])

    def other(self, size: str = "full") -> tuple[tuple[Tensor, ...], Inputs]:
        """Arguments of the same model with another batch size, sequence length or both."""
        return self._arguments(self._config(size), self.shapes[size][1])

    def dynamic_shapes(self, size: str = "full") -> dict[str, Any]:
        """What differs between the arguments of `build` and `other`, as torch.export names it."""
        config = self._config(size)
        one, two = (self.inputs(config, shape) for shape in self.shapes[size])
        return {
            name: {
                dim: torch.export.Dim.DYNAMIC
                for dim, extents in enumerate(zip(one[name].shape, two[name].shape, strict=True))
                if extents[0] != extents[1]
            }
            for name in one
        }

    def _config(self, size: str) -> Any:
        if size not in SIZES:
            raise ValueError(f"unknown size {size!r}; there are: {', '.join(SIZES)}")
        settings = self.full if size == "full" else self.small
        return getattr(importlib.import_module("transformers"), self.config)(**settings)

    def _arguments(self, config: Any, shape: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Inputs]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            inputs = self.inputs(config, shape)
        return ((), inputs) if self.by_keyword else (tuple(inputs.values()), {})


def check_activations(outputs: Any) -> None:
    """Raise ValueError where an output has died or exploded: no comparison would mean anything."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            deviation = leaf.double().std().item()
            if not 1e-3 < deviation < 1e3:
                raise ValueError(f"an output's standard deviation is {deviation:.3g}")


@torch.no_grad()
def _randomize(module: nn.Module) -> None:
    """Convolutions that keep the scale of activations; nothing is left at exactly 0 or 1."""
    for layer in module.modules():
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
            fan_in = layer.weight[0].numel()
            layer.weight.normal_(0.0, math.sqrt(_GAIN / fan_in))
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(0.0, 0.1)
            layer.running_var.uniform_(0.8, 1.2)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


_GAIN = 1.5
"""Between 1, which ReLU halves, and 2, which shortcuts double."""


def _image(config: Any, shape: tuple[int, ...]) -> Inputs:
    return {"pixel_values": torch.randn(shape[0], 3, *shape[1:])}


def _ids(config: Any, shape: tuple[int, ...]) -> Inputs:
    return {"input_ids": torch.randint(2, config.vocab_size, shape)}


def _masked_ids(config: Any, shape: tuple[int, ...]) -> Inputs:
    mask = torch.ones(shape, dtype=torch.long)
    mask[1:, -shape[1] // 4 :] = 0
    return _ids(config, shape) | {"attention_mask": mask}


def _two_ids(config: Any, shape: tuple[int, ...]) -> Inputs:
    batch, length, decoded = shape
    decoder = _ids(config, (batch, decoded))["input_ids"]
    return _ids(config, (batch, length)) | {"decoder_input_ids": decoder}


def _spectrum(config: Any, shape: tuple[int, ...]) -> Inputs:
    frames = 2 * config.max_source_positions
    return {"input_features": torch.randn(shape[0], config.num_mel_bins, frames)}


_IMAGES = {"full": ((1, 224, 224), (2, 224, 224)), "small": ((2, 64, 64), (3, 64, 64))}
_TEXTS = {"full": ((1, 128), (2, 77)), "small": ((2, 16), (3, 11))}

MODELS: dict[str, Model] = {
    "resnet50": Model(
        "transformers.ResNetModel",
        "ResNetConfig",
        _image,
        _IMAGES,
        small={"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2]},
    ),
    "mobilenet_v2": Model(
        "transformers.MobileNetV2Model",
        "MobileNetV2Config",
        _image,
        _IMAGES,
        small={"depth_multiplier": 0.25, "image_size": 64},
    ),
    "vit": Model(
        "transformers.ViTModel",
        "ViTConfig",
        _image,
        _IMAGES,
        small={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 64,
        },
    ),
    "bert-base": Model(
        "transformers.BertModel",
        "BertConfig",
        _masked_ids,
        _TEXTS,
        small={
            "vocab_size": 100,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
    ),
    "gpt2": Model(
        "transformers.GPT2Model",
        "GPT2Config",
        _ids,
        _TEXTS,
        full={"use_cache": False},
        small={
            "vocab_size": 100,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "use_cache": False,
        },
    ),
    "llama": Model(
        "transformers.LlamaModel",
        "LlamaConfig",
        _ids,
        _TEXTS,
        full={
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "use_cache": False,
        },
        small={
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_cache": False,
        },
    ),
    "t5": Model(
        "transformers.T5Model",
        "T5Config",
        _two_ids,
        {"full": ((1, 128, 32), (2, 77, 20)), "small": ((2, 16, 8), (3, 11, 5))},
        full={"use_cache": False},
        small={
            "vocab_size": 100,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "use_cache": False,
        },
        by_keyword=True,
    ),
    "whisper-encoder": Model(
        "transformers.models.whisper.modeling_whisper.WhisperEncoder",
        "WhisperConfig",
        _spectrum,
        {"full": ((1,), (2,)), "small": ((2,), (3,))},
        small={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "max_source_positions": 32,
        },
    ),
}
