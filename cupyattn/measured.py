"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, length, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, bool, dict[str, float]], ...]

#: Every rung: NVIDIA H200, revision a00283f299.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34429.8,
        "fa": 31921.5,
        "fa_warps": 13485.9,
        "fa_tc": 466.3,
        "fa_int8": 559.6,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34421.9,
        "fa": 16653.8,
        "fa_warps": 7022.4,
        "fa_tc": 261.3,
        "fa_int8": 304.3,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 65290.9,
        "fa": 79585.3,
        "fa_warps": 23601.4,
        "fa_tc": 739.6,
        "fa_int8": 688.2,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64857.5,
        "fa": 40499.8,
        "fa_warps": 12282.0,
        "fa_tc": 408.9,
        "fa_int8": 402.2,
    }),
    (90, "float16", 256, 4096, False, {
        "unfused": 146178.0,
        "fa": 182172.7,
        "fa_warps": 76628.9,
        "fa_tc": 1398.8,
        "fa_int8": 1243.1,
    }),
    (90, "float16", 256, 4096, True, {
        "unfused": 146131.0,
        "fa": 90957.7,
        "fa_warps": 38732.3,
        "fa_tc": 759.9,
        "fa_int8": 741.7,
    }),
)  # fmt: skip

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision 1b20201a4e.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 512, False, {
        "fa_tc": 121.6,
        "balanced": 175.2,
        "aggressive": 184.1,
    }),
    (90, "float16", 128, 1024, False, {
        "fa_tc": 213.3,
        "balanced": 243.6,
        "aggressive": 249.4,
    }),
    (90, "float16", 128, 2048, False, {
        "fa_tc": 380.0,
        "balanced": 372.6,
        "aggressive": 382.1,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 730.6,
        "balanced": 661.9,
        "aggressive": 651.8,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1384.7,
        "balanced": 1198.6,
        "aggressive": 1179.6,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2706.3,
        "balanced": 2285.0,
        "aggressive": 2212.8,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 741.3,
        "balanced": 662.2,
        "aggressive": 680.8,
    }),
    (90, "float16", 128, 16384, True, {
        "fa_tc": 1435.3,
        "balanced": 1225.5,
        "aggressive": 1220.9,
    }),
    (90, "float16", 64, 4096, False, {
        "fa_tc": 915.5,
        "balanced": 929.8,
        "aggressive": 1039.7,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3470.6,
        "balanced": 3345.7,
        "aggressive": 3452.7,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1374.8,
        "balanced": 1110.8,
        "aggressive": 1026.5,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 339.9,
        "balanced": 313.0,
        "aggressive": 307.3,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 243479.4,
        "balanced": 200438.3,
        "aggressive": 173412.5,
    }),
)  # fmt: skip
