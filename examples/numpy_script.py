"""Attention of NumPy arrays: a rung by name, its error against its bound, its gradients.

Run it with ``python examples/numpy_script.py``. No device is needed: the mirror rounds at the same
places as the kernels. With CUPYATTN_INTERPRET=1 the interpreter runs the kernels, in minutes.
"""

import numpy as np

import cupyattn as ca


def main() -> None:
    """Run a full-accuracy rung and the INT8 rung on the same arrays, and compare them."""
    rng = np.random.default_rng(0)
    shape = (1, 4, 256, 64)  # (batch, heads, len, head_dim)
    q, k, v, d_out = rng.standard_normal((4, *shape)).astype(np.float16)

    o, lse = ca.attention(q, k, v, causal=True, return_lse=True)
    print(ca.testing.judge(o, q, k, v, variant="fa_tc", causal=True))

    o8 = ca.attention(q, k, v, causal=True, variant="fa_int8")
    error = np.linalg.norm((o8 - o).astype(np.float32)) / np.linalg.norm(o.astype(np.float32))
    print(f"fa_int8 is {error:.2%} away")

    dq, dk, dv = ca.attention_backward(d_out, q, k, v, o, lse, causal=True)
    print(f"gradients of shapes {dq.shape}, {dk.shape}, {dv.shape}")


if __name__ == "__main__":
    main()
