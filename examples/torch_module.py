"""A torch module with cupyattn's attention, trained for a few steps, then with INT8 weights.

Run it with ``python examples/torch_module.py``. Without a CUDA device, tensors stay on the CPU, and
attention runs on the mirror.
"""

import sys

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    sys.exit(f"torch_module.py needs torch: pip install torch ({error}).")

from cupyattn.interop import torch as interop

HEADS, WIDTH = 4, 256


class Block(nn.Module):
    """Self-attention with a residual; one projection gives queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to (batch, len, width)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        o = interop.attention(q, k, v, causal=True, layout="BSHD")
        return x + self.out(o.flatten(2))


def main() -> None:
    """Train the block to repeat the previous token, then make its weights INT8."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = Block().to(device, torch.bfloat16)
    x = torch.randn(2, 128, WIDTH, device=device, dtype=torch.bfloat16)
    target = x.roll(1, dims=1)
    optimizer = torch.optim.Adam(block.parameters(), lr=3e-3)
    for step in range(10):
        loss = (block(x) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")

    with torch.no_grad():
        y = block(x)
        handle = interop.replace_linear_with_int8(block)
        print(handle.report())
        print(f"INT8 weights are {((block(x) - y).norm() / y.norm()).item():.2%} away")


if __name__ == "__main__":
    main()
