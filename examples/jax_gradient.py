"""``jax.grad`` through attention, under ``jax.jit``, and ``jax.vmap`` over an additional axis.

Run it with ``python examples/jax_gradient.py``. It runs on JAX's device; on a CPU the mirror runs.
"""

import sys

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    sys.exit(f"jax_gradient.py needs JAX: pip install jax ({error}).")

from cupyattn.interop.jax import attention


def loss(q: jax.Array, k: jax.Array, v: jax.Array, target: jax.Array) -> jax.Array:
    """Return the mean squared distance of causal attention from a target."""
    o = attention(q, k, v, causal=True)
    return jnp.square(o.astype(jnp.float32) - target).mean()


def main() -> None:
    """Run gradient descent on q, k and v."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (1, 2, 128, 64)  # (batch, heads, len, head_dim)
    *operands, target = (jax.random.normal(key, shape) for key in keys)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    for i in range(5):
        found, gradients = step(*(x.astype(jnp.bfloat16) for x in operands), target)
        operands = [x - 300 * g.astype(x.dtype) for x, g in zip(operands, gradients, strict=True)]
        print(f"step {i}: loss {found:.4f}")

    q, k, v = (x.astype(jnp.bfloat16) for x in operands)
    several = jax.vmap(attention, in_axes=(0, None, None))(jnp.stack([q, -q]), k, v)
    print(f"two queries against the same keys, as one call: {several.shape}")


if __name__ == "__main__":
    main()
