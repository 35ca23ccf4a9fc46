"""Names, modules, commands and flags of the founding notes, and their successors here.

`docs.write_founding` makes tables of docs/FOUNDING_NOTES.md of them, and
tests/docs/test_founding_notes.py holds each to what the code does.
"""

from __future__ import annotations

from typing import NamedTuple

#: Verdicts on a name of the notes.
TYPED, SUCCESSOR = "works as typed", "successor"


class Row(NamedTuple):
    """One thing of the notes.

    Parameters
    ----------
    notes : str
        As it stands there.
    verdict : str
        `TYPED` or `SUCCESSOR`.
    here : str
        What is here: for a name that works as typed, where it is.
    remark : str
    """

    notes: str
    verdict: str
    here: str
    remark: str = ""


#: Blocks of the notes' code that do not run to their end. Of each the beginning of the one line
#: that it ends with, as a regular expression, and the page's words for it.
ENDS = {
    "softmax epsilon": (
        r"UnsupportedError: softmax_eps=1e-05 is not supported", "`softmax_eps=0`"
    ),
    "torch: softmax epsilon": (
        r"UnsupportedError: softmax_eps=1e-05 is not supported", "`softmax_eps=0`"
    ),
    "torch: trade-offs": (
        r"TypeError: .* head_dim, .*: give Int8Attention\(num_heads=32, head_dim=",
        "`head_dim=`, which it leaves out",
    ),
    "torch: 16 bits for critical steps": (
        r"RenamedImportError: .* use cupyattn\.attention", "`cupyattn.attention`"
    ),
    "precision by step": (
        r"RenamedImportError: int8_attention is not .*variant='fa_int8'", "`cupyattn.attention`"
    ),
    "Kandinsky in a pipeline": (
        r"RenamedImportError: .*cupyattn\.checkpoints\.optimize_kandinsky",
        "`cupyattn.checkpoints.optimize_kandinsky`",
    ),
    "linear layers": (
        r"RenamedImportError: TritonInt8LinearLayer .*use cupyattn\.Int8Linear",
        "`cupyattn.Int8Linear`",
    ),
    "configuration": (
        r"RenamedImportError: TritonInt8Config .*use cupyattn\.Int8Config",
        "`cupyattn.Int8Config`",
    ),
    # Other libraries: torch's own functions, misspelt once, and libraries that judge images.
    "benchmark": (
        r"(AssertionError|RuntimeError|AttributeError): .*(CUDA|cuda_synchronize)",
        "`torch.cuda.synchronize`, which it misspells; or `cupyattn profile`",
    ),
    "quality": (
        r"ModuleNotFoundError: No module named '(torchvision|lpips)'",
        "torchvision and lpips, which it needs; or torchmetrics",
    ),
}
#: Blocks marked as Python that are lists and formulas.
NO_CODE = {"profiling by hand", "list of layers", "quantisation in words"}
#: Modules that code of the notes imports from, and files that they name.
MODULES = (
    Row("`from kernels.attention_int8 import Int8Attention`, "
        "`from attention_int8_pytorch import Int8Attention`", SUCCESSOR,
        "`from cupyattn.interop.torch import Int8Attention`",
        "for CuPy and NumPy `cupyattn.Int8Attention`"),
    Row("`from kernels.attention_int8 import replace_attention_with_int8`, "
        "`from attention_int8_pytorch import replace_attention_with_int8`", SUCCESSOR,
        "`from cupyattn.interop.diffusers import replace_attention_with_int8`"),
    Row("`from triton_int8_converter import ...`", SUCCESSOR,
        "`cupyattn` and `cupyattn.interop.torch`", "the names below"),
    Row("`from kandinsky_int8_optimizer import ...`", SUCCESSOR, "`cupyattn.checkpoints`",
        "the names below"),
    Row("`from kandinsky import get_T2V_pipeline`", SUCCESSOR, "a pipeline of diffusers",
        "the model's own package, not a part of this library"),
    Row("`int8_matmul.py`", SUCCESSOR,
        "`from cupyattn import act_quant, weight_dequant, int8_gemm`"),
    Row("`attention_int8.cu`, `fa_int8.cu`", SUCCESSOR, "`kernels_cu/attn_fa_int8.cu`"),
    Row("`unfused.cu`, `fa.cu`, `fa_warps.cu`, `fa_tc.cu`", SUCCESSOR,
        "`kernels_cu/attn_unfused.cu`, `attn_fa.cu`, `attn_fa_warps.cu`, `attn_fa_tc.cu`",
        "each may have a Hopper form in `kernels_cu/sm90`"),
    Row("`mha_kernels/`, `include/`", SUCCESSOR, "`kernels_cu/`, `kernels_cu/prims/`"),
    Row("`extensions/`, `utils/`", SUCCESSOR, "`cupyattn/interop/`, `cupyattn/reference/`"),
    Row("`profiling/`", SUCCESSOR, "`cupyattn profile`, `experiments/speed/`"),
    Row("`tests/`, `examples/`", TYPED, "`tests/`, `examples/`"),
    Row("`benchmark_latency.py`", SUCCESSOR, "`cupyattn.ladder`, `cupyattn profile`"),
    Row("`eval_diffusion_quality.py`", SUCCESSOR, "`experiments/dit/quality.py`"),
    Row("`DESIGN.md`, `MATH_REFERENCE.md`", TYPED, "[DESIGN.md](DESIGN.md), "
        "[MATH_REFERENCE.md](MATH_REFERENCE.md)"),
    Row("`PERFORMANCE_ANALYSIS.md`", SUCCESSOR, "[PERFORMANCE.md](PERFORMANCE.md)"),
    Row("`PYTORCH_INTEGRATION.md`", SUCCESSOR, "[INTEROP.md](INTEROP.md)"),
    Row("`python setup.py build_ext --inplace`", SUCCESSOR,
        "`pip install -e '.[cuda13,cli]'` in a checkout", "or `cuda12`; nothing is built"),
)  # fmt: skip

#: Classes, functions, methods, arguments and values.
NAMES = (
    Row("`Int8Attention(num_heads, head_dim, ...)`", TYPED, "`cupyattn.Int8Attention`",
        "a call without `head_dim`, which has no default, says what to give"),
    Row("`Int8Attention(...).cuda()`", TYPED, "`cupyattn.Int8Attention.cuda`",
        "of the core class it returns the layer, which computes where q, k and v lie"),
    Row("`attention(Q, K, V, timestep)`", TYPED, "the same", "timestep 0 has the most noise"),
    Row("`attention.fused_cfg(...)`", TYPED, "`cupyattn.Int8Attention.fused_cfg`"),
    Row("`num_timesteps`", TYPED, "the same"),
    Row("`use_adaptive_scaling`, `timestep_scales`", TYPED, "the same",
        "have an effect on static scales only, and warn otherwise"),
    Row("`block_q`, `block_k`", TYPED, "the same", "sizes of tiles; they save no device memory"),
    Row("`softmax_eps`", SUCCESSOR, "`softmax_eps=0`",
        "others raise: rows without keys are zeros without it"),
    Row("`enable_pruning`, `pruning_ratio`, `return_mask`", TYPED, "the same",
        "the mask is True for keys that are kept"),
    Row("`attention_type='block_sparse'`, `window_size`, `block_size`", TYPED, "the same"),
    Row("`enable_cfg_fusion`, `guidance_scale`", TYPED, "the same",
        "`fused_cfg` does not need the former; the latter combines outputs of the network"),
    Row("`precision_mode`", SUCCESSOR,
        "`precision_policy` of `Int8Attention`, `mode` of a call, `accuracy` of `attention`",
        "raises"),
    Row("`v_precision`", SUCCESSOR, "`pv` of `cupyattn.QuantConfig`; `mode=\"precision\"`",
        "raises; V is in 16 bits by default"),
    Row("`aggressive`, `balanced`, `precision`", TYPED, "modes of `cupyattn.Int8Attention`"),
    Row("`REFINEMENT_THRESHOLD`", SUCCESSOR,
        "`cupyattn.diffusion.SigmaPolicy(late_steps=10)`, the last ten steps"),
    Row("`loss.backward()` through float32 tensors", SUCCESSOR,
        "float16 or bfloat16 tensors, or `torch.autocast`", "raises"),
    Row("`replace_attention_with_int8(pipe)`", TYPED,
        "`cupyattn.interop.diffusers.replace_attention_with_int8`"),
    Row("`compute_sigma_schedule`, `compute_adaptive_scales`", TYPED,
        "`cupyattn.compute_sigma_schedule`, `cupyattn.compute_adaptive_scales`"),
    Row("`calibrate_quantization_scales(model, calib_dataloader)`", SUCCESSOR,
        "`cupyattn.calibrate_quantization_scales`",
        "takes a recording of the model, or (q, k, timestep) of calls; "
        "`scales_Q, scales_K = ...` works; the percentile is in per cent"),
    Row("`model.compute_qk(batch)`", SUCCESSOR, "`cupyattn.interop.torch.record(model)`",
        "keeps q and k of the model's own calls: [CALIBRATION.md](CALIBRATION.md)"),
    Row("`adaptive_precision_attention`", SUCCESSOR, "`cupyattn.Int8Attention`",
        'raises; `precision_policy="adaptive"`, the default, has the limits of the notes, 5 and '
        "0.1"),
    Row("`int8_attention`, `attention_int8`", SUCCESSOR,
        '`cupyattn.attention` with `variant="fa_int8"`', "raises"),
    Row("`int8_attention_hq`", SUCCESSOR, 'the same call, or `mode="balanced"` of a step',
        "raises; P and V are in 16 bits"),
    Row("`attention_fp16`", SUCCESSOR, "`cupyattn.attention`", "raises"),
    Row("`measure_latency`, `benchmark`", SUCCESSOR, "`cupyattn.ladder`, `cupyattn profile`",
        "the former raises"),
    Row("`eval_images`, `compute_fid`", SUCCESSOR,
        "a library that judges images, such as torchmetrics", "raises"),
    Row("`act_quant`, `weight_dequant`, `int8_gemm`", TYPED,
        "`cupyattn.act_quant`, `cupyattn.weight_dequant`, `cupyattn.int8_gemm`",
        "blocks of 128, scales in float32"),
    Row("`quantize_weight`", SUCCESSOR, "`cupyattn.weight_quant`", "raises"),
    Row("`TritonInt8Config`", SUCCESSOR, "`cupyattn.Int8Config`", "raises; same arguments"),
    Row("`min_elements_for_int8`, `max_outlier_ratio`, `symmetric`", TYPED,
        "arguments of `cupyattn.Int8Config`", "`symmetric=False` raises: see the promises"),
    Row("`TritonInt8LinearLayer`", SUCCESSOR,
        "`cupyattn.Int8Linear`, `cupyattn.interop.torch.Int8Linear`",
        "raises; a whole model: `cupyattn.interop.torch.replace_linear_with_int8`"),
    Row("`OptimizedModel`", SUCCESSOR, "`cupyattn.interop.torch.replace_linear_with_int8`",
        "the loop over modules of the notes, in one call"),
    Row("`KandinskyInt8Optimizer(model).optimize_model(output)`", SUCCESSOR,
        "`cupyattn.checkpoints.optimize_kandinsky`", "raises"),
    Row("`get_T2V_pipeline`, `checkpoint_path_override`, `use_mixed_weights`", SUCCESSOR,
        "`cupyattn.interop.torch.load_int8(pipe.transformer, folder)`",
        "raises; the model's own package loads no INT8"),
)  # fmt: skip

COMMANDS = (
    Row("`analyze_weights_enhanced.py MODEL --output FILE`", SUCCESSOR,
        "`cupyattn analyze MODEL --output FILE`"),
    Row("`triton_int8_converter.py MODEL --output DIR --analysis FILE`, "
        "`smartconvert_enhanced.py`", SUCCESSOR,
        "`cupyattn convert MODEL --output DIR --analysis FILE`"),
    Row("`optimize_kandinsky.py --model-path --config-path --output-path --benchmark`", SUCCESSOR,
        "`cupyattn kandinsky` with the same flags; `cupyattn benchmark MODEL` for any checkpoint",
        "YAML needs PyYAML, which the extra `cli` brings"),
    Row("`--max-outliers`, `--min-elements`, `--fallback-dtype`", TYPED,
        "of `analyze`, `convert` and `kandinsky`"),
    Row("`fp32_patterns`", TYPED, "`cupyattn.Int8Config`", "on the command line `--fp32-pattern`"),
    Row("`make KERNEL=... NVCC_ARCH=...`", SUCCESSOR,
        "nothing to build: kernels compile at their first call",
        "beforehand by `cupyattn cache --warm`"),
    Row("`./bin/profile_fa --warmup=5 --runs=10 --random`", SUCCESSOR,
        "`cupyattn profile fa --warmup=5 --runs=10 --random`"),
    Row("`ncu --import-source yes --set full --export FILE ./bin/profile_fa --kernel=fa`",
        SUCCESSOR, "`cupyattn profile fa --ncu`",
        "prints the command and runs it where `ncu` is installed; `--dry-run` prints it alone and "
        "needs no device"),
    Row("`ncu --import FILE > FILE.txt`, `--csv > FILE.csv`", TYPED,
        "the file is Nsight Compute's own", "`cupyattn profile fa --ncu` prints both lines"),
    Row("`compute-sanitizer ./bin/profile_fa_tc`", SUCCESSOR,
        "`cupyattn profile fa_tc --sanitizer`",
        "without a device `cupyattn interpret fa_tc` reports races and faults"),
    Row("`cuda-gdb ./bin/profile_fa_warps`", SUCCESSOR, "`cupyattn profile fa_warps --gdb`",
        "without a device `cupyattn interpret fa_warps --break FILE:LINE`"),
    Row("`python -c \"import triton\"`", SUCCESSOR, "`cupyattn info`", "there is no Triton"),
    Row("`.cache/` of reference outputs", SUCCESSOR, "`cupyattn cache`",
        "of compiled kernels; references are computed in each run"),
)  # fmt: skip
