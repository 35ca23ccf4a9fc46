"""Other libraries' 8-bit attention as cells of an experiment.

Their arithmetic has no error bound here: a cell is refused where its relative error is past what
anybody would call attention. FP8 comes three times: codes given, behind a pass of ours that casts
at the speed of memory, and behind torch's operators. Each takes part where it can be had.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupyattn as ca
from cupyattn.kernels.numerics import P_CODE_ONE
from experiments._harness.cast_fp8 import cast
from experiments._harness.cells import Cell, Problem
from experiments._harness.others import (
    flash_attention_3_forward,
    load_flash_3,
    packed_ends,
    refusing,
)  # fmt: skip

SAGE, SAGE_2 = "SageAttention 1", "SageAttention 2"
#: Variable with the folder of SageAttention 2's package, built from its sources (README.md).
SAGE_2_PACKAGE = "CUPYATTN_SAGE2"
#: Its kernel for Hopper, by the name that its package calls it.
SAGE_2_KERNEL = "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf"
FLASH_3_FP8, CUDNN_FP8 = "FlashAttention-3 FP8", "cuDNN FP8"
#: Suffixes of libraries whose codes are made beforehand, or by torch.
GIVEN, BY_TORCH = ", codes given", ", cast by torch"
#: Largest finite e4m3: the code of P = 1, and of the largest of a tensor.
E4M3_MAX = P_CODE_ONE["e4m3"]
#: Relative error past which a cell is refused: outliers cost per-tensor FP8 more than a tenth.
TOLERANCE = 0.25


def eight_bit(problem: Problem) -> list[Cell]:
    """Return every 8-bit library that can be had."""
    return [
        *sage(problem), *sage_2(problem), *flash_attention_3_fp8(problem), *cudnn_fp8(problem),
    ]  # fmt: skip


def sage(problem: Problem) -> list[Cell]:
    """Return SageAttention 1 (INT8 scores, 16-bit P V), its quantising included."""
    try:
        import torch
        from sageattention import sageattn
    except ImportError:
        return []

    def prepare(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
        # It takes the mean of the keys off its caller's K, in place: a copy, which is not timed.
        return torch.from_dlpack(q), torch.from_dlpack(k).clone(), torch.from_dlpack(v)

    def run(q: Any, k: Any, v: Any) -> Any:
        return sageattn(q, k, v, tensor_layout="HND", is_causal=problem.causal)

    return [_cell(SAGE, run, prepare)]


def sage_2(problem: Problem) -> list[Cell]:
    """Return SageAttention 2 (INT8 scores, e4m3 P V), codes given and its quantising included.

    Both with the defaults of its call, which leaves its caller's arrays as they are.
    """
    package = load_sage_2()
    if package is None:
        return []
    import torch

    def call(q: Any, k: Any, v: Any) -> Any:
        return package.sageattn(q, k, v, tensor_layout="HND", is_causal=problem.causal)

    def prepare(*arrays: Any) -> tuple[Any, ...]:
        return tuple(map(torch.from_dlpack, arrays))

    def codes_given(*arrays: Any) -> tuple[Any, ...]:
        """Return what its call gives its kernel: codes, O, scales, options."""
        held: list[tuple[Any, ...]] = []
        kernels = vars(package.core).get("sm90_compile")
        holding = SimpleNamespace(**{SAGE_2_KERNEL: lambda *given: held.append(given)})
        package.core.sm90_compile = holding
        try:
            call(*prepare(*arrays))
        finally:
            package.core.sm90_compile = kernels
        if not held:
            raise RuntimeError("its call runs another kernel than Hopper's here")
        return held[0]

    def kernel_alone(q: Any, k: Any, v: Any, out: Any, *scales_and_options: Any) -> Any:
        o = torch.empty_like(out)
        getattr(package.core.sm90_compile, SAGE_2_KERNEL)(q, k, v, o, *scales_and_options)
        return o[..., : problem.head_dim]  # it is padded to 64 or 128

    given = f"{SAGE_2}{GIVEN}"
    return [_cell(given, kernel_alone, refusing(given, codes_given)), _cell(SAGE_2, call, prepare)]


def load_sage_2() -> Any:
    """Return SageAttention 2's package; None where its folder is not named.

    Under a separate name: version 1 is `sageattention`, too, and takes part beside it.
    """
    folder, name = os.environ.get(SAGE_2_PACKAGE), "sageattention2"
    if not folder:
        return None
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
        assert spec is not None and spec.loader is not None  # of a file that ends in .py
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package  # its modules import each other by it
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def flash_attention_3_fp8(problem: Problem) -> list[Cell]:
    """Return FlashAttention-3 with e4m3 operands, a scale for each tensor."""
    if not load_flash_3():
        return []
    import torch

    batch, heads, head_dim = problem.batch, problem.heads, problem.head_dim

    def forward(codes: tuple[Any, ...], scales: Any, ends: tuple[Any, ...]) -> Any:
        q, k, v = codes
        descale = tuple(scale.reshape(1, 1).expand(batch, heads) for scale in scales[:3])
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        o = flash_attention_3_forward(problem, (q, k, v), ends, out, descale)
        return o.view(batch, problem.length, heads, head_dim).transpose(1, 2)

    return _three_ways(FLASH_3_FP8, forward, lambda q: packed_ends(problem, q), rows_first=True)


def cudnn_fp8(problem: Problem) -> list[Cell]:
    """Return cuDNN's FP8 attention, a scale for each tensor and P in units of its largest.

    On Hopper its O is e4m3 as well: in units of V's scale, which no O can be past.
    """
    try:
        # NOTE: torch first: the frontend then finds the cuDNN that torch has loaded.
        import torch  # noqa: I001
        import cudnn
    except ImportError:
        return []
    shape = (problem.batch, problem.heads, problem.length, problem.head_dim)
    graphs: list[tuple[Any, dict[str, Any], Any, Any]] = []

    def graph() -> tuple[Any, dict[str, Any], Any, Any]:
        if not graphs:
            graphs.append(_cudnn_graph(cudnn, problem))
        return graphs[0]

    def forward(codes: tuple[Any, ...], scales: Any, ones: tuple[Any, ...]) -> Any:
        pygraph, handles, workspace, cudnn_handle = graph()
        p_scale, p_descale, spare = ones
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=spare.device)
        q_scale, k_scale, v_scale, o_scale = scales
        given = dict(zip(("q", "k", "v"), codes, strict=True)) | {
            "descale_q": q_scale, "descale_k": k_scale, "descale_v": v_scale,
            "scale_s": p_scale, "descale_s": p_descale, "scale_o": o_scale,
            "o": out, "amax_s": spare, "amax_o": spare,
        }  # fmt: skip
        # Its kernels go to the stream of the handle, whichever is the current one.
        cudnn.set_stream(handle=cudnn_handle, stream=torch.cuda.current_stream().cuda_stream)
        pygraph.execute(
            {handles[name]: x for name, x in given.items()}, workspace, handle=cudnn_handle
        )
        return out, v_scale

    def constants(q: Any) -> tuple[Any, ...]:
        graph()  # built outside the timed part
        return tuple(
            torch.full((1,), x, dtype=torch.float32, device="cuda")
            for x in (E4M3_MAX, 1 / E4M3_MAX, 0.0)
        )

    def read(result: Any) -> Any:
        codes, scale = result
        return codes.float() * scale

    return _three_ways(CUDNN_FP8, forward, constants, rows_first=False, read=read)


def as_e4m3(codes: Any) -> Any:
    """Return codes, of CuPy or torch, as torch's e4m3."""
    import torch

    return torch.from_dlpack(codes).view(torch.float8_e4m3fn)


def _cudnn_graph(cudnn: Any, problem: Problem) -> tuple[Any, dict[str, Any], Any, Any]:
    """Build cuDNN's graph of a problem: it, its tensors by name, its workspace, its handle."""
    import torch

    types, handle = cudnn.data_type, cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT, handle=handle,
    )  # fmt: skip

    def strides(shape: tuple[int, ...]) -> list[int]:
        _, heads, length, head_dim = shape
        return [heads * length * head_dim, length * head_dim, head_dim, 1]

    def tensor(name: str, length: int) -> Any:
        shape = (problem.batch, problem.heads, length, problem.head_dim)
        return graph.tensor(
            name=name, dim=list(shape), stride=strides(shape), data_type=types.FP8_E4M3
        )

    def number(name: str) -> Any:
        return graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=types.FLOAT)

    handles = {"q": tensor("q", problem.length)}
    handles |= {name: tensor(name, problem.len_kv) for name in ("k", "v")}
    scales = ("descale_q", "descale_k", "descale_v", "scale_s", "descale_s", "scale_o")
    handles |= {name: number(name) for name in scales}
    try:
        o, _, amax_s, amax_o = graph.sdpa_fp8(
            **handles, is_inference=True, attn_scale=problem.head_dim**-0.5,
            use_causal_mask=problem.causal,
        )  # fmt: skip
        shape = (problem.batch, problem.heads, problem.length, problem.head_dim)
        o.set_output(True).set_dim(list(shape)).set_stride(strides(shape))
        o.set_data_type(types.FP8_E4M3)
        for name, x in (("amax_s", amax_s), ("amax_o", amax_o)):
            x.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(types.FLOAT)
            handles[name] = x
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
        raise ca.UnsupportedError(f"{CUDNN_FP8}: {error}") from error
    size = max(graph.get_workspace_size(), 1)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    return graph, handles | {"o": o}, workspace, handle


def _three_ways(
    name: str,
    forward: Callable[[tuple[Any, ...], Any, tuple[Any, ...]], Any],
    constants: Callable[[Any], tuple[Any, ...]],
    *,
    rows_first: bool,
    read: Callable[[Any], Any] | None = None,
) -> list[Cell]:
    """Return an FP8 library with codes given, behind our cast and behind torch's.

    `forward` takes codes, the scales of q, k and v and the inverse of v's. `constants`
    returns further arguments for Q that do not depend on the values. `rows_first` packs the
    operands as (batch x length, heads, head_dim) beforehand; `read` is that of `Cell`.
    """
    import cupy
    import torch

    def in_order(x: Any) -> Any:
        if not rows_first:
            return x
        batch, heads, length, head_dim = x.shape
        return cupy.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch * length, heads, head_dim)

    def operands(*arrays: Any) -> tuple[Any, ...]:
        q, k, v = map(in_order, arrays)
        return (q, k, v), constants(torch.from_dlpack(q))

    def codes_given(*arrays: Any) -> tuple[Any, ...]:
        found, fixed = operands(*arrays)
        *codes, scales = cast(*found)
        return tuple(map(as_e4m3, codes)), torch.from_dlpack(scales).split(1), fixed

    def behind_ours(found: Any, fixed: Any) -> Any:
        *codes, scales = cast(*found)
        return forward(tuple(map(as_e4m3, codes)), torch.from_dlpack(scales).split(1), fixed)

    def for_torch(*arrays: Any) -> tuple[Any, ...]:
        found, fixed = operands(*arrays)
        return tuple(map(torch.from_dlpack, found)), fixed

    def behind_torch(found: Any, fixed: Any) -> Any:
        scales = [x.abs().amax().float().reshape(1) / E4M3_MAX for x in found]
        scales.append(1 / scales[2])
        codes = [
            (x / scale).to(torch.float8_e4m3fn) for x, scale in zip(found, scales, strict=False)
        ]
        return forward(tuple(codes), scales, fixed)

    return [
        _cell(f"{name}{GIVEN}", forward, codes_given, read),
        _cell(name, behind_ours, operands, read),
        _cell(f"{name}{BY_TORCH}", behind_torch, for_torch, read),
    ]


def _cell(
    name: str,
    run: Callable[..., Any],
    prepare: Callable[..., tuple[Any, ...]],
    read: Callable[[Any], Any] | None = None,
) -> Cell:
    return Cell(
        name, "fa_int8", refusing(name, run), prepare, peer=True, tolerance=TOLERANCE, read=read
    )
