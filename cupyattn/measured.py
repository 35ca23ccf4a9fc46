"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, length, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, bool, dict[str, float]], ...]

#: Every rung: NVIDIA H200, revision 0c8de3cc59.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34418.3,
        "fa": 31920.4,
        "fa_warps": 13487.8,
        "fa_tc": 482.7,
        "fa_int8": 933.1,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34416.3,
        "fa": 16589.4,
        "fa_warps": 7016.7,
        "fa_tc": 265.3,
        "fa_int8": 561.0,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 64864.0,
        "fa": 79059.3,
        "fa_warps": 23597.3,
        "fa_tc": 745.7,
        "fa_int8": 1684.1,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64812.1,
        "fa": 40439.2,
        "fa_warps": 12283.0,
        "fa_tc": 406.0,
        "fa_int8": 984.0,
    }),
    (90, "float16", 256, 4096, False, {
        "unfused": 144867.2,
        "fa": 181181.0,
        "fa_warps": 76618.5,
        "fa_tc": 1447.2,
        "fa_int8": 3115.8,
    }),
    (90, "float16", 256, 4096, True, {
        "unfused": 145640.7,
        "fa": 90811.8,
        "fa_warps": 38702.9,
        "fa_tc": 760.4,
        "fa_int8": 1759.8,
    }),
)  # fmt: skip

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision ab8c9f5345.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 1024, False, {
        "fa_tc": 211.7,
        "balanced": 283.9,
        "aggressive": 467.5,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 728.9,
        "balanced": 709.2,
        "aggressive": 965.2,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1386.9,
        "balanced": 1253.2,
        "aggressive": 1648.2,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2727.1,
        "balanced": 2361.2,
        "aggressive": 3018.9,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 735.7,
        "balanced": 768.6,
        "aggressive": 951.0,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3399.5,
        "balanced": 3928.7,
        "aggressive": 4274.6,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1363.4,
        "balanced": 1128.4,
        "aggressive": 1382.3,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 344.1,
        "balanced": 334.7,
        "aggressive": 453.4,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 241211.2,
        "balanced": 206176.4,
        "aggressive": 214770.3,
    }),
)  # fmt: skip
