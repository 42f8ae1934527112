"""What a quantised cache costs a model: the parts of ``python -m oscar_jax.evaluate``.

A part is a module that turns a rotation into numbers, each against the same model with BF16 pages:
``likelihood`` (perplexity, KL, top-1 by domain and position), ``recall`` (spans, keys and passages
that lie in the pages), ``answers`` (strict formats, greedily) and ``drift`` (long generations).
``suite`` runs them, and the scorer's own check of decode against prefill.
"""
