"""Top-k ids of several kinds."""

import numpy as np

# mixed: with duplicates, -1 and ids past the last expert
ROUTINGS = ("random", "zipf", "one", "none", "mixed")


def make_ids(routing: str, tokens: int, top_k: int, num_experts: int, seed) -> np.ndarray:
    """[T, K] int64."""
    generator = np.random.default_rng(seed)
    shape = (tokens, top_k)
    if routing == "one":
        return np.full(shape, num_experts // 2, np.int64)
    if routing == "none":
        return np.full(shape, -1, np.int64)
    if routing == "mixed":
        return generator.integers(-2, num_experts + 3, shape)
    if top_k > num_experts:
        return generator.integers(0, num_experts, shape)
    # K different experts: the K largest of randomly disturbed popularities.
    popularity = np.zeros(num_experts)
    if routing == "zipf":
        popularity = -np.log(np.arange(1, num_experts + 1))
    scores = popularity + generator.gumbel(size=(tokens, num_experts))
    return np.argpartition(scores, num_experts - top_k, axis=1)[:, num_experts - top_k :]
