"""Model architectures in torch, and the layers and kernels they share.

A model holds weights only; the state of a stream is passed in and returned. Runners and background models in
`engine/runner` use them. No streams, no threads, no downloads. Imports only the root modules of `engine`.
"""
