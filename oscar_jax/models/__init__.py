"""Models: the decoder, its weights and its tokenizer, loaded from files."""

from oscar_jax.models.loading import Loaded, load
from oscar_jax.models.tokenizer import Tokenizer
from oscar_jax.models.transformer import Attend, Decoder, causal_attend

__all__ = ["Attend", "Decoder", "Loaded", "Tokenizer", "causal_attend", "load"]
