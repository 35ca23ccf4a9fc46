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

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision 8c23d4f182.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 512, False, {
        "fa_tc": 116.8,
        "balanced": 190.5,
        "aggressive": 204.8,
    }),
    (90, "float16", 128, 1024, False, {
        "fa_tc": 206.2,
        "balanced": 258.3,
        "aggressive": 264.6,
    }),
    (90, "float16", 128, 2048, False, {
        "fa_tc": 374.0,
        "balanced": 387.0,
        "aggressive": 390.8,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 727.6,
        "balanced": 677.8,
        "aggressive": 648.4,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1385.0,
        "balanced": 1214.5,
        "aggressive": 1171.6,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2719.2,
        "balanced": 2313.1,
        "aggressive": 2148.6,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 736.0,
        "balanced": 676.9,
        "aggressive": 684.8,
    }),
    (90, "float16", 128, 16384, True, {
        "fa_tc": 1429.8,
        "balanced": 1243.6,
        "aggressive": 1194.1,
    }),
    (90, "float16", 64, 4096, False, {
        "fa_tc": 899.3,
        "balanced": 935.0,
        "aggressive": 1034.4,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3436.1,
        "balanced": 3288.7,
        "aggressive": 3395.1,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1363.7,
        "balanced": 1089.9,
        "aggressive": 1000.7,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 342.2,
        "balanced": 322.2,
        "aggressive": 316.4,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 232473.0,
        "balanced": 197935.5,
        "aggressive": 169659.8,
    }),
)  # fmt: skip
