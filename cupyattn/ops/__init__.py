"""The operations that users call: attention, its gradients, quantising, products, layers."""
