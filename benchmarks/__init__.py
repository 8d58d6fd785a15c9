"""The measurements behind the figures of the documentation. `python -m benchmarks` lists them."""
