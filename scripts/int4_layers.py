"""Layers in int4, made by the packages that make such checkpoints: tests/data/int4_layers.safetensors.

pip install compressed-tensors gptqmodel && pip install --no-deps autoawq && python scripts/int4_layers.py

Each layer has the tensors of a checkpoint, and `weight`, which the package itself makes of them. The metadata has
the versions. Made with compressed-tensors 0.20.0, AutoAWQ 0.2.9 and GPTQModel 7.7.0.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

N, K, GROUP = 32, 64, 32


def make_weight(seed: int) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def compressed(symmetric: bool, group: int | None) -> dict[str, Tensor]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    options = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = make_weight(1)
    groups = weight.unflatten(1, (-1, group or K))
    scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
    layer = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    tensors = PackedQuantizationCompressor.compress(layer, scheme)
    return tensors | {"weight": PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]}


def scales_and_zeros(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float16 [N, K / GROUP], with whole zeros 0..15."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).half().float()
    return scale, (-low / scale).round().clamp(0, 15)


def awq() -> dict[str, Tensor]:
    # The package itself imports parts of transformers that are gone.
    package = ModuleType("awq")
    package.__path__ = list(find_spec("awq").submodule_search_locations)
    sys.modules["awq"] = package
    modules = ModuleType("awq.modules.linear")
    modules.__path__ = [f"{package.__path__[0]}/modules/linear"]
    sys.modules["awq.modules.linear"] = modules
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = nn.Linear(K, N, bias=False)
    linear.weight.data = make_weight(2)
    scale, zero = scales_and_zeros(linear.weight.data)
    layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.t().contiguous(), zeros=zero.t().contiguous())
    tensors = {name: getattr(layer, name).contiguous() for name in ("qweight", "qzeros", "scales")}
    weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP)
    return tensors | {"weight": weight.t().contiguous()}


def gptq(is_first: bool) -> dict[str, Tensor]:
    """is_first: in the first version of the format."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    linear = nn.Linear(K, N, bias=False)
    linear.weight.data = make_weight(3)
    scale, zero = scales_and_zeros(linear.weight.data)
    layer = TorchLinear(
        bits=4,
        group_size=GROUP,
        sym=False,
        desc_act=False,
        in_features=K,
        out_features=N,
        bias=False,
        register_buffers=True,
    )
    layer.pack_original(linear, scale, zero, (torch.arange(K) // GROUP).int())
    # In float32 they have all digits, as with the twins of our kernels.
    scales = layer.scales
    layer.scales = scales.float()
    weight = layer.dequantize_weight().t().contiguous()
    if is_first:
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=4, group_size=GROUP, sym=False))
    tensors = {name: getattr(layer, name).contiguous() for name in ("qweight", "qzeros", "g_idx")}
    return tensors | {"scales": scales, "weight": weight.float()}


def main() -> None:
    layers = {
        "compressed": compressed(True, GROUP),
        "compressed with zeros": compressed(False, GROUP),
        "compressed in rows": compressed(False, None),
        "awq": awq(),
        "gptq with zeros": gptq(True),
        "gptq_v2": gptq(False),
    }
    tensors = {f"{layer}.{name}": tensor for layer, found in layers.items() for name, tensor in found.items()}
    versions = {name: version(name) for name in ("compressed-tensors", "autoawq", "gptqmodel")}
    file = Path(__file__).parents[1] / "tests" / "data" / "int4_layers.safetensors"
    file.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata=versions)
    print(file, file.stat().st_size, versions)


if __name__ == "__main__":
    main()
