"""Model architectures in torch, and the layers and kernels they share: weights are shared, state is passed in.

Runners and background models in `engine/runner` use them. No streams, no threads, no downloads. Imports only the root
modules of `engine`.
"""
