"""Sparse autoencoders: read their files, compute latents of rows, and make edits of latents.

A file of SAELens or Gemma Scope goes in. `SparseEncoder` says which latents are active in captured
rows, and `SparseAutoencoder` also makes the edits that change them in an engine.
"""

from ._encoder import SparseAutoencoder, SparseEncoder
from ._files import read_autoencoder, read_sae

__all__ = ["SparseAutoencoder", "SparseEncoder", "read_autoencoder", "read_sae"]
