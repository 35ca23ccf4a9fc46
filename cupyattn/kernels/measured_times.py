"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.tuning.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, queries, keys, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, int, bool, dict[str, float]], ...]

#: Every rung:
#: NVIDIA H100 80GB HBM3, revision 75339f1203.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
    (90, "float16", 64, 4096, 4096, False, {
        "unfused": 36151.1,
        "fa": 31446.2,
        "fa_warps": 13348.7,
        "fa_tc": 450.0,
        "fa_int8": 585.5,
    }),
    (90, "float16", 64, 4096, 4096, True, {
        "unfused": 36582.9,
        "fa": 16568.2,
        "fa_warps": 7079.0,
        "fa_tc": 260.8,
        "fa_int8": 299.4,
    }),
    (90, "float16", 128, 4096, 4096, False, {
        "unfused": 66593.4,
        "fa": 77747.7,
        "fa_warps": 23316.3,
        "fa_tc": 722.0,
        "fa_int8": 678.9,
    }),
    (90, "float16", 128, 4096, 4096, True, {
        "unfused": 67012.8,
        "fa": 40140.9,
        "fa_warps": 12302.2,
        "fa_tc": 405.3,
        "fa_int8": 391.1,
    }),
    (90, "float16", 256, 4096, 4096, False, {
        "unfused": 145764.4,
        "fa": 178663.7,
        "fa_warps": 76083.1,
        "fa_tc": 1373.6,
        "fa_int8": 1233.2,
    }),
    (90, "float16", 256, 4096, 4096, True, {
        "unfused": 146594.9,
        "fa": 90062.2,
        "fa_warps": 38573.1,
        "fa_tc": 754.2,
        "fa_int8": 744.6,
    }),
)  # fmt: skip

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise:
#: NVIDIA H100 80GB HBM3, revision 99c27a7de3.
#: NVIDIA H100 80GB HBM3, revision ec6615b94d.
#: NVIDIA H100 80GB HBM3, revision fb53d40436.
#: NVIDIA H200, revision 1164c3314c.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 40, 4096, 4096, False, {
        "fa_tc": 139.8,
        "balanced": 150.1,
        "aggressive": 157.6,
    }),
    (90, "float16", 64, 4096, 4096, False, {
        "fa_tc": 884.4,
        "balanced": 922.0,
        "aggressive": 1012.0,
    }),
    (90, "float16", 64, 4096, 4096, False, {
        "fa_tc": 148.0,
        "balanced": 169.5,
        "aggressive": 197.4,
    }),
    (90, "float16", 64, 8192, 8192, False, {
        "fa_tc": 1695.1,
        "balanced": 1671.9,
        "aggressive": 1745.8,
    }),
    (90, "float16", 64, 16384, 16384, False, {
        "fa_tc": 3347.1,
        "balanced": 3182.4,
        "aggressive": 3329.3,
    }),
    (90, "float16", 64, 512, 512, False, {
        "fa_tc": 156.6,
        "balanced": 233.0,
        "aggressive": 300.2,
    }),
    (90, "float16", 64, 1024, 1024, False, {
        "fa_tc": 274.6,
        "balanced": 334.6,
        "aggressive": 423.9,
    }),
    (90, "float16", 64, 2048, 2048, False, {
        "fa_tc": 475.0,
        "balanced": 519.6,
        "aggressive": 597.4,
    }),
    (90, "float16", 64, 4096, 77, False, {
        "fa_tc": 71.2,
        "balanced": 90.3,
        "aggressive": 105.1,
    }),
    (90, "float16", 64, 4096, 77, False, {
        "fa_tc": 29.3,
        "balanced": 42.4,
        "aggressive": 48.1,
    }),
    (90, "float16", 64, 17776, 17776, False, {
        "fa_tc": 6036.8,
        "balanced": 5735.4,
        "aggressive": 6230.5,
    }),
    (90, "float16", 72, 16384, 16384, False, {
        "fa_tc": 2178.9,
        "balanced": 2158.8,
        "aggressive": 2217.3,
    }),
    (90, "float16", 96, 1024, 1024, False, {
        "fa_tc": 247.9,
        "balanced": 291.5,
        "aggressive": 298.6,
    }),
    (90, "float16", 96, 2048, 2048, False, {
        "fa_tc": 398.7,
        "balanced": 435.4,
        "aggressive": 458.0,
    }),
    (90, "float16", 96, 8192, 8192, False, {
        "fa_tc": 830.8,
        "balanced": 831.9,
        "aggressive": 799.5,
    }),
    (90, "float16", 96, 512, 512, False, {
        "fa_tc": 147.8,
        "balanced": 214.3,
        "aggressive": 230.9,
    }),
    (90, "float16", 128, 4096, 4096, False, {
        "fa_tc": 718.3,
        "balanced": 647.1,
        "aggressive": 644.0,
    }),
    (90, "float16", 128, 16384, 16384, False, {
        "fa_tc": 2684.1,
        "balanced": 2234.8,
        "aggressive": 2125.8,
    }),
    (90, "float16", 128, 4608, 4608, False, {
        "fa_tc": 338.9,
        "balanced": 310.5,
        "aggressive": 307.3,
    }),
    (90, "float16", 128, 1024, 1024, False, {
        "fa_tc": 29.7,
        "balanced": 49.1,
        "aggressive": 43.8,
    }),
    (90, "float16", 128, 8192, 8192, False, {
        "fa_tc": 1365.5,
        "balanced": 1168.5,
        "aggressive": 1142.7,
    }),
    (90, "float16", 128, 8192, 8192, True, {
        "fa_tc": 728.6,
        "balanced": 645.0,
        "aggressive": 664.3,
    }),
    (90, "float16", 128, 16384, 16384, True, {
        "fa_tc": 1412.7,
        "balanced": 1193.7,
        "aggressive": 1163.1,
    }),
    (90, "float16", 128, 4096, 4096, False, {
        "fa_tc": 5613.2,
        "balanced": 5005.0,
        "aggressive": 5414.2,
    }),
    (90, "float16", 128, 32760, 32760, False, {
        "fa_tc": 26637.9,
        "balanced": 23983.6,
        "aggressive": 20278.4,
    }),
    (90, "float16", 128, 512, 512, False, {
        "fa_tc": 119.1,
        "balanced": 168.5,
        "aggressive": 185.7,
    }),
    (90, "float16", 128, 1024, 1024, False, {
        "fa_tc": 210.8,
        "balanced": 230.9,
        "aggressive": 243.7,
    }),
    (90, "float16", 128, 2048, 2048, False, {
        "fa_tc": 379.5,
        "balanced": 361.7,
        "aggressive": 371.3,
    }),
    (90, "float16", 128, 118800, 118800, False, {
        "fa_tc": 232820.5,
        "balanced": 199941.8,
        "aggressive": 170566.6,
    }),
    (90, "float16", 128, 2048, 2048, True, {
        "fa_tc": 229.5,
        "balanced": 243.4,
        "aggressive": 288.0,
    }),
    (90, "float16", 128, 4096, 4096, True, {
        "fa_tc": 409.5,
        "balanced": 382.7,
        "aggressive": 424.0,
    }),
    (90, "float16", 128, 4096, 77, False, {
        "fa_tc": 54.3,
        "balanced": 63.3,
        "aggressive": 67.7,
    }),
    (90, "float16", 256, 4096, 4096, False, {
        "fa_tc": 708.7,
        "balanced": 589.9,
        "aggressive": 572.4,
    }),
    (90, "float16", 256, 8192, 8192, False, {
        "fa_tc": 1385.5,
        "balanced": 1092.0,
        "aggressive": 1012.4,
    }),
    (90, "float16", 256, 16384, 16384, False, {
        "fa_tc": 2728.6,
        "balanced": 2067.9,
        "aggressive": 1840.9,
    }),
    (90, "float16", 256, 512, 512, False, {
        "fa_tc": 127.3,
        "balanced": 200.0,
        "aggressive": 245.5,
    }),
    (90, "float16", 256, 1024, 1024, False, {
        "fa_tc": 208.7,
        "balanced": 241.0,
        "aggressive": 280.1,
    }),
    (90, "float16", 256, 2048, 2048, False, {
        "fa_tc": 373.4,
        "balanced": 365.9,
        "aggressive": 385.7,
    }),
)  # fmt: skip
