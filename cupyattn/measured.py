"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, length, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, bool, dict[str, float]], ...]

#: Every rung: NVIDIA H200, revision 941940294c.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34419.8,
        "fa": 31920.4,
        "fa_warps": 13485.1,
        "fa_tc": 462.9,
        "fa_int8": 602.6,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34420.8,
        "fa": 16617.7,
        "fa_warps": 7014.4,
        "fa_tc": 260.2,
        "fa_int8": 346.1,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 65291.6,
        "fa": 79647.7,
        "fa_warps": 23596.2,
        "fa_tc": 745.4,
        "fa_int8": 732.9,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64849.7,
        "fa": 40399.2,
        "fa_warps": 12232.8,
        "fa_tc": 409.0,
        "fa_int8": 473.1,
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
