"""Promises of the founding notes that are no figures of performance, and what became of each.

`docs.write_founding` makes a table of docs/FOUNDING_NOTES.md of them. What holds of figures is in
`docs.performance_claims`.
"""

from __future__ import annotations

from typing import NamedTuple

from docs.founding_names import SUCCESSOR
from docs.performance_claims import HOLDS, IN_PART, REFUTED


class Promise(NamedTuple):
    """One promise.

    Parameters
    ----------
    part : str
        Of the notes.
    says : str
    verdict : str
        `HOLDS`, `IN_PART`, `REFUTED` or `SUCCESSOR`.
    found : str
        What is so instead, or where it is shown.
    """

    part: str
    says: str
    verdict: str
    found: str


#: Pages that refute a promise.
_CLAIMED = "[MATH_REFERENCE, 19](MATH_REFERENCE.md#19-what-the-founding-notes-claimed)"
_TESTED = "[test](../tests/docs/test_founding_notes.py)"
PROMISES = (
    Promise("README", "all stages in one kernel, nothing between in memory", SUCCESSOR,
            "scores and weights never are; codes are, unless `cupyattn.QuantConfig(fused=True)`"),
    Promise("README", "Q and K in INT8, softmax and V in 16 bits", IN_PART,
            "mode \"balanced\"; the softmax is in float32, \"aggressive\" has V in 8 bits too"),
    Promise("README", "one scale for each head", IN_PART,
            '`cupyattn.QuantConfig("head", "head")`; the default is finer, and errs less'),
    Promise("README", "logits are divided by the scales", REFUTED,
            f"they are multiplied: a code times its scale is the number ({_CLAIMED})"),
    Promise("README", "an element is off by half a scale at most", HOLDS,
            "[MATH_REFERENCE](MATH_REFERENCE.md), and `cupyattn.bounds` for every element"),
    Promise("README", "the maximum is subtracted, so that nothing overflows", HOLDS,
            "[MATH_REFERENCE](MATH_REFERENCE.md)"),
    Promise("README", "logits are 0 to 1 then", REFUTED,
            f"they are at most 0; weights are 0 to 1 ({_CLAIMED})"),
    Promise("README", "every INT32 is exact in FP32", REFUTED,
            "up to 2^24 alone; sums of 256 products of codes stay below, so that these are exact "
            f"({_CLAIMED})"),
    Promise("README", "FP32 to FP16 rounds by about 1e-4", REFUTED,
            "by up to 2^-11 = 4.9e-4 of the number ([MATH_REFERENCE](MATH_REFERENCE.md))"),
    Promise("README", "no NaN or infinity comes about", IN_PART,
            "none by the arithmetic; those of operands go through, or `check_finite=True` refuses "
            "them"),
    Promise("README", "training converges as in 16 bits", HOLDS,
            "of a small transformer: [dit_fine_tune](../experiments/results/dit_fine_tune.json)"),
    Promise("README", "compute capability 7.0 and up", REFUTED, f"8.0 and up ({_CLAIMED})"),
    Promise("README", "A100, H100, RTX 4090", IN_PART,
            "H100 and H200 were measured; the portable form is for 8.0 and up"),
    Promise("README", "lengths of 512 to 16,384, head sizes of 64 to 256", HOLDS,
            "any length, head sizes of 1 to 256"),
    Promise("README", "falls back to 16 bits where INT8 cannot", HOLDS,
            "`cupyattn.Int8Attention.fallbacks` counts the calls, with the reason"),
    Promise("README, 10.3", "INT4", HOLDS, "`cupyattn.QuantConfig(qk_bits=4)`: its codes, not its "
            "speed"),
    Promise("README, 10.3", "several GPUs", HOLDS, "`cupyattn.distributed`"),
    Promise("README, 10.3", "a backward kernel of its own", HOLDS,
            "`cupyattn.attention_backward`"),
    Promise("README", "containers", HOLDS, "`Dockerfile`, `Dockerfile.cpu`"),
    Promise("integration", "gradients by finite differences", SUCCESSOR,
            "those of the 16-bit operands, by kernels of their own"),
    Promise("integration", "PyTorch 1.12, CUDA 11.6 and up", SUCCESSOR,
            "torch 2.11 and up, CUDA 12 or 13"),
    Promise("integration", "bfloat16 with modification", HOLDS, "without one"),
    Promise("7.2", "sigma is 79.4, 1.0 and 0.002 at steps 0, 500 and 999", IN_PART,
            "80, 2.5 and 0.002 by the notes' own formula, which is "
            "`cupyattn.compute_sigma_schedule(1000)`"),
    Promise("7.2", "activations grow as sigma does", IN_PART,
            "the noisy sample does, activations of a network that scales it do not: "
            "[timestep_ablation]"
            "(../experiments/results/timestep_ablation.json)"),
    Promise("kernels", "rotary embeddings in fa", HOLDS, "`rope=` of every rung"),
    Promise("kernels", "fa_warps: a warp has query rows of its own", HOLDS,
            "[TUTORIAL](TUTORIAL.md)"),
    Promise("kernels", "fa_tc: WMMA, and copies while it computes", SUCCESSOR,
            "`mma.sync` and `cp.async`; `wgmma` and TMA on Hopper"),
    Promise("kernels", "fa_int8: scales and zero points of a tensor", HOLDS,
            '`cupyattn.QuantConfig("tensor", "tensor", symmetric=False)`'),
    Promise("kernels", "too much shared memory fails silently", REFUTED,
            f"it raises, with the number and the way out ({_TESTED})"),
    Promise("kernels", "ones give 128 / 4096 at length 4,096", REFUTED,
            f"they give 1: weights sum to 1 ({_TESTED})"),
    Promise("1.1, 3.2", "P V takes 2 B H N D operations", REFUTED,
            "2 B H N^2 D, as many as Q K^T ([ladder](../experiments/results/ladder.json))"),
    Promise("kernels", "P in float times V in INT8", HOLDS,
            '`cupyattn.QuantConfig(pv="int8", p_type="16bit")`: P in 16 bits'),
    Promise("linear layers", "Triton kernels", SUCCESSOR, "CUDA C++, compiled at run time"),
    Promise("linear layers", "codes from -128 to 127", SUCCESSOR,
            "-127 to 127, so that a negated weight has negated codes"),
    Promise("linear layers", "products are in FP32", SUCCESSOR,
            '`out_dtype="float32"` of `cupyattn.int8_gemm`; 16 bits by default'),
    Promise("linear layers", "blocks of 128 x 128, scales in float32", HOLDS,
            "`cupyattn.weight_quant`; and a scale for each channel"),
    Promise("linear layers", "outliers are found, such layers keep 16 bits", HOLDS,
            "`cupyattn analyze`, `--max-outliers`"),
    Promise("linear layers", "norms, embeddings and final layers stay as they are", HOLDS,
            "`cupyattn.checkpoints.role_of`"),
    Promise("linear layers", "the VAE's decoder stays in high precision", HOLDS,
            "16 bits, never INT8"),
    Promise("linear layers", "large convolutions in INT8", IN_PART,
            "those of 1 x 1 and patches by `cupyattn.interop.torch.linear_convolutions`; larger "
            "ones keep 16 bits: rows of 3 x 3 windows take 9 times the input"),
    Promise("linear layers", "asymmetric weights (`symmetric=False`)", IN_PART,
            "`cupyattn.AffineInt8Linear`, a layer by itself; models and files have scales alone"),
    Promise("linear layers", "safetensors and .bin files", HOLDS,
            "the latter through torch, which runs nothing that is in them"),
    Promise("linear layers", "the analyser says what INT8 would do and save", HOLDS,
            "`cupyattn analyze`: [CHECKPOINTS](CHECKPOINTS.md)"),
)  # fmt: skip
