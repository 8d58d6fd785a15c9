"""Model architectures, one file each, in torch: weights are shared, state is passed in. No streams and no files.

Imports only the root modules of `engine`.
"""
