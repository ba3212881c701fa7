"""Published contrastive losses held to the cases of ``contrastile verify``.

docs/benchmarks/conformance.md says what came out.
Read ``adapters`` first: each package's loss as a callable, and what is claimed for it. ``table`` runs the cases and
sums them up, ``reproduce`` runs the few lines of each fact in ``facts``, and ``stubs`` lets packages run where
torchvision or a GPU is missing.
"""
