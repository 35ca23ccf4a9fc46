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

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision 1b7fc01c83.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 512, False, {
        "fa_tc": 121.1,
        "balanced": 175.1,
        "aggressive": 185.5,
    }),
    (90, "float16", 128, 1024, False, {
        "fa_tc": 211.3,
        "balanced": 236.0,
        "aggressive": 243.9,
    }),
    (90, "float16", 128, 2048, False, {
        "fa_tc": 375.4,
        "balanced": 364.9,
        "aggressive": 375.7,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 728.9,
        "balanced": 649.8,
        "aggressive": 639.1,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1383.3,
        "balanced": 1174.5,
        "aggressive": 1166.5,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2719.0,
        "balanced": 2242.5,
        "aggressive": 2204.3,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 737.4,
        "balanced": 653.9,
        "aggressive": 685.7,
    }),
    (90, "float16", 128, 16384, True, {
        "fa_tc": 1429.8,
        "balanced": 1199.1,
        "aggressive": 1209.5,
    }),
    (90, "float16", 64, 4096, False, {
        "fa_tc": 903.6,
        "balanced": 923.0,
        "aggressive": 1032.7,
    }),
    (90, "float16", 64, 8192, False, {
        "fa_tc": 1728.5,
        "balanced": 1703.4,
        "aggressive": 1794.5,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3419.9,
        "balanced": 3309.2,
        "aggressive": 3417.4,
    }),
    (90, "float16", 256, 4096, False, {
        "fa_tc": 698.0,
        "balanced": 590.4,
        "aggressive": 583.4,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1363.8,
        "balanced": 1083.4,
        "aggressive": 1035.4,
    }),
    (90, "float16", 256, 16384, False, {
        "fa_tc": 2687.6,
        "balanced": 2044.8,
        "aggressive": 1877.8,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 342.7,
        "balanced": 311.1,
        "aggressive": 306.5,
    }),
    (90, "float16", 64, 4096, False, {
        "fa_tc": 153.5,
        "balanced": 169.3,
        "aggressive": 203.2,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 238450.7,
        "balanced": 196911.7,
        "aggressive": 171231.3,
    }),
    (90, "float16", 96, 8192, False, {
        "fa_tc": 834.7,
        "balanced": 873.3,
        "aggressive": 825.4,
    }),
    (90, "float16", 72, 16384, False, {
        "fa_tc": 2182.4,
        "balanced": 2222.1,
        "aggressive": 2235.8,
    }),
)  # fmt: skip
