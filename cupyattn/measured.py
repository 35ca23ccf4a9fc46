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

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision 7360c966ad.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 1024, False, {
        "fa_tc": 207.1,
        "balanced": 282.0,
        "aggressive": 452.9,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 730.5,
        "balanced": 709.0,
        "aggressive": 878.6,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1389.3,
        "balanced": 1254.5,
        "aggressive": 1449.4,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2733.2,
        "balanced": 2368.3,
        "aggressive": 2648.1,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 738.1,
        "balanced": 761.4,
        "aggressive": 866.7,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3411.2,
        "balanced": 3667.4,
        "aggressive": 4067.1,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1367.4,
        "balanced": 1130.5,
        "aggressive": 1352.4,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 344.5,
        "balanced": 334.3,
        "aggressive": 409.9,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 236337.1,
        "balanced": 202115.7,
        "aggressive": 188774.3,
    }),
)  # fmt: skip
