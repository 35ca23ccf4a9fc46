"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, length, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, bool, dict[str, float]], ...]

#: Every rung: NVIDIA H200, revision 1315269ebf, 941940294c.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34415.6,
        "fa": 31919.1,
        "fa_warps": 13483.1,
        "fa_tc": 455.0,
        "fa_int8": 587.6,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34413.8,
        "fa": 16686.6,
        "fa_warps": 7021.5,
        "fa_tc": 255.1,
        "fa_int8": 311.3,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 64812.6,
        "fa": 79072.9,
        "fa_warps": 23593.5,
        "fa_tc": 714.4,
        "fa_int8": 690.5,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64814.3,
        "fa": 40408.4,
        "fa_warps": 12246.9,
        "fa_tc": 396.8,
        "fa_int8": 407.9,
    }),
    (90, "float16", 256, 4096, False, {
        "unfused": 145536.2,
        "fa": 181014.2,
        "fa_warps": 76625.1,
        "fa_tc": 1406.8,
        "fa_int8": 1256.5,
    }),
    (90, "float16", 256, 4096, True, {
        "unfused": 147423.0,
        "fa": 91369.0,
        "fa_warps": 38955.7,
        "fa_tc": 757.1,
        "fa_int8": 770.3,
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
