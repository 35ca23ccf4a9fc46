"""An MLP of INT8 layers under ``jax.jit``, with activation and residual sum inside the products.

Run it with ``python examples/jax_int8_linear.py``. It runs on JAX's device; on a CPU the
mirror runs.
"""

import sys

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    sys.exit(f"jax_int8_linear.py needs JAX: pip install jax ({error}).")

from cupyattn.interop.jax import Int8Linear


@jax.jit
def mlp(layers: tuple[Int8Linear, Int8Linear], x: jax.Array) -> jax.Array:
    """Return x plus an MLP of x; the products apply GELU and add x."""
    first, second = layers
    return second(first(x), residual=x)


def main() -> None:
    """Compare an MLP of INT8 codes with the same MLP in 16 bits."""
    keys = jax.random.split(jax.random.key(0), 3)
    w1 = jax.random.normal(keys[0], (512, 256)) / 16  # (out, in)
    w2 = jax.random.normal(keys[1], (256, 512)) / 22
    x = jax.random.normal(keys[2], (2, 64, 256)).astype(jnp.bfloat16)  # any axes in front
    w1, w2 = w1.astype(jnp.bfloat16), w2.astype(jnp.bfloat16)

    layers = (
        Int8Linear.from_weight(w1, strategy="channel", activation="gelu_tanh"),
        Int8Linear.from_weight(w2, strategy="channel"),
    )
    y = mlp(layers, x)
    wide = jax.nn.gelu((x @ w1.T).astype(jnp.float32)).astype(x.dtype)
    expected = (x + wide @ w2.T).astype(jnp.float32)
    away = jnp.linalg.norm(y.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) / (w1.nbytes + w2.nbytes)
    print(f"INT8 {y.shape} is {away:.2%} away, its weights take {held:.0%}")


if __name__ == "__main__":
    main()
